"""The errors of specserve's engine plane, and no HTTP: `serving` maps them to statuses.

    SpecserveError
    ├── ConfigError                a setting is wrong: key, value and accepted range
    ├── BatchInfoError             a step's batch contradicts itself; never reaches a kernel
    ├── ModelLoadError             a checkpoint cannot be served: unknown family, wrong files
    ├── RequestError               one request cannot be served; others are not affected
    │   ├── InvalidRequest         contradicts itself or the model (ids, images, parameters)
    │   ├── RequestTooLong         can never fit the context or the KV pool
    │   ├── QueueFull              no room now; try again later
    │   └── GenerationFailed       accepted, then failed in the target's step
    └── WorkerLost                 the worker is gone or unusable; replay elsewhere

Invariant: every error survives pickling, since all constructor arguments go to
`super().__init__`.
"""

from __future__ import annotations


class SpecserveError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(SpecserveError):
    """A setting is wrong."""

    def __init__(self, key: str, value: object, accepted: str) -> None:
        super().__init__(key, value, accepted)
        self.key, self.value, self.accepted = key, value, accepted

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.accepted}"


class BatchInfoError(SpecserveError):
    """A step's batch contradicts itself."""


class ModelLoadError(SpecserveError):
    """A checkpoint cannot be served."""


class RequestError(SpecserveError):
    """One request cannot be served."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message, self.param = message, param

    def __str__(self) -> str:
        return self.message


class InvalidRequest(RequestError):
    """The request contradicts itself or the model."""


class RequestTooLong(RequestError):
    """The request can never fit the model's context or the KV pool."""


class QueueFull(RequestError):
    """The worker's queue is full for now."""


class GenerationFailed(RequestError):
    """The request was accepted and then failed in the target's step."""


class WorkerLost(SpecserveError):
    """The worker is gone or unusable; the request can be replayed on another."""
