"""Ends a process whose engine is stuck.

Owns a thread that looks after the engine's, and a timer that looks after both. Knows no engine: it
asks a function. Invariant: a process that makes no progress for long is gone, whatever holds it up:
an engine that is stuck is seen by the thread, and an interpreter that is stuck (a library that
hangs without giving up Python's lock) by the timer, which needs no Python. Either way the stack of
every thread is written to stderr first.

A health check alone is no remedy: Serve asks every ten seconds, replaces a replica at the third
failure, and meanwhile routes requests to it.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
from collections.abc import Callable

from workers.errors import WorkerLost

logger = logging.getLogger(__name__)

# Its file descriptor: Python's own object may be replaced, or gone.
_STDERR = 2
# Looks at the engine in the time after which it counts as stuck.
_LOOKS = 4


class Watchdog:
    """Asks `check` a few times per `timeout_s`; the process is to end when it raises."""

    def __init__(
        self, check: Callable[[], None], timeout_s: float, on_stall: Callable[[], None]
    ) -> None:
        """Start watching.

        Args:
            check: Raises WorkerLost when the engine is stuck or dead.
            timeout_s: After which a stuck interpreter ends the process.
            on_stall: Called on the watchdog's thread, at most once.
        """
        self._check = check
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                # From here on, this thread must come back in time.
                faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=_STDERR)
                if self._stopping.wait(self._timeout_s / _LOOKS):
                    return
                self._check()
        except WorkerLost as error:
            logger.error("the worker ends itself: %s", error)
            faulthandler.dump_traceback(file=_STDERR)
            self._on_stall()
        finally:
            faulthandler.cancel_dump_traceback_later()
