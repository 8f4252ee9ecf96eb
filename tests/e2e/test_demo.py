"""The main job, end to end: the official client against the demo pair on two workers."""

from __future__ import annotations

import base64
import io
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from tests.e2e.conftest import SAMPLE, SETTLED_S, Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

COUNT = "Count from 3 to 9."
DESCRIBE = "Describe the image."


def image_part(image: Image.Image | None = None) -> dict[str, Any]:
    data = SAMPLE.read_bytes()
    if image is not None:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        data = buffer.getvalue()
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def ask(server: Server, content: Any, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 60, **options}
    messages: Any = [{"role": "user", "content": content}]
    return server.client.chat.completions.create(model=server.model, messages=messages, **options)


def answer(server: Server, content: Any, **options: Any) -> str:
    return ask(server, content, **options).choices[0].message.content or ""


def wait_idle(server: Server, timeout_s: float = 10) -> float:
    """Wait until every block is free; return the seconds it took, for those who read along."""
    time.sleep(SETTLED_S)
    started = time.monotonic()
    while server.metric("kv_blocks_free") < server.metric("kv_blocks"):
        assert time.monotonic() - started < timeout_s, "blocks are still held"
        time.sleep(0.05)
    return time.monotonic() - started


def test_models_health_and_metrics(server: Server) -> None:
    assert [model.id for model in server.client.models.list()] == [server.model]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    text = httpx.get(f"{server.url}/metrics").text
    assert text.count("specserve_worker_info{") == 2
    assert 'method="draft_model"' in text


def test_chat(server: Server) -> None:
    result = ask(server, COUNT)
    assert "4, 5, 6" in (result.choices[0].message.content or "")
    assert result.choices[0].finish_reason in ("stop", "length")
    usage = result.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("is_shown", [False, True])
def test_c2_c3_stream_equals_whole(server: Server, is_shown: bool) -> None:
    """C2, C3: text and usage do not depend on how the answer is sent."""
    content: Any = [image_part(), text_part(DESCRIBE)] if is_shown else COUNT
    whole = ask(server, content)
    chunks = list(ask(server, content, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    last = chunks[-1].usage
    assert (last.prompt_tokens, last.completion_tokens) == (
        whole.usage.prompt_tokens, whole.usage.completion_tokens,
    )  # fmt: skip


def test_the_sample_image_is_described(server: Server) -> None:
    assert answer(server, [image_part(), text_part(DESCRIBE)]) == (
        SAMPLE.with_suffix(".txt").read_text().strip()
    )


def test_several_images(server: Server) -> None:
    wide = image_part(Image.new("RGB", (120, 40), "blue"))
    contents: list[Any] = [
        [image_part(), text_part(DESCRIBE)],
        [image_part(), wide, text_part(DESCRIBE)],
        [image_part(), text_part("and"), wide, image_part(), text_part(DESCRIBE)],
    ]
    results = [ask(server, content) for content in contents]
    one, two, three = (result.usage.prompt_tokens for result in results)
    assert three - two > two - one > 0
    assert all(result.choices[0].message.content for result in results)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("is_shown", [False, True])
def test_speculation_does_not_show(server: Server, temperature: int, is_shown: bool) -> None:
    content: Any = [image_part(), text_part(DESCRIBE)] if is_shown else COUNT
    wishes: tuple[dict[str, Any], ...] = (
        {"enabled": False}, {"num_draft_tokens": 1}, {"num_draft_tokens": 3}, {"enabled": True},
    )  # fmt: skip
    answers = {
        answer(server, content, temperature=temperature, seed=11, extra_body={"speculation": wish})
        for wish in wishes
    }
    assert len(answers) == 1


def test_drafts_are_accepted(server: Server) -> None:
    """B28: acceptance beyond the first requests, not only a draft model that was loaded."""
    before = [server.settled(f"spec_{n}_total") for n in ("draft_tokens", "accepted_tokens")]
    for start in range(4):
        answer(server, f"Count from {start} to {start + 6}.")
    after = [server.settled(f"spec_{n}_total") for n in ("draft_tokens", "accepted_tokens")]
    drafted, accepted = (b - a for a, b in zip(before, after, strict=True))
    assert 0 < accepted <= drafted


def test_a_concurrent_mixture_equals_each_alone(server: Server) -> None:
    """A3, A6: text and image requests in one batch do not disturb each other."""
    contents: list[Any] = [
        COUNT,
        [image_part(), text_part(DESCRIBE)],
        [image_part(), image_part(Image.new("RGB", (90, 50), "green")), text_part(DESCRIBE)],
        "Spell the word cat.",
        [text_part("What is this?"), image_part(Image.new("RGB", (56, 84), "red"))],
    ]
    options = [{"temperature": t, "seed": 5, "max_tokens": 40} for t in (0, 1)]
    alone = [answer(server, c, **o) for c in contents for o in options]
    with ThreadPoolExecutor(20) as pool:
        jobs = [pool.submit(answer, server, c, **o) for c in contents for o in options]
        jobs += [pool.submit(answer, server, c, **o) for c in contents for o in options]
        together = [job.result() for job in jobs]
    assert together == alone * 2


def test_completions(server: Server) -> None:
    prompt = f"<|im_start|>user\n{COUNT}<|im_end|>\n<|im_start|>assistant\n"
    result = server.client.completions.create(
        model=server.model, prompt=prompt, temperature=0, max_tokens=60
    )
    assert result.choices[0].text == answer(server, COUNT)


def test_stop_strings(server: Server) -> None:
    whole = answer(server, COUNT)
    stop = whole[len(whole) // 2 :][:3]
    result = ask(server, COUNT, stop=[stop])
    assert result.choices[0].message.content == whole[: whole.index(stop)]
    assert result.choices[0].finish_reason == "stop"


def test_errors_reach_the_client_as_its_types(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, COUNT, n=0)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": COUNT}]
        )
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])
    assert caught.value.param == "messages[0].content[0].image_url"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, "word " * 5000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-10}, {"temperature": 1e-4}, {"temperature": 2}, {"top_p": 0},
        {"top_p": 1e-9}, {"extra_body": {"top_k": 1}}, {"extra_body": {"top_k": 10**6}},
        {"extra_body": {"min_p": 1}}, {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"max_tokens": 1},
        {"extra_body": {"min_tokens": 30}}, {"extra_body": {"stop_token_ids": [0, 5]}},
    ],
)  # fmt: skip
def test_c18_extreme_parameters_answer(server: Server, options: dict[str, Any]) -> None:
    """C18: no value that is accepted breaks the engine for others."""
    result = ask(server, COUNT, **{"temperature": 1, "max_tokens": 30, **options})
    assert result.choices[0].finish_reason in ("stop", "length")
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_closed_connection_frees_its_blocks(server: Server, is_shown: bool) -> None:
    """C21: generation ran on after the client had gone."""
    content: Any = [image_part(), text_part(DESCRIBE)] if is_shown else COUNT
    wait_idle(server)
    aborted = server.metric("requests_finished_total", finish_reason="abort")
    options: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with ask(server, content, stream=True, **options) as stream:
        for _ in range(5):
            next(iter(stream))
        assert server.settled("kv_blocks_free") < server.metric("kv_blocks")
    print(f"all blocks free after {wait_idle(server):.2f} s")
    assert server.metric("requests_finished_total", finish_reason="abort") == aborted + 1


