"""What Ray and the math libraries read from the environment, for an application on this machine.

Owns names and values. Knows no Ray: `prepare` must run before Ray is first imported, which reads
some of them then. Invariant: what the user has set himself is kept.
"""

from __future__ import annotations

import os

_VALUES = {
    # Spinning threads of one worker take the core from the next: a step becomes 5 times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Named for the systems where it is the default: the node is 127.0.0.1, and Ray's servers
    # listen there alone instead of on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def prepare(num_threads: int) -> None:
    """Set the environment of this process and all that it will start.

    Args:
        num_threads: Of a worker's math libraries.
    """
    for name, value in {**_VALUES, "OMP_NUM_THREADS": str(num_threads)}.items():
        os.environ.setdefault(name, value)
