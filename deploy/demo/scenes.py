"""Scenes: one to three coloured shapes on a board of three by three cells.

Owns the palette, the drawing and the words for a scene. Knows nothing of questions, tokens or
models. Invariants: a scene is a value (the same scene draws the same pixels), its items stand in
reading order in different cells, and `is_held_out` depends on the items alone, so an arrangement
kept for measuring is never seen in training, at any picture size or with any jitter.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from typing import Final, NamedTuple

from PIL import Image, ImageDraw

COLOURS: Final[dict[str, tuple[int, int, int]]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 70),
    "blue": (50, 90, 220),
    "yellow": (240, 200, 40),
    "purple": (150, 60, 180),
    "orange": (240, 130, 30),
    "black": (30, 30, 35),
}
SHAPES: Final = ("circle", "square", "triangle", "star", "cross")
PLACES: Final = (
    "top left", "top", "top right",
    "left", "center", "right",
    "bottom left", "bottom", "bottom right",
)  # fmt: skip
ROWS: Final = ("top", "middle", "bottom")
NUMBERS: Final = ("zero", "one", "two", "three")
SIDES: Final = (64, 80, 96)  # pixels; every pair of them is a picture size
MAX_ITEMS: Final = 3
OVERSAMPLING: Final = 4
HELD_OUT_SHARE: Final = 10  # one arrangement in so many is kept for measuring


class Item(NamedTuple):
    """One shape; `place` indexes `PLACES` row by row."""

    place: int
    colour: str
    shape: str


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows, its size in pixels, and the seed of its small irregularities."""

    items: tuple[Item, ...]
    width: int
    height: int
    jitter: int


def hash_is_held_out(key: str) -> bool:
    """Say whether a key belongs to the measuring side of the split, in every process alike."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0


def is_held_out(scene: Scene) -> bool:
    """Say whether training must not see this scene's arrangement."""
    return hash_is_held_out(repr([tuple(item) for item in scene.items]))


def random_scene(rng: random.Random, *, held_out: bool) -> Scene:
    """Draw a scene from one side of the split."""
    while True:
        places = sorted(rng.sample(range(len(PLACES)), rng.randint(1, MAX_ITEMS)))
        items = tuple(Item(p, rng.choice(list(COLOURS)), rng.choice(SHAPES)) for p in places)
        scene = Scene(items, rng.choice(SIDES), rng.choice(SIDES), rng.getrandbits(32))
        if is_held_out(scene) == held_out:
            return scene


def draw(scene: Scene, scale: int = 1) -> Image.Image:
    """Draw a scene; `scale` 1, 2 or 4 gives the same picture in finer pixels."""
    rng = random.Random(scene.jitter)
    shade = rng.randint(238, 255)
    width, height = scene.width * OVERSAMPLING, scene.height * OVERSAMPLING
    image = Image.new("RGB", (width, height), (shade, shade, shade))
    canvas = ImageDraw.Draw(image)
    _draw_board(canvas, width, height)
    for item in scene.items:
        _draw_item(canvas, item, width, height, rng)
    return image if scale == OVERSAMPLING else image.reduce(OVERSAMPLING // scale)


def _draw_board(canvas: ImageDraw.ImageDraw, width: int, height: int) -> None:
    """Draw cell lines and a darker frame: a cell's borders then tell where it lies."""
    line = OVERSAMPLING
    for i in (1, 2):
        x, y = width * i // 3, height * i // 3
        canvas.line((x, 0, x, height), fill=(190, 190, 190), width=line)
        canvas.line((0, y, width, y), fill=(190, 190, 190), width=line)
    canvas.rectangle((0, 0, width - 1, height - 1), outline=(90, 90, 90), width=line)


def _draw_item(
    canvas: ImageDraw.ImageDraw, item: Item, width: int, height: int, rng: random.Random
) -> None:
    row, column = divmod(item.place, 3)
    cell_w, cell_h = width / 3, height / 3
    x = (column + 0.5 + rng.uniform(-0.06, 0.06)) * cell_w
    y = (row + 0.5 + rng.uniform(-0.06, 0.06)) * cell_h
    radius = min(cell_w, cell_h) * rng.uniform(0.33, 0.4)
    red, green, blue = (c + rng.randint(-12, 12) for c in COLOURS[item.colour])
    fill = (max(red, 0), max(green, 0), max(blue, 0))
    if item.shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    else:
        outline = [(x + radius * dx, y + radius * dy) for dx, dy in _OUTLINES[item.shape]]
        canvas.polygon(outline, fill=fill)


def _star() -> list[tuple[float, float]]:
    points = []
    for i in range(10):
        reach = 1.15 if i % 2 == 0 else 0.45
        angle = math.pi * i / 5
        points.append((reach * math.sin(angle), -reach * math.cos(angle)))
    return points


# Outlines around (0, 0) with a reach of about 1; y grows downwards.
_OUTLINES: Final[dict[str, list[tuple[float, float]]]] = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0.0, -1.05), (1.1, 0.9), (-1.1, 0.9)],
    "star": _star(),
    "cross": [
        (-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35), (1, 0.35), (0.35, 0.35),
        (0.35, 1), (-0.35, 1), (-0.35, 0.35), (-1, 0.35), (-1, -0.35), (-0.35, -0.35),
    ],
}  # fmt: skip


def join(parts: list[str]) -> str:
    """Join phrases as in "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def noun(colour: str, shape: str) -> str:
    """Name a shape with its article, as in "an orange star"."""
    return f"{'an' if colour == 'orange' else 'a'} {colour} {shape}"


def phrase(item: Item) -> str:
    """Name an item and its place."""
    return f"{noun(item.colour, item.shape)} at the {PLACES[item.place]}"


def count_phrase(count: int) -> str:
    """Name a number of shapes, as in "one shape" or "two shapes"."""
    return f"{NUMBERS[count]} shape{'' if count == 1 else 's'}"


def caption(scene: Scene, subject: str = "The image") -> str:
    """Describe a scene in one sentence, in reading order."""
    parts = [phrase(item) for item in scene.items]
    return f"{subject} shows {count_phrase(len(parts))}: {join(parts)}."
