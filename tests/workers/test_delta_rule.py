"""The gated delta rule in one run, cut anywhere, against one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from workers.models import delta_rule
from workers.models.delta_rule import DeltaInput

HEADS, KEY_HEADS, KEY, VALUE = 4, 2, 8, 12
TOLERANCE = 1e-5


def _inputs(seed: int, num_seqs: int, num_tokens: int) -> tuple[DeltaInput, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(num_seqs, *shape, generator=generator)

    inputs = DeltaInput(
        query=randn(num_tokens, KEY_HEADS, KEY),
        key=randn(num_tokens, KEY_HEADS, KEY),
        value=randn(num_tokens, HEADS, VALUE),
        log_decay=-randn(num_tokens, HEADS).abs(),
        beta=randn(num_tokens, HEADS).sigmoid(),
    )
    return inputs, randn(HEADS, KEY, VALUE)


def _one_by_one(inputs: DeltaInput, initial: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The library's recurrence, a token a call: outputs, and the state after each."""
    outputs, states = [], []
    state = initial
    for i in range(inputs.key.shape[1]):
        step = slice(i, i + 1)
        out, state = torch_recurrent_gated_delta_rule(
            inputs.query[:, step],
            inputs.key[:, step],
            inputs.value[:, step],
            g=inputs.log_decay[:, step],
            beta=inputs.beta[:, step],
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs, dim=1), states


@given(
    seed=st.integers(0, 10_000),
    num_seqs=st.integers(1, 4),
    num_tokens=st.sampled_from([1, 2, 5, 9, 17, 64]),
)
@settings(max_examples=40, deadline=None)
def test_a_run_equals_its_tokens_one_by_one(seed: int, num_seqs: int, num_tokens: int) -> None:
    inputs, initial = _inputs(seed, num_seqs, num_tokens)
    expected, states = _one_by_one(inputs, initial)
    out, trace = delta_rule.run(inputs, initial)
    torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=0)
    kept = torch.randint(1, num_tokens + 1, (num_seqs,))
    cut = trace.state_after(kept, initial)
    for row, num_kept in enumerate(kept.tolist()):
        torch.testing.assert_close(cut[row], states[num_kept - 1][row], atol=TOLERANCE, rtol=0)


def test_b24_every_cut_of_a_verified_run() -> None:
    """B24: after a partial accept the next step read the state of column 0."""
    inputs, initial = _inputs(3, 1, 6)
    _, states = _one_by_one(inputs, initial)
    _, trace = delta_rule.run(inputs, initial)
    for num_kept in range(1, 7):
        cut = trace.state_after(torch.tensor([num_kept]), initial)
        torch.testing.assert_close(cut, states[num_kept - 1], atol=TOLERANCE, rtol=0)
        others = [s for i, s in enumerate(states) if i != num_kept - 1]
        assert all((cut - other).abs().max() > 0.01 for other in others)


def test_what_was_rejected_leaves_no_trace() -> None:
    """A rejected draft that is not finite, or decays without bound, must not reach the state."""
    inputs, initial = _inputs(5, 2, 5)
    _, states = _one_by_one(inputs, initial)
    for field in (inputs.key, inputs.value, inputs.beta, inputs.log_decay):
        field[:, 3:] = torch.nan
    _, trace = delta_rule.run(inputs, initial)
    cut = trace.state_after(torch.tensor([3, 1]), initial)
    torch.testing.assert_close(cut[0], states[2][0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(cut[1], states[0][1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("decay", [0.0, -60.0, -1e4])
def test_extreme_decays_stay_finite(decay: float) -> None:
    inputs, initial = _inputs(7, 1, 40)
    inputs.log_decay.fill_(decay)
    out, trace = delta_rule.run(inputs, initial)
    expected, states = _one_by_one(inputs, initial)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)
    cut = trace.state_after(torch.tensor([40]), initial)
    torch.testing.assert_close(cut, states[-1], atol=1e-4, rtol=0)
