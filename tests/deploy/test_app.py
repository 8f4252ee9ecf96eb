"""The application on Ray, with fake workers: streams, disconnects, deaths, metrics."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from serving.detokenizer import Detokenizer
from tests.deploy.conftest import MODEL_ID, wait_until
from tests.deploy.fake_worker import BUG, DELAY_S, FAILED, LOST, REFUSED, token_at
from tests.serving.doubles import data_url, make_tokenizer, picture

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

CHAT = "/v1/chat/completions"


def body(max_tokens: int = 20, content: Any = "hi", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL_ID, "messages": messages, "max_tokens": max_tokens, **fields}


def text_of(num_tokens: int) -> str:
    """What a client sees of the first tokens: their text without an unfinished character."""
    return Detokenizer(make_tokenizer()).push([token_at(i) for i in range(num_tokens)])


def events(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def stream(url: str, **fields: Any) -> list[Any]:
    with httpx.stream("POST", url + CHAT, json=body(stream=True, **fields), timeout=60) as response:
        assert response.status_code == 200, response.read()
        return list(events(response))


def joined(items: list[Any]) -> str:
    choices = [c for e in items if e != "[DONE]" for c in e.get("choices", ())]
    return "".join(c["delta"].get("content", "") for c in choices)


def series(url: str, name: str, **labels: str) -> dict[str, float]:
    """Return a metric's values by the worker's number."""
    found = {}
    for line in httpx.get(f"{url}/metrics", timeout=10).text.splitlines():
        match = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
        if match and match[1] == f"specserve_{name}":
            have = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            if have.items() >= labels.items():
                found[have["worker"]] = float(match[3])
    return found


def processes(url: str) -> dict[str, str]:
    """Return the process ids of the workers that report, by their numbers."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    lines = re.findall(r"^specserve_worker_info\{(.*)\}", text, re.MULTILINE)
    infos = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
    return {info["worker"]: info["replica"] for info in infos}


def values(url: str, name: str, **labels: str) -> dict[str, float]:
    """Return a metric's values by the worker's process id, of those that report."""
    names = processes(url)
    found = series(url, name, **labels)
    return {names[number]: value for number, value in found.items() if number in names}


def test_chat_and_stream(ray_url: str) -> None:
    whole = httpx.post(ray_url + CHAT, json=body()).json()
    items = stream(ray_url, stream_options={"include_usage": True})
    assert items[-1] == "[DONE]"
    assert joined(items) == whole["choices"][0]["message"]["content"] == text_of(20)
    assert items[-2]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 20


def test_an_image_travels_to_the_worker(ray_url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(picture(300, 300))}}
    plain = httpx.post(ray_url + CHAT, json=body(content="a")).json()["usage"]
    content = [part, part, {"type": "text", "text": "a"}]
    shown = httpx.post(ray_url + CHAT, json=body(content=content)).json()["usage"]
    assert shown["prompt_tokens"] > plain["prompt_tokens"] + 8


def test_a_refusal_crosses_ray_as_its_type(ray_url: str) -> None:
    response = httpx.post(ray_url + CHAT, json=body(seed=REFUSED, stream=True))
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "refused by the worker", "type": "invalid_request_error", "param": "seed",
        "code": "invalid_value",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "code"),
    [(FAILED, "generation_failed"), (LOST, "stream_lost"), (BUG, "internal_error")],
)
def test_a_failure_in_mid_stream_is_an_error_event(ray_url: str, seed: int, code: str) -> None:
    """E9: a stream that cannot go on says so, and does not look complete."""
    items = stream(ray_url, seed=seed)
    assert items[-1]["error"]["code"] == code
    assert "Traceback" not in json.dumps(items)
    assert joined(items) == text_of(4)


def test_bad_bodies_and_unknown_models(ray_url: str) -> None:
    assert httpx.post(ray_url + CHAT, json=body(n=0)).json()["error"]["param"] == "n"
    assert httpx.post(ray_url + CHAT, json={**body(), "model": "x"}).status_code == 404
    response = httpx.post(ray_url + CHAT, json=body(), headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_closed_connection_aborts_the_request(
    ray_url: str, is_stream: bool, is_early: bool
) -> None:
    """C21: the worker's generator is cancelled within a second, streaming or not."""
    before = sum(series(ray_url, "requests_finished_total", finish_reason="abort").values())
    payload = body(4000, stream=is_stream)
    if is_stream:
        with httpx.stream("POST", ray_url + CHAT, json=payload, timeout=60) as response:
            items = events(response)
            for _ in range(0 if is_early else 5):
                next(items)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(ray_url + CHAT, json=payload, timeout=DELAY_S if is_early else 0.5)

    def is_aborted() -> bool:
        aborted = series(ray_url, "requests_finished_total", finish_reason="abort")
        running = values(ray_url, "requests_running")
        return sum(running.values()) == 0 and (is_early or sum(aborted.values()) > before)

    assert wait_until(is_aborted) < 2


def test_the_model_is_described(ray_url: str) -> None:
    """The limit is the workers' to know, and reaches the client through Ray."""
    (entry,) = httpx.get(f"{ray_url}/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"]) == (MODEL_ID, 2048)
    assert entry["modalities"][:2] == ["text", "image"]
    counted = httpx.post(f"{ray_url}/tokenize", json={"messages": body()["messages"]}).json()
    answered = httpx.post(ray_url + CHAT, json=body()).json()
    assert counted["count"] == answered["usage"]["prompt_tokens"]
    assert counted["max_model_len"] == 2048


def test_the_request_id_names_the_answer(ray_url: str) -> None:
    answer = httpx.post(ray_url + CHAT, json=body(), headers={"x-request-id": "mine"})
    assert answer.json()["id"] == "chatcmpl-mine"
    made = httpx.post(ray_url + CHAT, json=body())
    assert made.json()["id"] == f"chatcmpl-{made.headers['x-request-id']}"


def test_metrics_come_from_one_place(ray_url: str) -> None:
    """Scrapes through the load-balanced route must not see counters jump back."""
    httpx.post(ray_url + CHAT, json=body())
    scrapes = [series(ray_url, "generated_tokens_total") for _ in range(10)]
    assert all(len(scrape) >= 2 for scrape in scrapes)
    for earlier, later in itertools.pairwise(scrapes):
        assert all(later[worker] >= earlier[worker] for worker in earlier)


def test_a_killed_worker_does_not_show(ray_url: str) -> None:
    """E9: the stream goes on, contiguous, on another worker; other streams are untouched."""
    num_tokens = 200
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, ray_url, max_tokens=num_tokens) for _ in range(4)]
        wait_until(lambda: sum(values(ray_url, "requests_running").values()) == 4)
        wait_until(lambda: min(values(ray_url, "requests_running").values()) > 0)
        running = values(ray_url, "requests_running")
        victim = max(running, key=lambda worker: running[worker])
        os.kill(int(victim), signal.SIGKILL)
        results = [future.result() for future in streams]
    for items in results:
        assert items[-1] == "[DONE]"
        assert joined(items) == text_of(num_tokens)
        reasons = [c["finish_reason"] for e in items[:-1] for c in e["choices"]]
        assert [r for r in reasons if r] == ["length"]
    wait_until(lambda: len(set(processes(ray_url).values()) - {victim}) == 2, 60)
    wait_until(lambda: victim not in processes(ray_url).values(), 60)
    assert victim not in values(ray_url, "requests_running")
    assert httpx.get(f"{ray_url}/health").status_code == 200