def test_b14_unseeded_answers_differ(server: Server) -> None:
    """B14: requests without a seed shared one stream of random numbers."""
    prompt = {"model": server.model, "prompt": "Once", "max_tokens": 30, "temperature": 2, "n": 25}
    answers = [server.client.completions.create(**prompt) for _ in range(2)]
    texts = [choice.text for answer in answers for choice in answer.choices]
    assert len(texts) == len(set(texts)) == 50


def test_c23_too_hot(server: Server) -> None:
    """C23: a temperature above 2 never returned."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, COUNT, temperature=2.1)
    assert caught.value.param == "temperature"


def test_memory_of_all_processes(server: Server) -> None:
    total = 0
    for pid in server.pids():
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    assert total < 4 * 1024**2  # KiB


def test_a_killed_worker_does_not_show(server: Server) -> None:
    """E9: prompt, image, seed and emitted tokens move on; the stream has no seam."""
    options: dict[str, Any] = {
        "max_tokens": 800, "temperature": 1, "seed": 3, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    contents: list[Any] = [COUNT, [image_part(), text_part(DESCRIBE)]] * 2
    expected = [answer(server, c, **options) for c in contents[:2]] * 2
    with ThreadPoolExecutor(4) as pool:
        begun = threading.Barrier(len(contents) + 1)
        jobs = [pool.submit(streamed, server, c, begun, **options) for c in contents]
        begun.wait()
        killed_s = time.time()
        os.kill(server.pids("ServeReplica:specserve:worker")[0], signal.SIGKILL)
        assert [job.result() for job in jobs] == expected
    server.wait_replaced(killed_s)
    assert server.metric("streams_lost_total") == 0


def streamed(server: Server, content: Any, begun: threading.Barrier, **options: Any) -> str:
    """Return a streamed answer; wait at the barrier when it has begun."""
    text = ""
    for number, chunk in enumerate(ask(server, content, stream=True, **options)):
        text += chunk.choices[0].delta.content or ""
        if number == 5:
            begun.wait()
    return text
