"""Learning of the next-token head: its rows are decoding's, the model stays untouched."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

from deploy import demo
from deploy.demo import batches, nextn, tasks, train
from deploy.demo.head_learner import DEPTHS, HeadLearner, visible_rows
from deploy.demo.learner import Learner, Reading


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.NEXTN_DIR)


@pytest.fixture
def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    return nextn.build_model(nextn.SMOKE, tokenizer)


def picture_batch(tokenizer: Any) -> batches.Batch:
    encoder = batches.Encoder(tokenizer)
    conversation = tasks.held_out_conversation(random.Random(0), "describe")
    return batches.collate([encoder.encode(conversation)], encoder.pad)


def test_visible_rows_of_a_second_and_third_draft() -> None:
    assert visible_rows(3, 1)[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert visible_rows(3, 2)[0, 0].int().tolist() == [
        [0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    assert visible_rows(3, 3)[0, 0, 2].int().tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1]


def test_every_depth_equals_a_chain_of_single_rows(model: Any, tokenizer: Any) -> None:
    """Guards the masks and the shift: a row must see what it sees in decoding, and no more."""
    head = nextn.MtpHead(model.config)
    batch = picture_batch(tokenizer)
    with torch.no_grad():
        reading = Learner(model, train.SMOKE).read(batch)
        outputs = HeadLearner(head, model, train.SMOKE).outputs(reading)
        for settled in (1, 20, batch.input_ids.shape[1] - DEPTHS):
            for depth, row in enumerate(chained(model, head, reading, settled)):
                expected = outputs[depth][0, settled - 1 + depth]
                torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)


def chained(model: Any, head: Any, reading: Reading, settled: int) -> list[torch.Tensor]:
    """Draft behind the first tokens: their rows together, then row by row; [hidden] for each."""
    cos, sin = model.model.language_model.rotary_emb(reading.hidden, reading.positions)
    cache = DynamicCache()
    rows = head(
        reading.embedded[:, 1 : settled + 1],
        reading.hidden[:, :settled],
        (cos[:, :settled], sin[:, :settled]),
        None,
        cache,
    )
    found = [rows[0, -1]]
    for row in range(settled, settled + DEPTHS - 1):
        here = slice(row, row + 1)
        rows = head(
            reading.embedded[:, row + 1 : row + 2],
            rows[:, -1:],
            (cos[:, here], sin[:, here]),
            None,
            cache,
        )
        found.append(rows[0, -1])
    return found


def test_the_head_s_losses_leave_the_model_alone(model: Any, tokenizer: Any) -> None:
    head = nextn.MtpHead(model.config)
    batch = picture_batch(tokenizer)
    reading = Learner(model, train.SMOKE).read(batch)
    before = [p.clone() for p in head.parameters()]
    losses = HeadLearner(head, model, train.SMOKE).learn(batch, reading)
    assert len(losses) == DEPTHS
    assert all(p.grad is None for p in model.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, head.parameters(), strict=True))
