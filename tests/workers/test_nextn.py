"""The NEXTN head: as the library's layer computes it, in batches of any mix, at any accept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer

from tests.workers import reference, tiny
from tests.workers.conftest import Checkpoints
from tests.workers.engines import make_engine, run
from tests.workers.recording import record
from workers.batch_info import ForwardMode
from workers.contracts import GenerationRequest
from workers.engine import Engine
from workers.errors import ModelLoadError
from workers.models.runner import StepOutput
from workers.sequence import Sequence
from workers.spec.drafter import DraftTask, Proposal

VISION = ["qwen3_5", "qwen3_5_moe"]
K = 3


def _requests(family: str) -> list[GenerationRequest]:
    """Text, images in every place, and a video, in one batch."""
    prompts: list[list[Any]] = [[6], [5, (3, 2), 4], [21], [(2, 3), 3], [4, (2, 4)], [33]]
    prompts += [[3, (2, 2), (1, 3), 4, (2, 2)], [2, tiny.Video(2, 2, 1), 3]]
    requests = []
    for seed, parts in enumerate(prompts):
        ids, media = tiny.prompt_for(family, seed, parts)
        requests.append(tiny.request(f"r{seed}", ids, media, max_tokens=10, ignore_eos=True))
    return requests


class _Head:
    """The library's own MTP layer over the library's own model, dense, for one whole sequence."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._model = reference.load(path)
        text = self._model.model.language_model
        config = text.config
        index = config.layer_types.index("full_attention")
        norm = type(text.norm)
        self._layer = MtpLayer(config, type(text.layers[index]), norm, index).eval()
        names = {
            "fc": "eh_proj",
            "pre_fc_norm_embedding": "enorm",
            "pre_fc_norm_hidden": "hnorm",
            "layers.0": "mtp_block",
            "norm": "post_norm",
        }
        state = {}
        for name, tensor in load_file(Path(path) / "model.safetensors").items():
            if name.startswith("mtp."):
                own = name.removeprefix("mtp.")
                old = next(old for old in names if own.startswith(f"{old}."))
                state[names[old] + own.removeprefix(old)] = tensor
        self._layer.load_state_dict(state, strict=True)

    @torch.inference_mode()
    def drafts(self, request: GenerationRequest, ids: list[int], count: int) -> list[int]:
        """Return greedy drafts for a sequence of `ids`."""
        core = self._model.model
        inputs = reference._inputs(self._model, request, ids[:-1])
        core.rope_deltas = None
        hidden = core(**inputs, use_cache=False).last_hidden_state
        embeddings = _embeddings(self._model, request, ids)
        positions = reference.positions(self._path, request, [*ids, *[2] * count])
        drafts: list[int] = []
        for _ in range(count):
            num_rows = hidden.shape[1]
            rope = core.language_model.rotary_emb(hidden, positions[:, None, :num_rows])
            mask = create_causal_mask(
                config=core.language_model.config,
                inputs_embeds=hidden,
                attention_mask=None,
                cache=None,
                position_ids=None,
            )
            out = self._layer(embeddings[:, 1 : num_rows + 1], hidden, rope, mask, None, None)
            drafts.append(int(self._model.lm_head(out[0, -1]).argmax()))
            # The next row reads the draft's embedding and the head's own output.
            new = self._model.get_input_embeddings()(torch.tensor([[drafts[-1]]]))
            embeddings = torch.cat([embeddings, new], dim=1)
            hidden = torch.cat([hidden, out[:, -1:]], dim=1)
        return drafts


def _embeddings(model: Any, request: GenerationRequest, ids: list[int]) -> Tensor:
    """Embed a whole sequence, images and videos in place.  # [1, n, hidden]."""
    core = model.model
    embeddings = model.get_input_embeddings()(torch.tensor([ids])).clone()
    for item in request.media:
        is_image = item in request.images
        encode = core.get_image_features if is_image else core.get_video_features
        grid = torch.tensor([item.grid_thw])
        features = encode(torch.from_numpy(item.pixel_values), grid).pooler_output[0]
        first = 0
        for start, end in item.runs:
            embeddings[0, start:end] = features[first : first + end - start]
            first += end - start
    return embeddings


