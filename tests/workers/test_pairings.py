"""Every draft under every target: it runs and changes nothing, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.workers import tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from workers.config import ModelConfig
from workers.contracts import GenerationRequest
from workers.engine import Engine
from workers.errors import ModelLoadError
from workers.models.loader import check_pair, load_model
from workers.models.vocabulary import Vocabulary
from workers.spec.token_map import TokenMap

CPU = torch.device("cpu")


def requests(family: str, *, limit: int = tiny.VOCAB) -> list[GenerationRequest]:
    """Return a small mixed batch: greedy and sampled, with what the family can see."""
    parts: dict[int, list[tiny.Part]] = {}
    if family in tiny.VISION_FAMILIES:
        parts[1] = [5, (2, 3), 4]
    if family in tiny.VIDEO_FAMILIES:
        parts[3] = [3, tiny.Video(2, 1, 2), 4, (2, 2), 2]
    out = []
    for seed in range(4):
        ids, media = tiny.prompt_for(family, seed, parts.get(seed, [9 + 8 * seed]))
        ids = ids if media else [token_id % limit for token_id in ids]
        out.append(
            tiny.request(
                f"r{seed}",
                ids,
                media,
                max_tokens=8,
                seed=seed,
                temperature=float(seed > 1),
                ignore_eos=True,
            )
        )
    return out


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> Callable[[str], dict[str, list[int]]]:
    """Return what each family answers by plain decoding."""
    known: dict[str, dict[str, list[int]]] = {}

    def tokens(family: str) -> dict[str, list[int]]:
        if family not in known:
            known[family] = run(make_engine(checkpoints(family)), requests(family)).token_ids
        return known[family]

    return tokens


def may_be_refused(target: str, draft: str) -> bool:
    """Two that see must see alike."""
    return target != draft and {target, draft} <= tiny.VISION_FAMILIES


@pytest.mark.parametrize("draft", tiny.FAMILIES)
@pytest.mark.parametrize("target", tiny.FAMILIES)
def test_every_pair_is_lossless_or_refused(
    checkpoints: Checkpoints,
    plain: Callable[[str], dict[str, list[int]]],
    target: str,
    draft: str,
) -> None:
    """A22: VL or text-only under VL were refused, or ran with corrupt positions."""
    try:
        engine = make_engine(checkpoints(target), checkpoints(draft, 3), max_chunk_tokens=16)
    except ModelLoadError as error:
        if may_be_refused(target, draft) and "draft" in str(error):
            return
        raise
    outcome = run(engine, requests(target))
    assert outcome.failures == {}
    assert outcome.token_ids == plain(target)
    stats = engine.stats()
    assert stats.spec_failures == {}
    assert stats.draft_tokens > 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_ngram_suits_every_family(
    checkpoints: Checkpoints, plain: Callable[[str], dict[str, list[int]]], family: str
) -> None:
    """B24, B32: n-gram drafts under every kind of target."""
    engine = make_engine(checkpoints(family), method="ngram", ngram_min=1, max_chunk_tokens=16)
    outcome = run(engine, requests(family))
    assert outcome.token_ids == plain(family)
    assert engine.stats().spec_failures == {}


def write(
    path: Path,
    tokens: list[str],
    added: list[str] | None = None,
    *,
    family: str = "llama",
    **changes: int,
) -> str:
    """Write a checkpoint (always the same weights for a width) with a tokenizer."""
    tiny.save(path, family, 0, **changes)
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="t0"))
    tokenizer.add_special_tokens(added or [])
    tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


TOKENS = [f"t{i}" for i in range(150)]


def widened(path: Path, narrow: str, width: int) -> str:
    """Copy a checkpoint with more rows of embeddings and logits: the first are the same."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(narrow)
    model.resize_token_embeddings(width, mean_resizing=False)
    model.save_pretrained(path)
    tokenizer = Path(narrow) / "tokenizer.json"
    (path / "tokenizer.json").write_text(tokenizer.read_text())
    return str(path)


def assert_lossless(engine: Engine, target: str, batch: list[GenerationRequest]) -> None:
    expected = run(make_engine(target), batch).token_ids
    outcome = run(engine, batch)
    assert outcome.failures == {}
    assert outcome.token_ids == expected
    assert engine.stats().spec_failures == {}


