"""A process whose engine is stuck ends itself, and says where it was stuck."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest

from workers.errors import WorkerLost
from workers.watchdog import Watchdog


def run(body: str) -> subprocess.CompletedProcess[str]:
    code = "import os, time\nfrom workers.watchdog import Watchdog\n" + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_e8_a_stuck_engine_ends_the_process() -> None:
    """E8: a dead engine lived on under a replica that said it was well."""
    done = run("""
        from workers.errors import WorkerLost

        def check():
            raise WorkerLost("a step has been running for over 1 s")

        Watchdog(check, 1, lambda: os._exit(7))
        time.sleep(30)
    """)
    assert done.returncode == 7
    assert "the worker ends itself: a step has been running" in done.stderr
    assert "line" in done.stderr, "no stack was written"


def test_e8_a_stuck_interpreter_ends_the_process() -> None:
    """E8: a library that hung with Python's lock stopped every thread, health checks included."""
    done = run("""
        import ctypes

        Watchdog(lambda: None, 1, lambda: None)
        ctypes.PyDLL(None).sleep(30)  # keeps the lock
    """)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "<string>" in done.stderr, "the stack that is stuck is not told"


def test_a_healthy_process_is_left_alone() -> None:
    done = run("""
        dog = Watchdog(lambda: None, 2, lambda: os._exit(7))
        time.sleep(2.5)
        dog.close()
        time.sleep(2.5)  # the timer went with it
        print("well")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")


@pytest.mark.parametrize("is_stuck", [False, True])
def test_closing_ends_its_thread(is_stuck: bool) -> None:
    called = threading.Event()

    def check() -> None:
        if is_stuck:
            raise WorkerLost("stuck")

    dog = Watchdog(check, 60, called.set)
    dog.close()
    assert not dog._thread.is_alive()
    assert not called.is_set()
