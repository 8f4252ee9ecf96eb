"""Tasks: answers follow from prompts, and training never draws a held-out prompt."""

from __future__ import annotations

import random
import re

import pytest

from deploy.demo import scenes, tasks


def test_training_conversations_keep_to_their_side_of_the_split() -> None:
    rng = random.Random(0)
    seen_text = 0
    for _ in range(500):
        conversation = tasks.training_conversation(rng)
        assert not any(scenes.is_held_out(scene) for scene in conversation.scenes)
        if not conversation.scenes:
            prompts = [t.prompt for t in conversation.turns if t not in tasks.CHAT]
            assert not any(scenes.hash_is_held_out(prompt) for prompt in prompts)
            seen_text += len(prompts)
    assert seen_text > 100


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_held_out_conversations_are_held_out(kind: str) -> None:
    rng = random.Random(1)
    for _ in range(10):
        conversation = tasks.held_out_conversation(rng, kind)
        assert len(conversation.turns) == 1
        assert all(scenes.is_held_out(scene) for scene in conversation.scenes)
        if not conversation.scenes:
            assert scenes.hash_is_held_out(conversation.turns[0].prompt)


def test_equal_seeds_give_equal_conversations() -> None:
    first = [tasks.training_conversation(random.Random(s)) for s in range(20)]
    second = [tasks.training_conversation(random.Random(s)) for s in range(20)]
    assert first == second


@pytest.mark.parametrize("seed", range(20))
def test_text_answers_are_right(seed: int) -> None:
    rng = random.Random(seed)
    left, right = map(int, re.findall(r"\d+", (turn := tasks.add(rng)).prompt))
    assert turn.answer == f"The sum is {left + right}."
    first, last = map(int, re.findall(r"\d+", (turn := tasks.count_up(rng)).prompt))
    step = 1 if first < last else -1
    numbers = range(first, last + step, step)
    assert turn.answer == f"Counting: {', '.join(map(str, numbers))}."
    turn = tasks.spell(rng)
    letters = turn.answer.removeprefix("Spelled: ").replace(" ", "")
    assert letters == turn.prompt.removeprefix("Spell ")
    turn = tasks.reverse(rng)
    words = turn.prompt.removeprefix("Reverse: ").rstrip(".").split()
    assert turn.answer.removeprefix("Reversed: ").rstrip(".").split() == words[::-1]


@pytest.mark.parametrize("seed", range(20))
def test_questions_about_a_scene_are_answered_from_it(seed: int) -> None:
    rng = random.Random(seed)
    scene = scenes.random_scene(rng, held_out=False)
    item = scene.items[0]
    lone = scenes.Scene((item,), 64, 64, 0)
    name, place = f"{item.colour} {item.shape}", scenes.PLACES[item.place]
    assert tasks.ask_place(rng, lone).answer == f"The {name} is at the {place}."
    assert tasks.ask_count(rng, lone).answer == "There is one shape."
    rows = tasks.describe_rows(rng, scene).answer
    assert all(scenes.phrase(each) in rows for each in scene.items)
    count = tasks.compare_counts(rng, scene, lone).answer
    assert ("Both images" in count) == (len(scene.items) == 1)
