"""Contracts, errors, settings and sequences: values and rules that need no torch."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import pytest

from workers import errors
from workers.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from workers.contracts import (
    FinishReason,
    GenerationRequest,
    Report,
    Role,
    SamplingParams,
    TokenDelta,
)
from workers.sequence import Sequence


def test_control_plane_imports_without_torch() -> None:
    """Keeps these tests in milliseconds, and the scheduler free of tensors."""
    code = (
        "import sys, workers.contracts, workers.errors, workers.config, workers.sequence, "
        "workers.kv.block_manager, workers.scheduler;"
        "print(sorted({'torch', 'numpy', 'ray', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("a.b", 3, "must be 4"),
        errors.InvalidRequest("bad", "messages"),
        errors.RequestTooLong("long"),
        errors.WorkerLost("gone"),
        errors.ModelLoadError("no"),
    ],
)
def test_errors_survive_pickling(error: errors.SpecserveError) -> None:
    """An error whose arguments miss super().__init__ dies on its way between actors."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: CacheConfig(block_size=8), "cache.block_size"),
        (lambda: CacheConfig(block_size=24), "cache.block_size"),
        (lambda: CacheConfig(num_blocks=0), "cache.num_blocks"),
        (lambda: CacheConfig(gpu_memory_fraction=1.5), "cache.gpu_memory_fraction"),
        (lambda: SchedulerConfig(max_running=0), "scheduler.max_running"),
        (lambda: SchedulerConfig(max_step_tokens=8), "scheduler.max_step_tokens"),
        (lambda: SchedulerConfig(max_sequence_len=1), "scheduler.max_sequence_len"),
        (lambda: SpeculationConfig(method="magic"), "speculation.method"),
        (lambda: SpeculationConfig(method="draft_model"), "speculation.draft"),
        (lambda: SpeculationConfig(draft=ModelConfig("d")), "speculation.draft"),
        (lambda: ModelConfig(""), "model.path"),
        (lambda: ModelConfig("x", dtype="int3"), "model.dtype"),
        (lambda: EngineConfig("m", ModelConfig("x"), attention_backend="z"), "attention_backend"),
    ],
)
def test_a_bad_setting_names_its_key(make: object, key: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.key == key


def test_method_names_match_the_registry() -> None:
    """The settings list the names by hand, since they must not import torch."""
    from workers.config import METHODS
    from workers.spec import registry

    assert set(METHODS) == {"none", *registry.METHODS}


def _sequence(max_tokens: int, stop_ids: set[int], min_tokens: int = 0) -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, min_tokens=min_tokens)
    request = GenerationRequest("r", (1, 2, 3), sampling)
    return Sequence(request, frozenset(stop_ids), max_len=3 + max_tokens)


def _append_all(seq: Sequence, ids: list[int]) -> FinishReason | None:
    for token_id in ids:
        reason = seq.append(token_id)
        if reason is not None:
            return reason
    return None


@pytest.mark.parametrize("max_tokens", range(1, 8))
@pytest.mark.parametrize("offset", range(6))
def test_b1_b4_first_stop_inside_the_budget_wins(max_tokens: int, offset: int) -> None:
    """B1, B4: length was tested before stop, and a stop in mid-block let its tail through."""
    seq = _sequence(max_tokens, {99})
    block = [10, 11, 12, 13, 14, 15]
    block[offset] = 99
    reason = _append_all(seq, block)
    if offset < max_tokens:
        assert reason is FinishReason.STOP
        assert seq.token_ids[3:] == block[: offset + 1]
    else:
        assert reason is (FinishReason.LENGTH if max_tokens <= len(block) else None)
        assert seq.token_ids[3:] == block[:max_tokens]


def test_b6_min_tokens_counts_every_token_of_a_block() -> None:
    """B6: only the last token of an accepted block counted, so stops came much too late."""
    seq = _sequence(10, {99}, min_tokens=2)
    assert seq.append(99) is None
    assert seq.append(99) is None
    assert seq.append(99) is FinishReason.STOP


def test_a_replayed_delta_drops_what_the_client_has() -> None:
    delta = TokenDelta("r", start=4, token_ids=(5, 6, 7), finish_reason=FinishReason.STOP)
    assert delta.after(4) is delta
    assert delta.after(6) == TokenDelta("r", 6, (7,), FinishReason.STOP)
    assert delta.after(9).token_ids == ()


def test_a_resumed_request_keeps_its_prompt_length_and_seed() -> None:
    request = GenerationRequest("r", (1, 2, 3), SamplingParams(seed=7))
    seq = Sequence(request.resume_after([4, 5]), frozenset(), max_len=20)
    assert (seq.prompt_len, seq.num_emitted, seq.token_ids) == (3, 2, [1, 2, 3, 4, 5])
    assert seq.request.sampling.seed == 7


def test_contracts_of_two_versions_do_not_swap_fields() -> None:
    """Pickled by position, a new field made a counter arrive as a tuple in a rolling update."""
    report = Report(Role.WORKER, "m", "w", 3, {"steps": {("a",): 2.0}}, is_last=True)
    assert pickle.loads(pickle.dumps(report)) == report
    state = report.__getstate__()
    assert isinstance(state, dict)
    newer = Report.__new__(Report)
    newer.__setstate__({k: v for k, v in reversed(state.items()) if k != "is_last"} | {"x": 1})  # type: ignore[attr-defined]
    assert newer == dataclasses.replace(report, is_last=False)
    delta = TokenDelta("r", 0, (1,))
    with pytest.raises(TypeError, match="without token_ids"):
        TokenDelta.__new__(TokenDelta).__setstate__({"request_id": "r", "start": 0})  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(delta)) == delta
