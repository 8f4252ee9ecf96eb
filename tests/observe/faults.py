"""The command line of the product, with workers whose drafting fails now and then.

    python -m tests.observe.faults serve --config FILE

The faults are put in from outside: of forty calls of the drafter, seven in a row fail, enough for
the breaker to open and to close again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deploy import cli
from workers.actor import Worker

PERIOD, NUM_RAISES, NUM_WRONG = 40, 5, 2
_prepare = cli.prepare


class FaultyWorker(Worker):
    """A worker with a drafter that fails."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        drafter: Any = self._loop._engine._drafting.drafter
        propose, calls = drafter.propose, itertools.count()

        def broken(tasks: Sequence[Any]) -> Any:
            proposal = propose(tasks)
            if not any(task.num_drafts for task in tasks):
                return proposal
            left = PERIOD - next(calls) % PERIOD
            if left <= NUM_RAISES:
                raise RuntimeError("a made-up one")
            if left <= NUM_RAISES + NUM_WRONG:
                return replace(proposal, draft_ids=[[10**9] for _ in proposal.draft_ids])
            return proposal

        drafter.propose = broken


def prepare(num_threads: int) -> None:
    """Do what the command line does, and let the application have the workers of this module."""
    _prepare(num_threads)
    from deploy import app, local  # after that: they import Ray

    # Workers import this module by its name: run as the main one, it has another.
    from tests.observe.faults import FaultyWorker as Importable

    local.build_app = lambda settings: app.compose(settings, Importable)


if __name__ == "__main__":
    cli.prepare = prepare
    cli.main()
