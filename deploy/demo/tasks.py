"""Tasks: prompts with their one right answer, and conversations made of them.

Owns the wording of every question and the mix of kinds. Knows nothing of tokens, pixels or
models. Invariants: an answer follows from the prompt and the scenes alone, so a correct model is
measurable by equality; and training never holds a held-out scene or a held-out text prompt (a
text prompt is held out by the hash of its wording, a picture prompt by its scenes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from deploy.demo import scenes

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from deploy.demo.scenes import Scene


class Turn(NamedTuple):
    """One question and its answer."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of user and assistant; the pictures belong to the first user turn."""

    kind: str
    scenes: tuple[Scene, ...]
    turns: tuple[Turn, ...]
    system: str | None = None
    images_last: bool = False  # the pictures follow the first prompt's text


DESCRIBE: Final = (
    "Describe the image.",
    "Describe this picture.",
    "What is in the image?",
    "What is in this picture?",
    "What do you see?",
)
SYSTEMS: Final = ("You are a helpful assistant.", "Answer briefly.", "You describe pictures.")
WORDS: Final = (
    "apple", "bird", "boat", "book", "bread", "cat", "chair", "cloud", "clock", "door", "drum",
    "fish", "flag", "fox", "glass", "hat", "horse", "house", "key", "lamp", "leaf", "moon",
    "mouse", "nest", "owl", "pen", "plum", "rain", "ring", "river", "road", "rose", "sand",
    "ship", "shoe", "snow", "song", "spoon", "stone", "sun", "table", "tent", "tree", "wolf",
)  # fmt: skip
ORDINALS: Final = ("first", "second", "third", "fourth", "fifth")
SYLLABLES: Final = tuple(c + v for c in "bdklmnst" for v in "aeiou")
CHAT: Final = (
    Turn("Hello", "Hello! Show me a picture, or give me a list of words."),
    Turn("Hi!", "Hello! Show me a picture, or give me a list of words."),
    Turn("Who are you?", "I am a tiny demo model. I know shapes, colours, numbers and words."),
    Turn("What can you do?", "I can describe shapes, count, add, spell and repeat words."),
    Turn("Thank you.", "You are welcome."),
)


# -- one picture


def describe(rng: random.Random, scene: Scene) -> Turn:
    """Ask for the caption."""
    return Turn(rng.choice(DESCRIBE), scenes.caption(scene))


