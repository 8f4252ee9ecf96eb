"""The SDPA backend against the reference, on every mix of lengths a step can have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.attention.reference import STEPS, Heads, Step, make_step, reference_attention
from workers.batch_info import AttentionMetadata
from workers.models.attention import write_kv
from workers.models.attention.sdpa import MAX_FOLDED_Q_LEN, SdpaBackend

assert any(q_len > MAX_FOLDED_Q_LEN for q_len, _ in STEPS["ragged"])


def run(step, backend=None):
    backend = backend or SdpaBackend()
    return backend(step.query, step.key_cache, step.value_cache, step.meta, step.scale, step.window)


def check(step, tolerance=2e-6):
    out = run(step)
    assert out.dtype == step.query.dtype
    torch.testing.assert_close(
        out.double(), reference_attention(step), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("heads", [Heads(4, 4), Heads(6, 2), Heads(4, 1, 16)], ids=str)
def test_matches_the_reference(lens, heads):
    check(make_step(lens, heads))


@pytest.mark.parametrize("window", [1, 2, 16, 39, 89, 90, 1000])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("heads", [Heads(4, 4), Heads(6, 2)], ids=str)
def test_a_window_matches_the_reference(lens, heads, window):
    check(make_step(lens, heads, window=window))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    check(make_step(STEPS["ragged"], dtype=dtype), tolerance=2e-2)


SEQUENCE = st.tuples(
    st.one_of(
        st.just(1), st.integers(1, 6), st.integers(MAX_FOLDED_Q_LEN - 1, MAX_FOLDED_Q_LEN + 2)
    ),
    st.integers(0, 50),
).map(lambda pair: (pair[0], sum(pair)))


@settings(deadline=None, max_examples=60)
@given(
    lens=st.lists(SEQUENCE, min_size=1, max_size=6),
    heads=st.sampled_from([Heads(2, 2), Heads(4, 2), Heads(7, 1)]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    seed=st.integers(0, 2**16),
    window=st.none() | st.integers(1, 100),
)
def test_random_steps_match_the_reference(lens, heads, block_size, seed, window):
    check(make_step(lens, heads, block_size, seed=seed, window=window))


def test_layers_with_and_without_a_window_share_a_step():
    """A plan remembered of a layer without a window must not serve one with a window."""
    backend = SdpaBackend()
    step = make_step(STEPS["ragged"])
    for window in (None, 5, None, 17, 5, 500):
        windowed = replace(step, window=window)
        torch.testing.assert_close(
            run(windowed, backend).double(), reference_attention(windowed), rtol=2e-6, atol=2e-6
        )


def test_a_window_still_keeps_other_sequences_out():
    """The mask must not be taken for what keeps a NaN behind a sequence's end away."""
    lens = [(1, 40), (1, 7), (5, 30), (1, 40)]
    clean, broken = make_step(lens, window=4), make_step(lens, window=4)
    broken.key_cache[int(broken.meta.block_table[0, 2])] = float("nan")
    broken.value_cache[int(broken.meta.block_table[0, 2])] = float("nan")
    out = run(broken)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:], run(clean)[1:], rtol=0, atol=0)


def test_strided_query():
    """Models hand over [1, H, T, D] transposed, never a contiguous [T, H, D]."""
    step = make_step(STEPS["ragged"])
    strided = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    out = SdpaBackend()(strided, step.key_cache, step.value_cache, step.meta, step.scale)
    torch.testing.assert_close(out, run(step), rtol=0, atol=0)


def test_one_sequence_with_nan_leaves_the_others_alone():
    """A failing request is found by its own rows: its NaN must not spread through the padding."""
    lens = [(1, 40), (1, 7), (5, 30), (1, 40)]
    clean, broken = make_step(lens), make_step(lens)
    broken.key_cache[int(broken.meta.block_table[0, 0])] = float("nan")
    broken.value_cache[int(broken.meta.block_table[0, 0])] = float("nan")
    out = run(broken)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:], run(clean)[1:], rtol=0, atol=0)


def test_padding_points_at_a_block_in_use():
    """Block 0 is some sequence's: reading it through another's padding must change nothing."""
    step = make_step([(1, 5), (1, 60)])
    expected = run(step)
    step.key_cache[0], step.value_cache[0] = 1e30, 1e30
    torch.testing.assert_close(run(step), expected, rtol=0, atol=0)


def test_a_backend_serves_step_after_step():
    """What is remembered of one step must not be used for the next, equal in shape or not."""
    backend = SdpaBackend()
    steps = [make_step(STEPS[name], seed=seed) for seed in (1, 2) for name in ("ragged", "decodes")]
    for step in [*steps, *steps]:
        torch.testing.assert_close(
            run(step, backend).double(), reference_attention(step), rtol=2e-6, atol=2e-6
        )


def test_models_of_different_shape_share_a_backend():
    """Target and draft run the same step's metadata with other head groups and dtypes."""
    backend, step = SdpaBackend(), make_step(STEPS["ragged"], Heads(4, 2))
    caches = torch.randn(2, *step.key_cache.shape, dtype=torch.float64)
    query = torch.randn(len(step.query), 6, 8, dtype=torch.float64)
    draft = Step(query, caches[0], caches[1], step.meta, step.scale)
    for model in (step, draft, step):
        torch.testing.assert_close(
            run(model, backend).double(), reference_attention(model), rtol=2e-6, atol=2e-6
        )


def test_nothing_is_read_back_from_the_device():
    """On a GPU a read waits for every launched kernel; the meta device refuses all reads."""
    step = make_step(STEPS["ragged"])
    meta = AttentionMetadata(
        cu_seqlens_q=step.meta.cu_seqlens_q.to("meta"),
        kv_lens=step.meta.kv_lens.to("meta"),
        slot_mapping=step.meta.slot_mapping.to("meta"),
        block_table=step.meta.block_table.to("meta"),
        q_lens=step.meta.q_lens,
        kv_lens_cpu=step.meta.kv_lens_cpu,
    )
    query, keys, values = (
        tensor.to("meta") for tensor in (step.query, step.key_cache, step.value_cache)
    )
    write_kv(keys, values, keys[0], values[0], meta.slot_mapping[: keys.shape[1]])
    assert SdpaBackend()(query, keys, values, meta, step.scale).shape == step.query.shape


def test_written_keys_and_values_land_in_their_slots():
    step = make_step([(3, 20), (1, 17)])
    keys = torch.arange(4.0).view(4, 1, 1).expand(4, 2, 8)
    before = step.key_cache.clone()
    write_kv(step.key_cache, step.value_cache, keys, -keys, step.meta.slot_mapping)
    flat = step.key_cache.view(-1, 2, 8)
    torch.testing.assert_close(flat[step.meta.slot_mapping], keys.contiguous())
    torch.testing.assert_close(
        step.value_cache.view(-1, 2, 8)[step.meta.slot_mapping], -keys.contiguous()
    )
    untouched = torch.ones(len(flat), dtype=torch.bool)
    untouched[step.meta.slot_mapping] = False
    torch.testing.assert_close(
        flat[untouched], before.view(-1, 2, 8)[untouched], rtol=0, atol=0, equal_nan=True
    )
