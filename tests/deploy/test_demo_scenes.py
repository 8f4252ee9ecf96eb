"""Scenes: one value draws one picture, captions say what is drawn, the split is real."""

from __future__ import annotations

import random
import re

import pytest

from deploy.demo import scenes
from deploy.demo.scenes import Item, Scene


def make_scene(seed: int, *, held_out: bool = False) -> Scene:
    return scenes.random_scene(random.Random(seed), held_out=held_out)


def test_equal_seeds_give_equal_scenes_and_pixels() -> None:
    for seed in range(5):
        first, second = make_scene(seed), make_scene(seed)
        assert first == second
        assert scenes.draw(first).tobytes() == scenes.draw(second).tobytes()


def test_scale_changes_the_size_alone() -> None:
    scene = make_scene(1)
    small, large = scenes.draw(scene), scenes.draw(scene, 4)
    assert small.size == (scene.width, scene.height)
    assert large.size == (scene.width * 4, scene.height * 4)
    assert large.reduce(4).tobytes() == small.tobytes()


def test_pictures_come_in_several_shapes() -> None:
    sizes = {(s.width, s.height) for s in map(make_scene, range(200))}
    assert len(sizes) == len(scenes.SIDES) ** 2


def parse(caption: str) -> list[tuple[str, str, str]]:
    found = re.findall(r"an? (\w+) (\w+) at the ([a-z ]+?)(?=,| and|\.)", caption)
    return [(colour, shape, place) for colour, shape, place in found]


@pytest.mark.parametrize("seed", range(30))
def test_captions_name_exactly_the_items(seed: int) -> None:
    scene = make_scene(seed)
    text = scenes.caption(scene)
    expected = [(i.colour, i.shape, scenes.PLACES[i.place]) for i in scene.items]
    assert parse(text) == expected
    assert scenes.NUMBERS[len(scene.items)] in text


def test_a_caption_word_for_word() -> None:
    items = (Item(0, "red", "star"), Item(4, "orange", "cross"), Item(8, "blue", "circle"))
    assert scenes.caption(Scene(items, 64, 80, 0)) == (
        "The image shows three shapes: a red star at the top left, an orange cross at the center "
        "and a blue circle at the bottom right."
    )


@pytest.mark.parametrize("seed", range(10))
def test_items_are_painted_where_the_scene_says(seed: int) -> None:
    scene = make_scene(seed)
    image = scenes.draw(scene)
    for item in scene.items:
        row, column = divmod(item.place, 3)
        x = int((column + 0.5) * scene.width / 3)
        y = int((row + 0.5) * scene.height / 3)
        pixel = image.getpixel((x, y))
        assert isinstance(pixel, tuple)
        distance = [abs(a - b) for a, b in zip(pixel, scenes.COLOURS[item.colour], strict=True)]
        assert max(distance) <= 25


def test_training_and_held_out_scenes_are_disjoint_whatever_size_and_jitter() -> None:
    """Guards against a split by the whole value, which would leak resized arrangements."""
    training = {make_scene(seed).items for seed in range(500)}
    held_out = {make_scene(seed, held_out=True).items for seed in range(100)}
    assert not training & held_out
    for seed in range(20):
        scene = make_scene(seed, held_out=True)
        assert scenes.is_held_out(Scene(scene.items, 96, 64, scene.jitter + 1))