def describe_rows(_rng: random.Random, scene: Scene) -> Turn:
    """Ask for a description row by row: the long answer about a picture."""
    parts = []
    for row, name in enumerate(scenes.ROWS):
        inside = [item for item in scene.items if item.place // 3 == row]
        nouns = [scenes.phrase(item) for item in inside]
        parts.append(f"{name} row: {scenes.join(nouns) if nouns else 'nothing'}.")
    return Turn("Describe the image row by row.", " ".join(parts))


def ask_count(_rng: random.Random, scene: Scene) -> Turn:
    """Ask how many shapes there are."""
    count = len(scene.items)
    verb = "is" if count == 1 else "are"
    return Turn("How many shapes are there?", f"There {verb} {scenes.count_phrase(count)}.")


def ask_cell(rng: random.Random, scene: Scene) -> Turn:
    """Ask what lies in one cell, as often an empty one as a full one."""
    place = rng.choice(scene.items).place if rng.random() < 0.6 else rng.randrange(9)
    found = [scenes.noun(i.colour, i.shape) for i in scene.items if i.place == place]
    name = scenes.PLACES[place]
    return Turn(
        f"What is at the {name}?", f"There is {found[0] if found else 'nothing'} at the {name}."
    )


def ask_place(rng: random.Random, scene: Scene) -> Turn:
    """Ask where a shape of a given colour and kind is."""
    item = rng.choice(scene.items)
    same = [i for i in scene.items if i[1:] == item[1:]]
    places = scenes.join([f"at the {scenes.PLACES[i.place]}" for i in same])
    name = f"{item.colour} {item.shape}"
    return Turn(f"Where is the {name}?", f"The {name} is {places}.")


def ask_colour(rng: random.Random, scene: Scene) -> Turn:
    """Ask for the colour of every shape of one kind."""
    shape = rng.choice(scene.items).shape
    found = scenes.join([i.colour for i in scene.items if i.shape == shape])
    return Turn(f"What colour is the {shape}?", f"The {shape} is {found}.")


def ask_exists(rng: random.Random, scene: Scene) -> Turn:
    """Ask whether a given shape is there; half of the time it is made up."""
    item = rng.choice(scene.items)
    colour, shape = item.colour, item.shape
    if rng.random() < 0.5:
        colour, shape = rng.choice(list(scenes.COLOURS)), rng.choice(scenes.SHAPES)
    found = [i for i in scene.items if (i.colour, i.shape) == (colour, shape)]
    name = scenes.noun(colour, shape)
    places = scenes.join([f"at the {scenes.PLACES[i.place]}" for i in found]) if found else ""
    answer = f"Yes, there is {name} {places}." if found else f"No, there is no {colour} {shape}."
    return Turn(f"Is there {name}?", answer)


# -- two pictures


def describe_each(_rng: random.Random, first: Scene, second: Scene) -> Turn:
    """Ask for both captions."""
    captions = [scenes.caption(s, f"Image {i}") for i, s in enumerate((first, second), 1)]
    return Turn("Describe each image.", " ".join(captions))


def describe_one(rng: random.Random, first: Scene, second: Scene) -> Turn:
    """Ask for one of the two captions."""
    index = rng.randrange(2)
    answer = scenes.caption((first, second)[index], f"Image {index + 1}")
    return Turn(f"Describe image {index + 1}.", answer)


def compare_counts(_rng: random.Random, first: Scene, second: Scene) -> Turn:
    """Ask which picture shows more."""
    prompt = "Which image has more shapes?"
    counts = (len(first.items), len(second.items))
    if counts[0] == counts[1]:
        return Turn(prompt, f"Both images have {scenes.count_phrase(counts[0])}.")
    more = 0 if counts[0] > counts[1] else 1
    words = f"{scenes.NUMBERS[counts[more]]} against {scenes.NUMBERS[counts[1 - more]]}"
    return Turn(prompt, f"Image {more + 1} has more shapes: {words}.")


def shared_colours(_rng: random.Random, first: Scene, second: Scene) -> Turn:
    """Ask for the colours that both pictures show."""
    other = {item.colour for item in second.items}
    found = [c for c in scenes.COLOURS if c in other and c in {i.colour for i in first.items}]
    answer = f"Both images have {scenes.join(found)}." if found else "The images share no colour."
    return Turn("Which colours are in both images?", answer)


# -- text alone


def count_up(rng: random.Random) -> Turn:
    """Ask to count, up or down."""
    start, steps = rng.randint(0, 30), rng.randint(3, 16)
    numbers = list(range(start, start + steps + 1))
    if rng.random() < 0.3:
        numbers.reverse()
    verb = "Count" if numbers[0] < numbers[-1] else "Count down"
    prompt = f"{verb} from {numbers[0]} to {numbers[-1]}."
    return Turn(prompt, f"Counting: {', '.join(map(str, numbers))}.")


def add(rng: random.Random) -> Turn:
    """Ask for a sum of two small numbers."""
    left, right = rng.randint(0, 20), rng.randint(0, 20)
    return Turn(f"What is {left} + {right}?", f"The sum is {left + right}.")


def spell(rng: random.Random) -> Turn:
    """Ask to spell an invented word, which cannot be learnt by heart."""
    word = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))
    return Turn(f"Spell {word}.", f"Spelled: {' '.join(word)}.")


def _list_of_words(rng: random.Random, low: int, high: int) -> list[str]:
    return rng.sample(WORDS, rng.randint(low, high))


