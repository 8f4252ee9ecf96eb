"""The application's settings: YAML in, frozen dataclasses out.

Owns the shape of configuration files and where paths in them point. Knows no Ray. Invariant:
defaults stand in the dataclasses of `workers.config`, `serving.config` and here, each once;
whatever a file leaves out is left to them, and a key that does not exist is refused.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

import deploy.demo
from serving.config import ServingConfig
from serving.fetch import FetchLimits
from serving.images import ImageLimits
from workers.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from workers.errors import ConfigError
from workers.telemetry.config import TelemetryConfig

DEMO_SCHEME = "demo:"
DEMO_MODELS = Path(deploy.demo.__file__).parent / "models"
MAX_PORT = 65535
ROUTERS = ("prefix", "power_of_two")
# Requests that an ingress holds beyond its limit, while it refuses them itself.
INGRESS_SPARE = 1024
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How Ray Serve runs the replicas of one deployment."""

    # Where the settings stand in a file, for errors.
    section: ClassVar[str]

    num_replicas: int = 1
    # Ray's unit of scheduling, not a limit; fractions let a small machine hold all actors.
    num_cpus: float = 0.25
    num_gpus: float = 0.0
    # None = derived: see `AppSettings`.
    max_ongoing_requests: int | None = None
    # Streams that outlast this at a shutdown are replayed on another worker.
    graceful_shutdown_timeout_s: float = 20.0
    health_check_period_s: float = 10.0
    health_check_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        self._at_least(1, "num_replicas", "max_ongoing_requests")
        for key in ("num_cpus", "num_gpus", "graceful_shutdown_timeout_s"):
            # Written so that NaN fails, here and below.
            if not 0 <= getattr(self, key) < math.inf:
                raise self._error(key, "must be at least 0, and finite")
        for key in ("health_check_period_s", "health_check_timeout_s"):
            if not 0 < getattr(self, key) < math.inf:
                raise self._error(key, "must be above 0, and finite")

    def _at_least(self, minimum: int, *keys: str) -> None:
        for key in keys:
            value = getattr(self, key)
            if value is not None and value < minimum:
                raise self._error(key, f"must be at least {minimum}")

    def _error(self, key: str, accepted: str) -> ConfigError:
        return ConfigError(f"{self.section}.{key}", getattr(self, key), accepted)


