"""The n-gram drafter: its index against a plain rescan, its memory, and its losslessness."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers import tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from workers.config import SpeculationConfig
from workers.contracts import GenerationRequest, SamplingParams
from workers.errors import ConfigError
from workers.sequence import Sequence as EngineSequence
from workers.spec.drafter import DraftTask
from workers.spec.ngram import NgramDrafter, NgramIndex


def rescan(ids: Sequence[int], num_drafts: int, ngram_max: int, ngram_min: int) -> list[int]:
    """Look from the end for each size in turn; drafts become tokens for the next one."""
    for size in range(ngram_max, ngram_min - 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[len(ids) - size :]:
                known = list(ids)
                for i in range(num_drafts):
                    known.append(known[end + i])
                return known[len(ids) :]
    return []


def sequence(ids: Sequence[int], emitted: Sequence[int] = ()) -> EngineSequence:
    request = GenerationRequest("r", tuple(ids), SamplingParams(seed=0), emitted_ids=tuple(emitted))
    return EngineSequence(request, frozenset(), max_len=10_000, may_draft=True)


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)
IDS = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.lists(st.integers(0, 9), min_size=1, max_size=120),
)


@given(IDS, SIZES, st.integers(0, 12))
def test_the_index_finds_what_a_rescan_finds(
    ids: list[int], sizes: list[int], num_drafts: int
) -> None:
    index = NgramIndex(sizes[1], sizes[0])
    for end in range(1, len(ids) + 1):
        drafts = index.drafts(ids[:end], num_drafts)
        assert drafts == rescan(ids[:end], num_drafts, sizes[1], sizes[0])


@given(IDS, st.data())
def test_b30_drafts_depend_on_the_tokens_alone(ids: list[int], data: st.DataObject) -> None:
    """B30: however the prompt was chunked, whoever was in the batch, after any preemption."""
    prompt_len = data.draw(st.integers(1, len(ids)))
    drafter = NgramDrafter(3, 1)
    others = [sequence([7, 8, 7, 8]), sequence(ids)]
    seq = sequence(ids[:prompt_len])
    for token_id in [None, *ids[prompt_len:]]:
        if token_id is not None:
            seq.append(token_id)
        if data.draw(st.booleans()):
            seq.reset()
        while seq.num_uncomputed > 1:
            seq.num_computed_tokens += data.draw(st.integers(1, seq.num_uncomputed - 1))
            drafter.propose([DraftTask(others[0], 2), DraftTask(seq, 0)])
        tasks = data.draw(st.permutations([seq, *others]))
        proposal = drafter.propose([DraftTask(item, 4) for item in tasks])
        assert proposal.failures == []
        drafts = proposal.draft_ids[tasks.index(seq)]
        assert drafts == rescan(seq.token_ids, 4, 3, 1)
        # A worker that takes over sees prompt and emitted tokens at once.
        replayed = sequence(ids[:prompt_len], seq.token_ids[prompt_len:])
        assert drafter.propose([DraftTask(replayed, 4)]).draft_ids == [drafts]


@pytest.mark.parametrize(
    ("ids", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3, 9]),  # the longest suffix, then a period
        ([1, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2, 6, 1]),  # the most recent place
        ([4, 1, 2, 5, 3, 1, 2, 6, 4, 1, 2], [5, 3, 1, 2, 6]),  # longer wins over more recent
        ([5, 5, 5], [5, 5, 5, 5, 5]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1, 2]),
        ([1, 2, 3, 4], []),
        ([3, 9, 3], []),  # one token is below the smallest size
        ([3], []),
    ],
)
def test_what_is_drafted(ids: list[int], drafts: list[int]) -> None:
    assert NgramIndex(4, 2).drafts(ids, 5) == drafts
    assert NgramIndex(4, 2).drafts(ids, 0) == []


def test_a_colliding_hash_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is compared with the tokens: a collision is no match."""
    monkeypatch.setattr("workers.spec.ngram.hash", lambda _: 1, raising=False)
    assert NgramIndex(3, 2).drafts([1, 2, 3, 4, 5], 3) == []


def test_an_index_goes_with_its_sequence() -> None:
    drafter = NgramDrafter(4, 2)
    kept, gone = sequence([1, 2, 1, 2]), sequence([1, 2, 1, 2])
    drafter.propose([DraftTask(kept, 2), DraftTask(gone, 2)])
    assert len(drafter._indexes) == 2
    del gone
    gc.collect()
    assert list(drafter._indexes) == [kept]


def test_the_index_grows_with_the_tokens_and_does_not_rescan() -> None:
    """A scan of the whole context in each step would cost more than the drafts save."""

    class Watched(list[int]):
        num_slices = 0

        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            Watched.num_slices += isinstance(key, slice)
            return super().__getitem__(key)  # type: ignore[index]

    ids = Watched(range(2000))
    index = NgramIndex(4, 2)
    index.drafts(ids, 4)
    assert Watched.num_slices < 3 * 2000 + 10
    for token_id in range(100):
        Watched.num_slices = 0
        ids.append(token_id)
        index.drafts(ids, 4)
        assert Watched.num_slices <= 3 + 2 * 3
    assert len(index._ends) <= 3 * len(ids)


