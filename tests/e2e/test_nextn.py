"""The seed's scenario through HTTP: a Qwen3.5 model, its own head, image and text in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from PIL import Image

from tests.e2e.conftest import SAMPLE, Server, running
from tests.e2e.test_demo import COUNT, DESCRIBE, answer, image_part, text_part, wait_idle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def nextn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("demo-nextn", tmp_path_factory.mktemp("nextn") / "log") as server:
        yield server


def _spec(server: Server, name: str) -> float:
    return server.settled(f"spec_{name}_total")


def test_seed_crash_one_batch_of_image_and_text_requests(nextn: Server) -> None:
    """The crash that this project grew out of: NEXTN, image and text in one draft-extend.

    Every answer is the one without speculation, nothing of drafting failed, and drafts count.
    """
    contents: list[Any] = [
        COUNT,
        [image_part(), text_part(DESCRIBE)],
        [image_part(Image.new("RGB", (90, 50), "green")), image_part(), text_part(DESCRIBE)],
        [text_part(DESCRIBE), image_part()],
        "Spell the word cat.",
        "Count from 12 to 17.",
    ]
    options = [{"temperature": t, "seed": 3, "max_tokens": 40} for t in (0, 1)]
    plain = {"speculation": {"enabled": False}}
    alone = [answer(nextn, c, extra_body=plain, **o) for c in contents for o in options]
    before = _spec(nextn, "draft_tokens"), _spec(nextn, "accepted_tokens")
    with ThreadPoolExecutor(24) as pool:
        jobs = [pool.submit(answer, nextn, c, **o) for _ in "ab" for c in contents for o in options]
        together = [job.result() for job in jobs]
    assert together == alone * 2
    drafted = _spec(nextn, "draft_tokens") - before[0]
    accepted = _spec(nextn, "accepted_tokens") - before[1]
    assert 0.2 * drafted < accepted <= drafted
    assert _spec(nextn, "failures") == 0
    wait_idle(nextn)


def test_the_sample_image_is_described_by_its_head_too(nextn: Server) -> None:
    text = answer(nextn, [image_part(), text_part(DESCRIBE)])
    assert text == SAMPLE.with_suffix(".txt").read_text().strip()


def test_a_video_is_refused_with_the_reason(nextn: Server) -> None:
    """A10: where the library's video processor does not import, the request says so."""
    frames = [image_part()["image_url"]["url"]] * 4
    with pytest.raises(openai.BadRequestError, match="torchvision"):
        answer(nextn, [{"type": "video", "video": frames, "fps": 1.0}, text_part(DESCRIBE)])