@dataclass(frozen=True, slots=True)
class WorkerSettings(ReplicaSettings):
    """The workers: their replicas, and the parts of the engine that depend on the machine."""

    section: ClassVar[str] = "worker"

    # Requests that may wait in one ingress process while all workers are full; then 429.
    max_queued_requests: int = 256
    # Who picks a worker for a request: `prefix` = the one with least to do for it, its prefix cache
    # considered; `power_of_two` = Serve's own, the shorter queue of two.
    router: str = "prefix"
    # How much a cached token counts against a token of work.
    prefix_weight: float = 0.5
    # None = the engine's own default.
    num_threads: int | None = None
    stall_timeout_s: float | None = None
    device: str | None = None
    attention_backend: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        # Slots make a second class of this one, which `super()` without arguments does not know.
        ReplicaSettings.__post_init__(self)
        self._at_least(1, "max_queued_requests", "num_threads")
        if self.router not in ROUTERS:
            raise self._error("router", f"must be one of {', '.join(ROUTERS)}")
        if not 0 <= self.prefix_weight <= 1000:
            raise self._error("prefix_weight", "must be in [0, 1000]")
        if self.device is not None and not _DEVICE.fullmatch(self.device):
            raise self._error("device", "must be auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, slots=True)
class IngressSettings(ReplicaSettings):
    """The ingress: its replicas and its limits."""

    section: ClassVar[str] = "ingress"

    # Behind a worker stands another one; a stream that outlasts its ingress is cut.
    graceful_shutdown_timeout_s: float = 300.0
    # None = the default of `ServingConfig`.
    max_body_bytes: int | None = None
    max_replays: int | None = None
    health_timeout_s: float | None = None
    worker_wait_s: float | None = None
    max_request_s: float | None = None
    api_key_file: str | None = None
    api_key_env: str | None = None
    cors_origins: tuple[str, ...] | None = None
    access_log: bool | None = None
    keep_alive_s: float | None = None
    images: ImageLimits = field(default_factory=ImageLimits)
    fetch: FetchLimits = field(default_factory=FetchLimits)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where Serve's proxy listens."""

    host: str = "127.0.0.1"
    port: int = 8000

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not self.host.strip():
            raise ConfigError("http.host", self.host, "must be a name or an address")
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError("http.port", self.port, f"must be in [0, {MAX_PORT}]; 0 = any")


class AppSettings(BaseModel):
    """All of one application, and the argument of `deploy.app:build_app`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # The name clients use in "model".
    model_id: str = Field(min_length=1)
    target: ModelConfig
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    ingress: IngressSettings = Field(default_factory=IngressSettings)
    observability: TelemetryConfig = Field(default_factory=TelemetryConfig)
    http: HttpSettings = Field(default_factory=HttpSettings)

    @model_validator(mode="wrap")
    @classmethod
    def _check_booleans(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse booleans for numbers.

        Pydantic reads them as 1 and 0, unless it is strict; then it refuses numbers in strings,
        which Serve's `key=value` arguments are.
        """
        settings = handler(values)
        if isinstance(values, dict):
            _refuse_booleans(values, settings)
        return settings

    def engine_config(self) -> EngineConfig:
        """Return what a worker is told."""
        speculation = self.speculation
        if speculation.draft is not None:
            speculation = replace(speculation, draft=_located(speculation.draft))
        worker = self.worker
        machine = {
            "device": worker.device,
            "attention_backend": worker.attention_backend,
            "num_threads": worker.num_threads,
            "stall_timeout_s": worker.stall_timeout_s,
        }
        return EngineConfig(
            model_id=self.model_id,
            target=_located(self.target),
            cache=self.cache,
            scheduler=self.scheduler,
            speculation=speculation,
            telemetry=self.observability,
            **_given(machine),
        )

    def serving_config(self) -> ServingConfig:
        """Return what an ingress is told."""
        target = _located(self.target)
        ingress = self.ingress
        limits = {
            "max_body_bytes": ingress.max_body_bytes,
            "max_replays": ingress.max_replays,
            "health_timeout_s": ingress.health_timeout_s,
            "worker_wait_s": ingress.worker_wait_s,
            "max_request_s": ingress.max_request_s,
            "api_key_file": ingress.api_key_file,
            "api_key_env": ingress.api_key_env,
            "cors_origins": ingress.cors_origins,
            "access_log": ingress.access_log,
            "keep_alive_s": ingress.keep_alive_s,
        }
        return ServingConfig(
            model_id=self.model_id,
            max_open_requests=self.ingress_open,
            path=target.path,
            revision=target.revision,
            images=ingress.images,
            fetch=ingress.fetch,
            telemetry=self.observability,
            **_given(limits),
        )

    @property
    def worker_ongoing(self) -> int:
        """Requests at a worker at once: all that its engine runs or lets wait."""
        if self.worker.max_ongoing_requests is not None:
            return self.worker.max_ongoing_requests
        return self.scheduler.max_running + self.scheduler.max_waiting

    @property
    def ingress_open(self) -> int:
        """Requests that an ingress has open: one stream is one, so all that the workers hold."""
        if self.ingress.max_ongoing_requests is not None:
            return self.ingress.max_ongoing_requests
        return self.worker_ongoing * self.worker.num_replicas + self.worker.max_queued_requests

    @property
    def ingress_ongoing(self) -> int:
        """Requests that Serve lets in: those, and what is refused with an answer of our own.

        Health and metrics are among the latter. Beyond, Serve refuses in plain text.
        """
        return self.ingress_open + INGRESS_SPARE


def _refuse_booleans(given: dict[str, Any], taken: object, section: str = "") -> None:
    for key, value in given.items():
        accepted = getattr(taken, key)
        if isinstance(value, dict):
            _refuse_booleans(value, accepted, f"{section}{key}.")
        elif isinstance(value, bool) and not isinstance(accepted, bool):
            raise ConfigError(f"{section}{key}", value, "must be a number")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is None, so that the receiving dataclass's default holds."""
    return {key: value for key, value in values.items() if value is not None}


def _located(model: ModelConfig) -> ModelConfig:
    """Resolve `demo:NAME` to the packaged model; done late, so files stay portable."""
    if not model.path.startswith(DEMO_SCHEME):
        return model
    return replace(model, path=str(DEMO_MODELS / model.path.removeprefix(DEMO_SCHEME)))


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML's own loader takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Read one mapping."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or mapping: no key of ours, refused later
            if key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: the key {key.value!r} stands twice")
            seen.add(key.value)
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a settings file, with its relative paths (`./`, `../`, `~`) made absolute.

    A model path that does not begin like a path is a hub id or a `demo:` model, left as it is.

    Raises:
        ConfigError: The file cannot be read or holds no mapping.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    # ValueError: no UTF-8, or a value that only looks like a date.
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())  # YAML's own are several lines long
        raise ConfigError(str(path), "", f"cannot be read: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(str(path), values, "must hold a mapping of settings")
    speculation = values.get("speculation")
    models = {
        "target.path": values.get("target"),
        "speculation.draft.path": speculation.get("draft") if isinstance(speculation, dict) else 0,
    }
    for key, model in models.items():
        if isinstance(model, dict) and str(model.get("path", "")).startswith((".", "~")):
            model["path"] = _absolute(path.parent, model["path"], key)
    ingress, key = values.get("ingress"), "api_key_file"
    if isinstance(ingress, dict) and str(ingress.get(key, "")).startswith((".", "~")):
        ingress[key] = _absolute(path.parent, ingress[key], f"ingress.{key}")
    return values


def _absolute(folder: Path, path: str, key: str) -> str:
    try:
        return str((folder / Path(path).expanduser()).resolve())
    # `~name` of nobody, a NUL, a link to itself.
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(key, path, f"is no path: {error}") from error


def parse_settings(values: dict[str, Any], source: str) -> AppSettings:
    """Validate settings.

    Raises:
        ConfigError: A key is unknown or missing, or a value is out of range.
    """
    try:
        settings = AppSettings.model_validate(values)
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(item) for item in e['loc'])}: {e['msg']}" for e in error.errors()
        ]
        raise ConfigError(source, "", "; ".join(problems)) from error
    # Building them checks the ranges that involve several values.
    settings.engine_config()
    settings.serving_config()
    return settings


def load_settings(path: Path) -> AppSettings:
    """Read and validate a settings file."""
    return parse_settings(read_yaml(path), str(path))


def check_models(settings: AppSettings) -> None:
    """Check that models given as directories are there.

    Raises:
        ConfigError: One is not.
    """
    engine = settings.engine_config()
    models = {"target.path": engine.target, "speculation.draft.path": engine.speculation.draft}
    for key, model in models.items():
        if model is None or not Path(model.path).is_absolute():
            continue
        if not (Path(model.path) / "config.json").is_file():
            raise ConfigError(key, model.path, "is no model directory (it has no config.json)")
