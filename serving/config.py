"""The text plane's settings as frozen values.

Owns defaults of what the ingress can be told. Knows no files and no Ray: `deploy.settings` turns
YAML into these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from serving.images import ImageLimits
from workers.errors import ConfigError


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
    # Workers a request may lose before it is given up.
    max_replays: int = 3
    # How long `/health` waits for a worker.
    health_timeout_s: float = 5.0
    images: ImageLimits = field(default_factory=ImageLimits)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.max_body_bytes < 1:
            raise ConfigError("ingress.max_body_bytes", self.max_body_bytes, "must be at least 1")
        if self.max_replays < 0:
            raise ConfigError("ingress.max_replays", self.max_replays, "must be at least 0")
        if not 0 < self.health_timeout_s < math.inf:
            raise ConfigError("ingress.health_timeout_s", self.health_timeout_s, "must be above 0")
