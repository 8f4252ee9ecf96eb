"""Images and videos in a request: positions, features, caches, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from tests.workers.tiny import Part, Video
from workers.batch_info import ForwardMode, RopeTable, SequenceSpan
from workers.config import ModelConfig
from workers.contracts import GenerationRequest, VideoInput
from workers.errors import InvalidRequest
from workers.models.families import ModelAdapter
from workers.models.loader import load_model
from workers.models.runner import ModelRunner

CPU = torch.device("cpu")
FAMILIES = sorted(tiny.VIDEO_FAMILIES)
# One of each kind of adapter, where the mixture of experts makes no difference.
KINDS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]


def _adapter(path: str) -> ModelAdapter:
    return load_model(ModelConfig(path), CPU).adapter


def _request(family: str, seed: int, parts: Sequence[Part], **sampling: Any) -> GenerationRequest:
    return tiny.request("r", *tiny.prompt_for(family, seed, parts), **sampling)


def _table(adapter: ModelAdapter, request: GenerationRequest) -> RopeTable:
    table = adapter.rope_table(request.prompt_ids, request.media)
    assert table is not None
    return table


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(
    "parts",
    [
        [6, (3, 4), 5],
        [(2, 3), 9],
        [8, (4, 2)],
        [4, (2, 2), (3, 5), 6],
        [(2, 2), 3, (1, 4), (4, 1), 2, (3, 3), 1, (2, 5), 4],
        [3, Video(4, 2, 3, 1.5), (1, 3), 2, Video(8, 1, 2, 2.0)],
    ],
    ids=["one", "first", "last", "adjacent", "five", "videos"],
)
def test_a7_the_table_is_the_librarys(
    checkpoints: Checkpoints, family: str, parts: list[Part]
) -> None:
    """A7: start indices were added into one number, images 2..n got flat text positions."""
    path = checkpoints(family)
    request = _request(family, 1, parts)
    table = _table(_adapter(path), request)
    ids = [*request.prompt_ids, *range(2, 12)]
    expected = reference.positions(path, request, ids)
    assert torch.equal(table.prompt, expected[:, : len(request.prompt_ids)])
    after = torch.arange(len(request.prompt_ids), len(ids)) + table.delta
    assert torch.equal(after.expand(3, -1), expected[:, len(request.prompt_ids) :])


def _temporal(table: RopeTable, video: VideoInput) -> list[int]:
    """Temporal position of each step of the grid, from the video's first."""
    rows = torch.cat([table.prompt[0, start:end] for start, end in video.runs]).unique()
    return (rows - rows[0]).tolist()


def test_a10_the_frame_rate_reaches_the_positions(checkpoints: Checkpoints) -> None:
    """A10: seconds per grid were accepted but not passed on at prefill."""
    adapter = _adapter(checkpoints("qwen2_5_vl"))
    tables = {}
    for fps in (1, 4):
        # Two frames a step; two positions a second.
        request = _request("qwen2_5_vl", 3, [4, Video(5, 2, 3, 2 / fps), 6])
        tables[fps] = _table(adapter, request)
        steps = _temporal(tables[fps], request.videos[0])
        assert steps == [0, 4, 8, 12, 16] if fps == 1 else [0, 1, 2, 3, 4]
    assert not torch.equal(tables[1].prompt, tables[4].prompt)


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, 2.0), (1.5, 3.0), (2.75, 5.5), (10.0, 20.0)])
def test_a11_positions_of_a_video_by_hand(
    checkpoints: Checkpoints, seconds: float, steps: float
) -> None:
    """A11: a refactor broke temporal positions; an interval of 0.083 s rounded to 0 and hid it."""
    adapter = _adapter(checkpoints("qwen2_5_vl"))
    request = _request("qwen2_5_vl", 3, [4, Video(3, 2, 4, seconds), 6])
    table = _table(adapter, request)
    start = request.videos[0].start
    assert start == 5  # four tokens and the vision start
    by_hand = [
        [start + int(t * steps), start + h, start + w]
        for t in range(3)
        for h in range(2)
        for w in range(4)
    ]
    assert table.prompt[:, start : request.videos[0].end].T.tolist() == by_hand


