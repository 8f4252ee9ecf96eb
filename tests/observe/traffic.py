"""Traffic in the background: requests of every kind, wrong ones, and clients that go."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.chaos.traffic import AS_SCHEMA, COUNT, LONG, SHOWN, TOOL
from tests.e2e.conftest import Server

NUM_CLIENTS = 6
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Statuses of requests that are wrong on purpose.
WRONG = (400, 404)


def _chat(content: Any, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **options}


SHORT: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
# Path, body, status. Each comes with a seed, a user and an id of its own.
REQUESTS: tuple[tuple[str, dict[str, Any], int], ...] = (
    (CHAT, _chat(COUNT, stream=True, temperature=0, **LONG), 200),
    (CHAT, _chat(SHOWN, stream=True, temperature=0, max_tokens=120), 200),
    (CHAT, _chat(COUNT, temperature=1, n=3, **SHORT), 200),
    (CHAT, _chat(SHOWN, stream=True, temperature=1, logprobs=True, **SHORT), 200),
    (CHAT, _chat(COUNT, temperature=0.7, speculation={"enabled": False}, **SHORT), 200),
    (CHAT, _chat(COUNT, temperature=1, max_tokens=300, response_format=AS_SCHEMA), 200),
    (CHAT, _chat(COUNT, temperature=1, max_tokens=900, tools=[TOOL], tool_choice="required",
                 parallel_tool_calls=False), 200),
    (CHAT, _chat(SHOWN, temperature=0, max_tokens=40, stop=["a"]), 200),
    (TEXT, {"prompt": "Count from 3 to 9. ", "temperature": 0, **SHORT}, 200),
    (CHAT, _chat(COUNT, temperature=3), 400),
    (CHAT, _chat("word " * 5000), 400),
    (CHAT, _chat(COUNT, model="another"), 404),
    ("/tokenize", {"prompt": COUNT}, 200),
)  # fmt: skip
# One of so many streams is left by its client.
ABORT_EVERY = 7


class Traffic:
    """Clients that ask without end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._numbers = itertools.count()
        self._is_on, self._is_over = threading.Event(), threading.Event()
        self._num_open, self._changed = 0, threading.Condition()
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_CLIENTS)]
        # What was not answered as it should have been.
        self.problems: list[str] = []
        self.num_answered = 0

    def start(self) -> None:
        """Let the clients begin."""
        self._is_on.set()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for their last answers."""
        self._is_over.set()
        self._is_on.set()
        for thread in self._threads:
            thread.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let every answer end, and have none begin."""
        self._is_on.clear()
        with self._changed:
            assert self._changed.wait_for(lambda: not self._num_open, timeout=60)
        try:
            yield
        finally:
            self._is_on.set()

    def wait(self, num_more: int, timeout_s: float = 60) -> None:
        """Wait for so many more answers."""
        wanted, deadline = self.num_answered + num_more, time.monotonic() + timeout_s
        while self.num_answered < wanted:
            assert time.monotonic() < deadline, "no answers come"
            time.sleep(0.1)

    def _run(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=90) as client:
            while not self._is_over.is_set():
                self._is_on.wait()
                with self._changed:
                    if not self._is_on.is_set():
                        continue
                    self._num_open += 1
                try:
                    self._ask(client, next(self._numbers))
                except Exception as error:  # noqa: BLE001 - told by the test that looks
                    self.problems.append(repr(error))
                finally:
                    with self._changed:
                        self._num_open -= 1
                        self.num_answered += 1
                        self._changed.notify_all()

    def _ask(self, client: httpx.Client, number: int) -> None:
        path, body, status = REQUESTS[number % len(REQUESTS)]
        body = {"model": self._server.model, **body}
        if path != "/tokenize":
            body |= {"seed": number, "user": f"user-{number}"}
        headers = {"x-request-id": f"request-{number}"}
        with client.stream("POST", path, json=body, headers=headers) as response:
            is_left = bool(body.get("stream")) and number % ABORT_EVERY == 0
            lines = list(itertools.islice(response.iter_lines(), 6 if is_left else None))
        if response.status_code != status:
            self.problems.append(f"{response.status_code} for {path}: {lines}")
        elif status == 200 and not is_left:
            self._look(lines, is_stream=bool(body.get("stream")))

    def _look(self, lines: list[str], *, is_stream: bool) -> None:
        if is_stream and (lines[-2:] != ["data: [DONE]", ""] or any("error" in x for x in lines)):
            self.problems.append(f"a stream ended with {lines[-4:]}")
        elif not is_stream and "error" in json.loads("\n".join(lines)):
            self.problems.append("\n".join(lines))


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.2)