def _record_proposals(engine: Engine) -> list[tuple[str, list[int], list[int]]]:
    """Return a list of (request, its tokens, its drafts) that fills while the engine runs."""
    drafter: Any = engine._drafting.drafter
    propose, seen = drafter.propose, []

    def recording(tasks: list[DraftTask]) -> Proposal:
        proposal = propose(tasks)
        for task, drafts in zip(tasks, proposal.draft_ids, strict=True):
            if drafts:
                seen.append((task.seq.request_id, list(task.seq.token_ids), list(drafts)))
        return proposal

    drafter.propose = recording
    return seen


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("chunk", [7, 512])
def test_a1_drafts_are_those_of_the_librarys_layer_over_the_whole_sequence(
    checkpoints: Checkpoints, family: str, chunk: int
) -> None:
    """A1, A2, A17: positions, slots, or embeddings of another window: drafts sink, text does not.

    Every proposal of a mixed batch is computed again, from the whole sequence at once.
    """
    path = checkpoints(family)
    engine = make_engine(path, method="nextn", num_draft_tokens=K, max_chunk_tokens=chunk)
    seen = _record_proposals(engine)
    requests = {request.request_id: request for request in _requests(family)}
    outcome = run(engine, requests.values(), per_step=2)
    assert outcome.failures == {}
    head = _Head(path)
    by_request = {name for name, _, _ in seen}
    assert by_request == set(requests)
    for name, ids, drafts in seen[:: 1 + len(seen) // 60]:
        assert drafts == head.drafts(requests[name], ids, len(drafts)), (name, len(ids))


@pytest.mark.parametrize("family", VISION)
def test_a17_drafts_on_a_reused_prefix_are_the_same(checkpoints: Checkpoints, family: str) -> None:
    """A17: a cached block's last K/V was written with another sequence's next token."""
    path = checkpoints(family)
    engine = make_engine(
        path, method="nextn", num_draft_tokens=K, state_interval=16, max_chunk_tokens=16
    )
    head = _Head(path)
    ids, media = tiny.prompt_for(family, 4, [11, (2, 3), 14])
    for tail in ([20, 21], [30, 31], [30, 31]):
        request = tiny.request("r", [*ids[:32], *tail], media, max_tokens=9, ignore_eos=True)
        seen = _record_proposals(engine)
        run(engine, [request])
        assert all(drafts == head.drafts(request, known, len(drafts)) for _, known, drafts in seen)
    # The second prompt differs right after the block, the third not at all.
    assert engine.stats().cached_tokens == 16 + 32


@pytest.mark.parametrize("family", VISION)
def test_seed_crash_mixed_image_and_text_draft_extend_with_nextn(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The seed's crash on its own architecture: NEXTN, one batch of image and text requests.

    Also A3, A21: every pass of every mode has the positions of the whole sequence, and no draft
    step writes into a prompt.
    """
    path = checkpoints(family)
    engine = make_engine(path, method="nextn", num_draft_tokens=K, prefix_caching=False)
    spans = record(engine, monkeypatch)
    requests = {request.request_id: request for request in _requests(family)}
    outcome = run(engine, requests.values())
    assert outcome.failures == {}
    assert engine.stats().spec_failures == {}
    plain = run(make_engine(path), requests.values())
    assert outcome.token_ids == plain.token_ids
    for span in spans:
        request = requests[span.request_id]
        ids = [*request.prompt_ids, *outcome.token_ids[span.request_id], *[2] * 16]
        expected = reference.positions(path, request, ids)
        assert torch.equal(span.rope_positions, expected[:, span.seq_positions]), span
        if span.mode is ForwardMode.DRAFT_DECODE:
            assert int(span.seq_positions.min()) >= len(request.prompt_ids)
    extends = [span for span in spans if span.mode is ForwardMode.DRAFT_EXTEND]
    assert {len(span.seq_positions) for span in extends if len(span.seq_positions) < 4}


def test_a_failed_draft_extend_is_caught_up(checkpoints: Checkpoints) -> None:
    """Output that the head has not seen waits; drafts after an outage are as without one."""
    path = checkpoints("qwen3_5")
    engine = make_engine(path, method="nextn", num_draft_tokens=K)
    runner: Any = engine._drafting.drafter._runner  # type: ignore[union-attr]
    forward, calls = runner.forward, {"n": 0}

    def failing(*args: Any, **kwargs: Any) -> StepOutput:
        calls["n"] += 1
        if calls["n"] in {2, 3, 4}:
            raise RuntimeError("out for a while")
        return forward(*args, **kwargs)

    runner.forward = failing
    seen = _record_proposals(engine)
    request = _requests("qwen3_5")[1]
    outcome = run(engine, [request])
    assert outcome.token_ids == run(make_engine(path), [request]).token_ids
    assert sum(engine.stats().spec_failures.values()) in {2, 3}
    head = _Head(path)
    assert len(seen) > 3
    assert all(drafts == head.drafts(request, ids, len(drafts)) for _, ids, drafts in seen)


def test_no_output_is_kept_after_a_step(checkpoints: Checkpoints) -> None:
    engine = make_engine(checkpoints("qwen3_5"), method="nextn")
    outputs = engine._drafting.drafter._outputs  # type: ignore[union-attr]
    for request in _requests("qwen3_5"):
        engine.add(request)
    while engine.has_work:
        engine.step()
        assert len(outputs) == 0


def _without(path: str, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    """Copy a checkpoint with its head changed."""
    folder.mkdir()
    for file in Path(path).iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(Path(path) / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_checkpoint_without_a_head_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = checkpoints("qwen3_5")

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    def lose_one(tensors: dict[str, Tensor]) -> None:
        del tensors["mtp.norm.weight"]

    def deepen(tensors: dict[str, Tensor]) -> None:
        tensors["mtp.layers.1.input_layernorm.weight"] = torch.ones(48)

    for name, change, reason in (
        ("none", drop, r"needs a checkpoint with mtp\.\* tensors"),
        ("fewer", lose_one, r"do not fit.*norm\.weight"),
        ("deeper", deepen, r"do not fit.*layers\.1"),
    ):
        with pytest.raises(ModelLoadError, match=reason):
            make_engine(_without(path, tmp_path / name, change), method="nextn")
    with pytest.raises(ModelLoadError, match=r"needs a checkpoint with mtp\.\* tensors"):
        make_engine(checkpoints("llama"), method="nextn")


def test_a_sequence_without_its_output_gets_no_drafts(checkpoints: Checkpoints) -> None:
    """K/V that was distrusted cannot be computed again without the target's output."""
    engine = make_engine(checkpoints("qwen3_5"), method="nextn")
    request = _requests("qwen3_5")[0]
    engine.add(request)
    engine.step()
    seq: Sequence = engine.scheduler.running[0]
    assert seq.draft_ids
    seq.drop_drafts()
    seq.num_draft_computed_tokens = 0
    seen = _record_proposals(engine)
    while engine.has_work:
        engine.step()
    assert seen == []
    assert engine.stats().finished["length"] == 1
