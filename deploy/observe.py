"""Runs a Prometheus of its own beside a server, with the rules that are shipped.

Owns its configuration and its life: it listens on loopback, keeps its data in a temporary folder,
and ends with the block. Knows no metrics. Invariant: the server is one target, whichever ingress
answers, as a scrape of any of them shows the whole application.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from workers.errors import SpecserveError

HERE = Path(__file__).parent
RULES = HERE / "prometheus"
GRAFANA = HERE / "grafana"
PROMETHEUS = "prometheus"
LOOPBACK = "127.0.0.1"
READY_S, STOP_S = 30.0, 10.0
_LISTENING = re.compile(r'msg="?Listening on"? address=(\S+)')


class ObserveError(SpecserveError):
    """Prometheus is not there, or did not start."""


def prometheus_config(url: str, interval_s: float) -> dict[str, Any]:
    """Return a Prometheus configuration with one target.

    Args:
        url: The server's, without a path.
        interval_s: Between two scrapes, and between two looks at the rules.

    Raises:
        ObserveError: That is not a URL.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ObserveError(f"{url}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ObserveError(f"{url}: must begin with http:// or https://")
    job = {
        "job_name": "specserve",
        "scheme": parsed.scheme,
        "metrics_path": f"{parsed.path.rstrip('/')}/metrics",
        # On Kubernetes the namespace comes with the target.
        "static_configs": [{"targets": [parsed.netloc.decode()], "labels": {"namespace": "local"}}],
    }
    every = f"{round(interval_s * 1000)}ms"
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(RULES / "*.yml")],
        "scrape_configs": [job],
    }


@contextmanager
def observing(
    url: str, port: int = 0, interval_s: float = 5.0
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a Prometheus; yield its URL and its process when it answers.

    Args:
        url: The server to scrape.
        port: Of Prometheus, on loopback; 0 takes any free one.
        interval_s: Between two scrapes.

    Raises:
        ObserveError: Prometheus is not installed, or does not start.
    """
    program = shutil.which(PROMETHEUS)
    if program is None:
        raise ObserveError(
            f"`{PROMETHEUS}` is not on the PATH; on Debian and Ubuntu it is the package of that"
            " name (`apt-get install --no-install-recommends prometheus`)"
        )
    config = prometheus_config(url, interval_s)
    with tempfile.TemporaryDirectory(prefix="specserve-prometheus-") as name:
        folder = Path(name)
        (folder / "config.yml").write_text(yaml.safe_dump(config))
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    program, f"--config.file={folder / 'config.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={LOOPBACK}:{port}",
                ],
                stdout=output, stderr=subprocess.STDOUT, cwd=folder,
            )  # fmt: skip
        try:
            yield _wait_ready(process, log), process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return where Prometheus listens, which it writes to its log."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        if process.poll() is not None:
            raise ObserveError(f"Prometheus did not start: {_last_error(text)}")
        if found := _LISTENING.search(text):
            url = f"http://{found[1]}"
            try:
                if httpx.get(f"{url}/-/ready", timeout=READY_S).status_code == httpx.codes.OK:
                    return url
            except httpx.TransportError:
                pass
        time.sleep(0.1)
    raise ObserveError(f"Prometheus was not ready in {READY_S:g} s")


def _last_error(text: str) -> str:
    lines = text.strip().splitlines() or ["it wrote nothing"]
    return next((line for line in reversed(lines) if "level=error" in line), lines[-1])