@pytest.mark.parametrize(("target_width", "draft_width"), [(176, 160), (160, 176), (160, 150)])
def test_vocabularies_padded_differently(
    tmp_path: Path, target_width: int, draft_width: int
) -> None:
    """Real pairs: 152064 and 151936 logits over the same tokens; ids beyond are no drafts."""
    narrow = write(tmp_path / "narrow", TOKENS, vocab_size=150)
    target = widened(tmp_path / "target", narrow, target_width)
    draft = widened(tmp_path / "draft", narrow, draft_width)
    engine = make_engine(target, draft, num_draft_tokens=3)
    assert_lossless(engine, target, requests("llama", limit=150))
    stats = engine.stats()
    # The same weights: all that is proposed is right, at any temperature.
    assert stats.accepted_tokens == stats.draft_tokens > 0


def test_c20_ids_of_the_padding_are_never_emitted(tmp_path: Path) -> None:
    """C20: the padded part of the vocabulary has logits too, in target and draft."""
    path = write(tmp_path, TOKENS[:40])
    engine = make_engine(path, path, num_draft_tokens=3)
    batch = [
        tiny.request(str(n), [2, 3, 4], temperature=2.0 * (n % 3), seed=n, max_tokens=20)
        for n in range(24)
    ]
    outcome = run(engine, batch)
    emitted = [token_id for ids in outcome.token_ids.values() for token_id in ids]
    assert len(emitted) > 200
    assert max(emitted) < 40
    assert engine.stats().spec_failures == {}


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
@pytest.mark.parametrize("prompt_len", [30, 43, 46, 47])
def test_b21_generation_ends_at_the_last_position(
    checkpoints: Checkpoints, method: str, prompt_len: int
) -> None:
    """B21: without `max_tokens`, drafts reached past the context and took the engine down."""
    path = checkpoints("llama", max_position_embeddings=48)
    engine = make_engine(
        path, path if method == "draft_model" else None, method=method, num_draft_tokens=5
    )
    ids = [2, 3, 4, 5] * 12
    batch = [tiny.request("r", ids[:prompt_len], max_tokens=None, ignore_eos=True)]
    assert_lossless(engine, path, batch)
    assert run(engine, batch).reasons["r"] == "length"
    assert len(run(engine, batch).token_ids["r"]) == 48 - prompt_len


PLACEHOLDERS = ["<pad>", "<start>", "<end>", "<video>"]  # 150 to 153


@pytest.mark.parametrize("draft_width", [150, 160])
def test_a22_a_text_draft_without_the_targets_placeholders(
    tmp_path: Path, draft_width: int
) -> None:
    """A22: image tokens under a text draft that has no row, or no token, for them."""
    target = write(tmp_path / "t", TOKENS, PLACEHOLDERS, family="qwen2_5_vl")
    draft = write(tmp_path / "d", TOKENS, family="qwen2", vocab_size=draft_width)
    engine = make_engine(target, draft, num_draft_tokens=3, max_chunk_tokens=8)
    assert_lossless(engine, target, requests("qwen2_5_vl"))
    assert engine.stats().draft_tokens > 0


def test_a_text_draft_that_lacks_added_tokens_is_as_good_as_one_that_has_them(
    tmp_path: Path,
) -> None:
    """The mapped ids stand in the prompt only: what is drafted from is all the draft's own."""
    target = write(tmp_path / "t", TOKENS, PLACEHOLDERS, vocab_size=176)
    draft = write(tmp_path / "d", TOKENS, vocab_size=150)
    engine = make_engine(target, draft)
    batch = [
        tiny.request(str(n), [5, 151, 150, 150, 152, n + 9], min_tokens=3, stop_token_ids=(153,))
        for n in range(4)
    ]
    assert_lossless(engine, target, batch)
    assert engine.stats().draft_tokens > 0


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        (["a", "b", "c"], ["a", "c", "b"], "id 1 is 'b' in the target and 'c' in the draft"),
        (["a", "b", "c"], ["a", "b"], "the draft has no token 'c', which is id 2"),
        (["a", "b"], ["a", "b", "c"], "the target has no token 'c', which is id 2"),
    ],
)
def test_other_tokenizers_are_refused_with_the_first_difference(
    tmp_path: Path, target: list[str], draft: list[str], reason: str
) -> None:
    paths = [
        write(tmp_path / name, ["t0", *tokens])
        for name, tokens in (("target", target), ("draft", draft))
    ]
    loaded = [load_model(ModelConfig(path), CPU) for path in paths]
    shifted = reason
    for number in (2, 1):  # "t0" stands before them
        shifted = shifted.replace(f"id {number}", f"id {number + 1}")
    with pytest.raises(ModelLoadError, match=f"different tokenizers: {shifted}"):
        check_pair(*loaded)