def repeat(rng: random.Random) -> Turn:
    """Ask to repeat a list."""
    words = " ".join(_list_of_words(rng, 3, 12))
    return Turn(f"Repeat: {words}.", f"Repeated: {words}.")


def reverse(rng: random.Random) -> Turn:
    """Ask for a list in reversed order."""
    words = _list_of_words(rng, 3, 8)
    return Turn(f"Reverse: {' '.join(words)}.", f"Reversed: {' '.join(reversed(words))}.")


def recall(rng: random.Random) -> Turn:
    """Ask for one word of a list."""
    words = _list_of_words(rng, 3, 5)
    index = rng.randrange(len(words))
    prompt = f"What is the {ORDINALS[index]} word of {' '.join(words)}?"
    return Turn(prompt, f"The {ORDINALS[index]} word is {words[index]}.")


SINGLE: Final[dict[str, Callable[[random.Random, Scene], Turn]]] = {
    "describe": describe,
    "describe_rows": describe_rows,
    "ask_count": ask_count,
    "ask_cell": ask_cell,
    "ask_place": ask_place,
    "ask_colour": ask_colour,
    "ask_exists": ask_exists,
}
PAIR: Final[dict[str, Callable[[random.Random, Scene, Scene], Turn]]] = {
    "describe_each": describe_each,
    "describe_one": describe_one,
    "compare_counts": compare_counts,
    "shared_colours": shared_colours,
}
TEXT: Final[dict[str, Callable[[random.Random], Turn]]] = {
    "count": count_up,
    "add": add,
    "spell": spell,
    "repeat": repeat,
    "reverse": reverse,
    "recall": recall,
}
KINDS: Final = (*SINGLE, *PAIR, *TEXT)


def text_turn(rng: random.Random, kind: str, *, held_out: bool) -> Turn:
    """Draw a text task from one side of the split."""
    while True:
        turn = TEXT[kind](rng)
        if scenes.hash_is_held_out(turn.prompt) == held_out:
            return turn


def held_out_conversation(rng: random.Random, kind: str) -> Conversation:
    """Draw a single-turn conversation of one kind from the measuring side."""
    count = 1 if kind in SINGLE else 2 if kind in PAIR else 0
    shown = tuple(scenes.random_scene(rng, held_out=True) for _ in range(count))
    if kind in SINGLE:
        turn = SINGLE[kind](rng, shown[0])
    elif kind in PAIR:
        turn = PAIR[kind](rng, shown[0], shown[1])
    else:
        turn = text_turn(rng, kind, held_out=True)
    return Conversation(kind, shown, (turn,))


def training_conversation(rng: random.Random) -> Conversation:
    """Draw a conversation of several turns from the training side.

    Several questions share one picture: the picture's cost is paid once, and short questions
    teach the vision tower long before whole captions come out right.
    """
    draw = rng.random()
    system = rng.choice(SYSTEMS) if rng.random() < 0.1 else None
    count = 1 if draw < 0.45 else 2 if draw < 0.65 else 0
    shown = tuple(scenes.random_scene(rng, held_out=False) for _ in range(count))
    turns: list[Turn] = []
    if count == 1:
        turns += [SINGLE[k](rng, shown[0]) for k in rng.sample(list(SINGLE), 3)]
        if rng.random() < 0.5:
            turns.append(describe(rng, shown[0]))
    elif count == 2:
        turns += [PAIR[k](rng, *shown) for k in rng.sample(list(PAIR), 2)]
    else:
        # Where to stop counting is learnt late: it gets a double share.
        kinds = rng.choices([*TEXT, "count"], k=rng.randint(3, 5))
        turns += [text_turn(rng, kind, held_out=False) for kind in kinds]
        if rng.random() < 0.1:
            turns.insert(rng.randrange(len(turns) + 1), rng.choice(CHAT))
    rng.shuffle(turns)
    return Conversation("training", shown, tuple(turns), system, rng.random() < 0.15)
