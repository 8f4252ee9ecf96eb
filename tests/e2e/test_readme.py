"""The README's own commands, run as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, SAMPLE, Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

README = (ROOT / "README.md").read_text()


def blocks(section: str) -> list[str]:
    """Return the shell blocks of one section."""
    body = README.split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", body, re.DOTALL)


def run(command: str, server: Server) -> str:
    """Run a block against the test's server, with the interpreter that runs the test."""
    command = command.replace("http://127.0.0.1:8000", server.url)
    client = f"{sys.executable} -m deploy chat --url {server.url}"
    command = command.replace(".venv/bin/specserve chat", client).replace("python3", sys.executable)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout


def test_a_request_with_an_image(server: Server) -> None:
    curl, chat = blocks("A request with an image")
    caption = SAMPLE.with_suffix(".txt").read_text().strip()
    answer = json.loads(run(curl, server))
    assert answer["choices"][0]["message"]["content"] == caption
    described, counted = run(chat, server).splitlines()
    assert described == caption
    assert "4, 5, 6" in counted


def test_the_targets_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("Two commands")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
