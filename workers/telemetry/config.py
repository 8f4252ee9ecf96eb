"""What processes log and trace, as frozen values; defaults stand here.

Knows no files: `deploy.settings` turns YAML into these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workers.errors import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Logs and traces of every process."""

    log_level: str = "INFO"
    # `json` = an object a line.
    log_format: str = "text"
    # How often a worker that had something to do says what it did; 0 = never.
    log_interval_s: float = 10.0
    # Where spans go, by OTLP over HTTP, such as http://collector:4318/v1/traces; empty = no traces.
    trace_endpoint: str = ""
    # Share of the requests that are traced, of those whose client says nothing about it.
    trace_ratio: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for key, accepted in (("log_level", LOG_LEVELS), ("log_format", LOG_FORMATS)):
            if getattr(self, key) not in accepted:
                raise self._error(key, f"must be one of {', '.join(accepted)}")
        if not 0 <= self.log_interval_s < math.inf:
            raise self._error("log_interval_s", "must be at least 0, and finite")
        if self.trace_endpoint and not self.trace_endpoint.startswith(("http://", "https://")):
            raise self._error("trace_endpoint", "must begin with http:// or https://")
        if not 0 <= self.trace_ratio <= 1:
            raise self._error("trace_ratio", "must be in [0, 1]")

    def _error(self, key: str, accepted: str) -> ConfigError:
        return ConfigError(f"observability.{key}", getattr(self, key), accepted)