# A step of Qwen3-VL takes max(2, 4) positions, and four tokens of frame and time stamp follow it.
@pytest.mark.parametrize(("family", "steps"), [("qwen2_vl", [0, 1, 2]), ("qwen3_vl", [0, 8, 16])])
def test_a10_families_without_a_clock_ignore_it(
    checkpoints: Checkpoints, family: str, steps: list[int]
) -> None:
    """A10: Qwen2-VL counts steps, and Qwen3-VL reads time stamps in the text."""
    adapter = _adapter(checkpoints(family))
    for seconds in (2.0, 0.5):
        request = _request(family, 3, [4, Video(3, 2, 4, seconds), 6])
        assert _temporal(_table(adapter, request), request.videos[0]) == steps


class _Swapped:
    """An adapter's positions with two axes taken for each other."""

    def __init__(self, adapter: ModelAdapter, first: int, second: int) -> None:
        self._position_ids = adapter.position_ids
        self._order = [0, 1, 2]
        self._order[first], self._order[second] = second, first

    def __call__(self, rope_positions: Tensor) -> Tensor:
        return self._position_ids(rope_positions[self._order])


def _logits(adapter: ModelAdapter, request: GenerationRequest, chunk: int) -> Tensor:
    """Run a prompt chunk by chunk.  # [P, V]."""
    num_blocks = 32
    runner = ModelRunner(
        adapter,
        num_blocks=num_blocks,
        block_size=16,
        device=CPU,
        attention_backend="sdpa",
        num_state_slots=1,
    )
    ids, rope = request.prompt_ids, adapter.rope_table(request.prompt_ids, request.media)
    rows = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        table = list(range(num_blocks))[::-1]
        source = 0 if start and adapter.linear_shape is not None else -1
        span = SequenceSpan(part, start, table, rope, len(part), source)
        out = runner.forward(runner.build(ForwardMode.EXTEND, [span]), [request.media])
        if out.linear is not None:
            out.linear.commit([len(part)], [0])
        rows.append(out.logits)
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [[4, (2, 5), 6], [3, Video(3, 2, 4, 1.5), 5, (4, 1), 3]])
def test_a18_logits_are_the_librarys_at_every_position(
    checkpoints: Checkpoints, family: str, parts: list[Part]
) -> None:
    """A18: interleaved rope treated as sectioned: images invented while text was perfect.

    Time, height and width all differ, so that no two axes can stand for each other.
    """
    path = checkpoints(family)
    request = _request(family, 5, parts)
    adapter = _adapter(path)
    expected = reference.prompt_logits(path, request)
    for chunk in (7, 512):
        ours = _logits(adapter, request, chunk)
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4)
    first = request.media[0].start
    for axes in itertools.combinations(range(3), 2):
        adapter.position_ids = _Swapped(adapter, *axes)  # type: ignore[method-assign]
        wrong = _logits(adapter, request, 512)
        del adapter.position_ids
        assert (wrong - expected)[first:].abs().max() > 0.05, "the prompt cannot tell axes apart"


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_of_text_are_the_librarys(checkpoints: Checkpoints, family: str) -> None:
    """Greedy tokens alone would not show a cap on the logits left out: it keeps their order."""
    path = checkpoints(family)
    request = _request(family, 2, [50])
    ours = _logits(_adapter(path), request, 20)
    torch.testing.assert_close(ours, reference.prompt_logits(path, request), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_a_deepstack_level_left_out_or_misplaced_is_noticed(
    checkpoints: Checkpoints, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the levels, or one row off, text stays perfect and pictures are invented."""
    path = checkpoints(family)
    request = _request(family, 5, [4, Video(3, 2, 4, 1.5), (3, 2), 6])
    adapter = _adapter(path)
    expected = reference.prompt_logits(path, request)
    keywords = adapter.stack_keywords
    for spoil in (
        lambda levels: [],
        lambda levels: levels[::-1],
        lambda levels: [level.roll(1, 0) for level in levels],
    ):

        def spoilt(step: Any, spoil: Any = spoil) -> dict[str, Any]:
            given = keywords(step)
            return {**given, "deepstack_visual_embeds": spoil(given["deepstack_visual_embeds"])}

        monkeypatch.setattr(adapter, "stack_keywords", spoilt)
        assert (_logits(adapter, request, 512) - expected).abs().max() > 0.05


@pytest.mark.parametrize("family", KINDS)
def test_a13_image_video_and_text_in_any_order(checkpoints: Checkpoints, family: str) -> None:
    """A13: a video and images in one message worked in one order and failed in the other."""
    path = checkpoints(family)
    parts: list[Part] = [(2, 3), Video(3, 1, 2, 1.5), 4]
    requests = []
    for seed, order in enumerate(itertools.permutations([*parts, (1, 2)])):
        ids, media = tiny.prompt_for(family, seed, order)
        requests.append(tiny.request(str(order), ids, media, max_tokens=6))
    outcome = run(make_engine(path, max_chunk_tokens=16), requests, per_step=3)
    assert outcome.failures == {}
    for request in requests:
        got = outcome.token_ids[request.request_id]
        right = reference.generate(path, request)
        assert got == right, reference.describe_difference(path, request, got, right)


def _cached(engine: Any, request: GenerationRequest) -> tuple[int, list[int]]:
    """Run a request alone; return how much of it was cached, and its tokens."""
    before = engine.stats().cached_tokens
    tokens = run(engine, [request]).token_ids[request.request_id]
    return engine.stats().cached_tokens - before, tokens


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a14_another_video_is_another_prefix(checkpoints: Checkpoints, family: str) -> None:
    """A14: the same question about video A, then B, then A: B was answered about A."""
    path = checkpoints(family)
    ids, media = tiny.prompt_for(family, 1, [20, Video(3, 3, 4, 1.0), 20])
    other = tiny.prompt_for(family, 2, [20, Video(3, 3, 4, 1.0), 20])[1][0]
    requests = {}
    for name, pixels in (("a", media[0]), ("b", other)):
        video = replace(
            media[0], pixel_values=pixels.pixel_values, content_hash=pixels.content_hash
        )
        requests[name] = tiny.request(name, ids, [video])
    engine = make_engine(path)
    alone = {name: _cached(make_engine(path), r)[1] for name, r in requests.items()}
    assert alone["a"] != alone["b"]
    whole = (len(ids) - 1) // 16 * 16
    for name, cached in (("a", 0), ("b", 16), ("a", whole), ("b", whole)):
        assert _cached(engine, requests[name]) == (cached, alone[name])


def test_a14_another_frame_rate_is_another_prefix(checkpoints: Checkpoints) -> None:
    """A14: equal pixels at other times have other positions, from the video on."""
    path = checkpoints("qwen2_5_vl")
    ids, media = tiny.prompt(1, [36, Video(4, 3, 2, 1.0), 20])
    slow = tiny.request("slow", ids, [replace(media[0], seconds_per_grid=4.0)])
    fast = tiny.request("fast", ids, media)
    alone = {r.request_id: _cached(make_engine(path), r)[1] for r in (slow, fast)}
    assert alone["slow"] != alone["fast"]
    engine = make_engine(path)
    whole = (len(ids) - 1) // 16 * 16
    for request, cached in ((fast, 0), (slow, 32), (fast, whole), (slow, whole)):
        assert _cached(engine, request) == (cached, alone[request.request_id])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("part", [(3, 4), Video(12, 1, 2, 2.0)], ids=["image", "video"])
def test_a16_a_second_turn_on_the_cached_first(
    checkpoints: Checkpoints, family: str, part: Part
) -> None:
    """A16: positions of a second turn came from the part that was not cached.

    An answer must also keep its positions when it becomes prompt: the library's own delta after a
    video that is longer in time than in space gives it others.
    """
    path = checkpoints(family)
    ids, media = tiny.prompt_for(family, 1, [5, part, 3])
    engine = make_engine(path)
    first = tiny.request("first", ids, media, max_tokens=40, ignore_eos=True)
    answer = run(engine, [first]).token_ids["first"]
    second = tiny.request("second", [*ids, *answer, *range(20, 30)], media)
    cached, tokens = _cached(engine, second)
    assert cached > len(ids) + 16, "the answer was not found again"
    right = reference.generate(path, second)
    assert tokens == right, reference.describe_difference(path, second, tokens, right)


def test_a_pad_id_in_text_is_text(checkpoints: Checkpoints) -> None:
    """Positions and features follow the request's runs: a model can say a placeholder's id."""
    path = checkpoints("qwen2_5_vl")
    ids, media = tiny.prompt(1, [6, (2, 3), 6])
    for token_id in (tiny.IMAGE_PAD, tiny.VIDEO_PAD):
        strange = [*ids[:-3], token_id, *ids[-2:]]
        request = tiny.request("r", strange, media, max_tokens=4)
        adapter = _adapter(path)
        assert torch.equal(
            _table(adapter, request).prompt,
            _table(adapter, tiny.request("r", ids, media)).prompt,
        )
        assert len(run(make_engine(path), [request]).token_ids["r"]) == 4


def _bad_video(family: str, **changes: Any) -> GenerationRequest:
    ids, media = tiny.prompt_for(family, 1, [5, Video(3, 2, 2, 1.0), 4, (2, 2), 3])
    video, image = media
    return tiny.request("bad", changes.pop("ids", ids), [replace(video, **changes), image])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": ()}, "runs of placeholders"),
        ({"starts": (6, 30)}, "runs of placeholders"),
        ({"grid_thw": (0, 4, 4)}, "cannot be merged|runs of placeholders"),
        ({"grid_thw": (3, 4, 3)}, "cannot be merged"),
        ({"grid_thw": (3, 4, 8)}, "pixels or placeholders do not match"),
        ({"num_tokens": 9}, "pixels or placeholders do not match"),
        ({"num_tokens": 10}, "do not match|equal length"),
        ({"pixel_values": torch.zeros(48, 5).numpy()}, "pixels or placeholders do not match"),
        ({"seconds_per_grid": 0.0}, "seconds_per_grid"),
        ({"seconds_per_grid": float("nan")}, "seconds_per_grid"),
        ({"seconds_per_grid": float("inf")}, "seconds_per_grid"),
    ],
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_bad_video_is_refused(
    checkpoints: Checkpoints, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_engine(checkpoints(family)).add(_bad_video(family, **changes))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("shift", [-2, -1, 1, 30, 1000])
def test_a19_media_without_its_placeholders_is_refused(
    checkpoints: Checkpoints, family: str, shift: int
) -> None:
    """A19: an image was attached and no placeholder in the prompt: assertion in a batch."""
    engine = make_engine(checkpoints(family))
    ids, media = tiny.prompt_for(family, 1, [5, Video(3, 2, 2, 1.0), 4, (2, 2), 3])
    video, image = media
    assert isinstance(video, VideoInput)
    moved = replace(video, starts=tuple(start + shift for start in video.starts))
    for bad in ([moved, image], [video, replace(image, start=image.start + shift)]):
        with pytest.raises(InvalidRequest, match=r"placeholders needed, \d+ found|must stand"):
            engine.add(tiny.request("bad", ids, bad))
    # Right places, but an image's placeholders where a video's should be.
    swapped = [tiny.IMAGE_PAD if i == tiny.VIDEO_PAD else i for i in ids]
    with pytest.raises(InvalidRequest, match="placeholders needed, 0 found"):
        engine.add(tiny.request("bad", swapped, media))


def test_media_that_touch_or_enclose_each_other_are_refused(checkpoints: Checkpoints) -> None:
    """The index function takes two runs that touch for one: the second would get no positions."""
    engine = make_engine(checkpoints("qwen3_vl"))
    pads = [tiny.IMAGE_PAD] * 8
    images = [tiny.image(1, 2, 2, 1), tiny.image(2, 2, 2, 5)]
    with pytest.raises(InvalidRequest, match="text between"):
        engine.add(tiny.request("touch", [2, *pads, 3], images))
    with pytest.raises(InvalidRequest, match="text between"):
        engine.add(tiny.request("order", [2, *pads, 3], images[::-1]))
    ids, media = tiny.prompt_for("qwen3_vl", 1, [Video(2, 2, 2, 1.0), 4])
    video = media[0]
    between = [*ids[: video.end - 6], tiny.IMAGE_PAD, *ids[video.end - 5 :]]
    enclosed = tiny.image(1, 1, 1, video.end - 6)
    with pytest.raises(InvalidRequest, match="text between"):
        engine.add(tiny.request("inside", between, [video, enclosed]))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_text_families_take_no_pictures(checkpoints: Checkpoints, family: str) -> None:
    engine = make_engine(checkpoints(family))
    with pytest.raises(InvalidRequest, match="no images"):
        engine.add(_request("llama", 1, [3, (2, 2), 3]))
    with pytest.raises(InvalidRequest, match="no videos"):
        engine.add(_request("llama", 1, [3, Video(2, 2, 2), 3]))
