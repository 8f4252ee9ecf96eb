"""The text plane's settings as frozen values.

Owns defaults of what the ingress can be told. Knows no files and no Ray: `deploy.settings` turns
YAML into these.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from serving.fetch import FetchLimits
from serving.images import ImageLimits
from workers.errors import ConfigError
from workers.telemetry.config import TelemetryConfig

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s,]+")


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """What one ingress process needs to know of model and limits."""

    # The name clients use in "model".
    model_id: str
    # Where tokenizer and image processor come from: a directory or a hub id.
    path: str
    revision: str | None = None
    # Images arrive as base64, which is a third larger than their bytes.
    max_body_bytes: int = 32 * 1024**2
    # Requests at once, beyond which they are refused with 429.
    max_open_requests: int = 1024
    # Workers a request may lose before it is given up.
    max_replays: int = 3
    # How long a request waits while there is no worker at all, such as one that lost its last.
    worker_wait_s: float = 30.0
    # After which any request is given up; 0 = never. A request may ask for less (`timeout`).
    max_request_s: float = 0.0
    # How long `/health` waits for a worker.
    health_timeout_s: float = 5.0
    # API keys: a file, one a line, and the name of an environment variable, separated by commas.
    # The keys themselves stand in no setting: settings are shown and logged.
    api_key_file: str | None = None
    api_key_env: str = "SPECSERVE_API_KEYS"
    # Origins whose pages may ask from a browser; "*" = any.
    cors_origins: tuple[str, ...] = ()
    # A line for each request.
    access_log: bool = True
    # How long a stream may be silent before a comment keeps its connection open; 0 = for ever.
    keep_alive_s: float = 15.0
    images: ImageLimits = field(default_factory=ImageLimits)
    fetch: FetchLimits = field(default_factory=FetchLimits)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.max_body_bytes < 1:
            raise ConfigError("ingress.max_body_bytes", self.max_body_bytes, "must be at least 1")
        if self.max_replays < 0:
            raise ConfigError("ingress.max_replays", self.max_replays, "must be at least 0")
        if not 0 < self.health_timeout_s < math.inf:
            raise ConfigError("ingress.health_timeout_s", self.health_timeout_s, "must be above 0")
        if not 0 < self.worker_wait_s < math.inf:
            raise ConfigError("ingress.worker_wait_s", self.worker_wait_s, "must be above 0")
        if not 0 <= self.max_request_s < math.inf:
            raise ConfigError("ingress.max_request_s", self.max_request_s, "must be at least 0")
        self._check_surroundings()

    def _check_surroundings(self) -> None:
        # The ingress runs in a folder of Ray's choice.
        if self.api_key_file is not None and not Path(self.api_key_file).is_absolute():
            raise ConfigError("ingress.api_key_file", self.api_key_file, "must be absolute")
        if not self.api_key_env:
            raise ConfigError("ingress.api_key_env", self.api_key_env, "must name a variable")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                accepted = "must be scheme://host[:port] without a path, null, or *"
                raise ConfigError("ingress.cors_origins", origin, accepted)
        if not 0 <= self.keep_alive_s < math.inf:
            raise ConfigError("ingress.keep_alive_s", self.keep_alive_s, "must be at least 0")