def test_added_tokens_may_be_on_one_side_only() -> None:
    base = {"a": 0, "b": 1}
    plain = Vocabulary(base)
    more = Vocabulary({**base, "<x>": 2, "<y>": 5}, frozenset({"<x>", "<y>"}))
    assert plain.difference(more) is more.difference(plain) is more.difference(more) is None
    assert (plain.num_ids, more.num_ids) == (2, 6)
    moved = Vocabulary({**base, "<x>": 3}, frozenset({"<x>"}))
    assert more.difference(moved) == "'<x>' is id 2 in the target and 3 in the draft"
    renamed = Vocabulary({**base, "<z>": 2}, frozenset({"<z>"}))
    assert more.difference(renamed) == "id 2 is '<x>' in the target and '<z>' in the draft"


@given(st.lists(st.integers(0, 20)), st.integers(1, 20))
def test_mapped_ids_can_be_embedded_and_the_others_stay(ids: list[int], num_ids: int) -> None:
    mapped = TokenMap(num_ids, filler_id=0).apply(ids)
    assert len(mapped) == len(ids)
    for before, after in zip(ids, mapped, strict=True):
        assert after == (before if before < num_ids else 0)


@pytest.mark.parametrize(
    ("pad", "eos", "filler"), [(3, 1, 3), (None, 1, 1), (170, 2, 2), (None, 999, 0)]
)
def test_the_filler_is_a_token_of_the_draft(
    tmp_path: Path, pad: int | None, eos: int, filler: int
) -> None:
    path = tiny.save(tmp_path, "llama", 0)
    loaded = load_model(ModelConfig(path), CPU)
    loaded.adapter.config.pad_token_id = pad
    loaded.adapter._model.generation_config.eos_token_id = eos
    assert loaded.filler_id == filler


class TestVision:
    """What differs between two models that see."""

    def _pair(self, checkpoints: Checkpoints) -> tuple[object, object]:
        path = ModelConfig(checkpoints("qwen2_5_vl"))
        return load_model(path, CPU), load_model(path, CPU)

    @pytest.mark.parametrize(
        ("where", "name", "reason"),
        [
            ("vision", "patch_size", "other pixels"),
            ("vision", "spatial_merge_size", "other pixels"),
            ("vision", "temporal_patch_size", "other pixels"),
            ("model", "image_token_id", "image_token_id=150, the draft 151"),
        ],
    )
    def test_other_geometry_or_placeholders(
        self, checkpoints: Checkpoints, where: str, name: str, reason: str
    ) -> None:
        target, draft = self._pair(checkpoints)
        adapter = draft.adapter  # type: ignore[attr-defined]
        config = adapter.vision_config if where == "vision" else adapter._model.config
        setattr(config, name, getattr(config, name) + 1)
        with pytest.raises(ModelLoadError, match=reason):
            check_pair(target, draft)  # type: ignore[arg-type]

    def test_videos(self, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = self._pair(checkpoints)
        adapter = draft.adapter  # type: ignore[attr-defined]

        class Other(type(adapter)):  # type: ignore[misc]
            takes_videos = False

        class Split(type(adapter)):  # type: ignore[misc]
            splits_videos = True

        monkeypatch.setattr(type(target.adapter), "takes_videos", True)  # type: ignore[attr-defined]
        adapter.__class__ = Other
        with pytest.raises(ModelLoadError, match="the draft images only"):
            check_pair(target, draft)  # type: ignore[arg-type]
        adapter.__class__ = Split
        with pytest.raises(ModelLoadError, match="one for each time stamp"):
            check_pair(target, draft)  # type: ignore[arg-type]