def test_the_drafter_imports_without_torch() -> None:
    code = (
        "import sys, workers.spec.ngram;"
        "print(sorted({'torch', 'numpy', 'ray', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(("sizes", "key"), [((4, 0), "ngram_min"), ((2, 3), "ngram_max")])
def test_sizes_are_checked(sizes: tuple[int, int], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculationConfig(method="ngram", ngram_max=sizes[0], ngram_min=sizes[1])
    assert caught.value.key == f"speculation.{key}"


def repetitive(family: str, count: int) -> list[GenerationRequest]:
    """Return requests whose prompts repeat themselves, half of them sampled, some with images."""
    requests = []
    for seed in range(count):
        with_image = family in tiny.VISION_FAMILIES and seed % 2
        ids, images = tiny.prompt(seed, [4, (2, 3), 3] if with_image else [6])
        phrase = ids[-5:] if with_image else ids
        ids = ids + phrase[-4:] + phrase[-4:] + phrase[-3:]
        requests.append(
            tiny.request(
                f"r{seed}",
                ids,
                images,
                max_tokens=24,
                seed=seed,
                temperature=float(seed % 4 > 1),
                top_k=2 if seed % 8 == 7 else 0,
                ignore_eos=True,
            )
        )
    return requests


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> Callable[[str], dict[str, list[int]]]:
    """Return each request's tokens when it is alone and decoded plainly."""
    known: dict[str, dict[str, list[int]]] = {}

    def tokens(family: str) -> dict[str, list[int]]:
        if family not in known:
            engine = make_engine(checkpoints(family), prefix_caching=False)
            known[family] = {}
            for request in repetitive(family, 16):
                known[family] |= run(engine, [request]).token_ids
        return known[family]

    return tokens


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
@pytest.mark.parametrize("batch", [1, 2, 5, 16])
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_b32_output_is_that_of_plain_decoding(
    checkpoints: Checkpoints,
    plain: Callable[[str], dict[str, list[int]]],
    family: str,
    batch: int,
    num_drafts: int,
) -> None:
    """B32: with two n-gram drafts the answers were nonsense, at concurrency 1 and 16."""
    engine = make_engine(
        checkpoints(family),
        method="ngram",
        ngram_min=1,
        num_draft_tokens=num_drafts,
        max_chunk_tokens=16,
    )
    requests = repetitive(family, 16)
    for first in range(0, 16, batch):
        group = requests[first : first + batch]
        outcome = run(engine, group)
        assert outcome.failures == {}
        for request in group:
            assert outcome.token_ids[request.request_id] == plain(family)[request.request_id]
    stats = engine.stats()
    assert stats.spec_failures == {}
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_b32_preempted_sequences_draft_on(
    checkpoints: Checkpoints, plain: Callable[[str], dict[str, list[int]]]
) -> None:
    """B30, B32: tokens outlive preemption, and so does their index."""
    engine = make_engine(
        checkpoints("qwen2_5_vl"), method="ngram", ngram_min=1, num_blocks=9, max_chunk_tokens=16
    )
    requests = repetitive("qwen2_5_vl", 8)
    outcome = run(engine, requests)
    for request in requests:
        assert outcome.token_ids[request.request_id] == plain("qwen2_5_vl")[request.request_id]
    assert engine.stats().preemptions > 0
    assert engine.stats().accepted_tokens > 0


def test_b28_every_request_gets_drafts(checkpoints: Checkpoints) -> None:
    """B28: the n-gram worked for the first request only."""
    engine = make_engine(checkpoints("llama"), method="ngram", ngram_min=1, num_draft_tokens=3)
    assert engine.info("w").method == "ngram"
    assert engine.info("w").draft is None
    for request in repetitive("llama", 12):
        if request.sampling.temperature:
            continue
        engine.forget_statistics()
        run(engine, [request])
        assert engine.stats().draft_tokens > 0
        # A greedy tiny model soon repeats itself, which is what the lookup is good at.
        assert engine.stats().accepted_tokens > 0


def test_nothing_is_drafted_where_nothing_repeats(checkpoints: Checkpoints) -> None:
    """Each step then is a plain one: no rows are verified for nothing."""
    engine = make_engine(checkpoints("llama"), method="ngram", ngram_max=9, ngram_min=9)
    run(engine, [tiny.request("r", list(range(2, 40)), max_tokens=6, ignore_eos=True)])
    stats = engine.stats()
    assert (stats.draft_tokens, stats.generated_tokens) == (0, 6)
    assert stats.spec_failures == {}


def test_the_engine_leaves_no_index_behind(checkpoints: Checkpoints) -> None:
    engine = make_engine(checkpoints("llama"), method="ngram")
    run(engine, repetitive("llama", 4))
    engine.add(tiny.request("aborted", [2, 3, 2, 3, 2, 3]))
    engine.step()
    engine.abort("aborted")
    gc.collect()
    drafter = engine._drafting.drafter
    assert isinstance(drafter, NgramDrafter)
    assert len(drafter._indexes) == 0
