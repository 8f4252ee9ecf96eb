"""The worker's settings as frozen values, checked when made.

Owns defaults and ranges of everything the engine can be told. Knows no files, environment or
pydantic: `deploy.settings` turns YAML into these. Invariant: a value that exists is valid; what
is derived at run time (the number of KV blocks that fit) is a result, never written back here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.errors import ConfigError
from workers.telemetry.config import TelemetryConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
METHODS = ("none", "draft_model", "ngram", "nextn")


def _at_least(key: str, value: float, minimum: float) -> None:
    if value < minimum:
        raise ConfigError(key, value, f"must be at least {minimum}")


def _at_most(key: str, value: float, maximum: float) -> None:
    if value > maximum:
        raise ConfigError(key, value, f"must be at most {maximum}")


def _one_of(key: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ConfigError(key, value, f"must be one of {', '.join(accepted)}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint and how to hold it."""

    # A local directory or a hub id; safetensors only.
    path: str
    revision: str | None = None
    # "auto" = the checkpoint's own on CUDA, float32 on CPU.
    dtype: str = "auto"

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not self.path:
            raise ConfigError("model.path", self.path, "must name a directory or a hub id")
        _one_of("model.dtype", self.dtype, DTYPES)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged K/V memory, shared by every model of the worker through one block table."""

    # Slots per block; flash-attn's paged kernels need a multiple of 16.
    block_size: int = 16
    # None = as many as `memory_bytes` or `gpu_memory_fraction` allow.
    num_blocks: int | None = None
    # Used on CPU when num_blocks is None.
    memory_bytes: int = 256 * 1024**2
    # Share of the device's memory for weights and K/V, used on CUDA when num_blocks is None.
    gpu_memory_fraction: float = 0.85
    prefix_caching: bool = True
    # Image embeddings kept for reuse, per model.
    image_cache_bytes: int = 256 * 1024**2
    # Recurrent states kept for reuse, in models with linear attention, and tokens between them.
    state_cache_bytes: int = 256 * 1024**2
    state_interval: int = 256

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.block_size < 16 or self.block_size % 16:
            raise ConfigError("cache.block_size", self.block_size, "must be a multiple of 16")
        if self.num_blocks is not None:
            _at_least("cache.num_blocks", self.num_blocks, 1)
        _at_least("cache.memory_bytes", self.memory_bytes, 1)
        _at_least("cache.image_cache_bytes", self.image_cache_bytes, 0)
        _at_least("cache.state_cache_bytes", self.state_cache_bytes, 0)
        if self.state_interval < 1 or self.state_interval % self.block_size:
            raise ConfigError(
                "cache.state_interval",
                self.state_interval,
                f"must be a multiple of cache.block_size ({self.block_size})",
            )
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(
                "cache.gpu_memory_fraction", self.gpu_memory_fraction, "must be in (0, 1]"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one step and of the queue."""

    # Tokens of one step over all sequences, drafts included.
    max_step_tokens: int = 2048
    # Prompt tokens of one sequence in one step: bounds how long a decode row waits.
    max_chunk_tokens: int = 512
    # What a step should take at most while sequences decode: prompts are cut into smaller chunks
    # for it. 0 = whatever it takes.
    max_step_ms: float = 250.0
    max_running: int = 64
    max_waiting: int = 256
    # Prompt plus emitted tokens; None = the model's context. The KV pool may lower it further.
    max_sequence_len: int | None = None
    # Passes without progress after which the head of the queue is failed.
    max_stalled_passes: int = 100

    def __post_init__(self) -> None:
        """Check the ranges."""
        for key in ("max_chunk_tokens", "max_running", "max_waiting", "max_stalled_passes"):
            _at_least(f"scheduler.{key}", getattr(self, key), 1)
        # Decode rows are never left out of a step, so a step must hold one token of each.
        _at_least("scheduler.max_step_tokens", self.max_step_tokens, self.max_running)
        if not 0 <= self.max_step_ms < float("inf"):
            raise ConfigError("scheduler.max_step_ms", self.max_step_ms, "must be at least 0")
        if self.max_sequence_len is not None:
            _at_least("scheduler.max_sequence_len", self.max_sequence_len, 2)


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When drafting is left off, and for how long."""

    # Steps with failed drafting, of the last `window` that drafted, after which it is left off.
    max_failures: int = 5
    window: int = 20
    # Until it is tried again; twice as long after each try that fails, up to `max_open_s`.
    open_s: float = 10.0
    max_open_s: float = 300.0
    # A step whose drafting took longer has failed.
    slow_s: float = 5.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        _at_least("speculation.breaker.max_failures", self.max_failures, 1)
        _at_least("speculation.breaker.window", self.window, self.max_failures)
        for key in ("open_s", "slow_s"):
            if not 0 < getattr(self, key) <= 86_400:
                value = getattr(self, key)
                raise ConfigError(f"speculation.breaker.{key}", value, "must be in (0, 86400]")
        if not self.open_s <= self.max_open_s <= 86_400:
            raise ConfigError(
                "speculation.breaker.max_open_s",
                self.max_open_s,
                "must be in [speculation.breaker.open_s, 86400]",
            )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How tokens are drafted."""

    method: str = "none"
    draft: ModelConfig | None = None
    # Drafts per sequence and step.
    num_draft_tokens: int = 4
    # Tokens that must recur for `ngram` to draft what followed them: the longest is tried first.
    ngram_max: int = 4
    ngram_min: int = 2
    breaker: BreakerConfig = field(default_factory=BreakerConfig)

    def __post_init__(self) -> None:
        """Check the ranges and that the method has its model."""
        _one_of("speculation.method", self.method, METHODS)
        _at_least("speculation.num_draft_tokens", self.num_draft_tokens, 1)
        # With the token before them they are one short run of linear attention.
        _at_most("speculation.num_draft_tokens", self.num_draft_tokens, 63)
        if self.method == "draft_model" and self.draft is None:
            raise ConfigError("speculation.draft", None, "method draft_model needs a draft model")
        _at_least("speculation.ngram_min", self.ngram_min, 1)
        _at_least("speculation.ngram_max", self.ngram_max, self.ngram_min)
        if self.method != "draft_model" and self.draft is not None:
            raise ConfigError(
                "speculation.draft", self.draft.path, "is loaded by method draft_model only"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything one worker's engine is told."""

    # The name clients use in "model".
    model_id: str
    target: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    # "auto" = cuda where there is one, else cpu.
    device: str = "auto"
    # "auto" = vllm_flash_attn on CUDA where a distribution is installed, else sdpa.
    attention_backend: str = "auto"
    # CPU threads of the worker's torch; None = torch's own choice.
    num_threads: int | None = None
    # A step that takes longer is stuck, and the worker ends itself, to be replaced.
    stall_timeout_s: float = 20.0
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 1 <= self.stall_timeout_s <= 86_400:
            raise ConfigError("stall_timeout_s", self.stall_timeout_s, "must be in [1, 86400]")
        _one_of("attention_backend", self.attention_backend, ("auto", "sdpa", "vllm_flash_attn"))
        if self.num_threads is not None:
            _at_least("num_threads", self.num_threads, 1)
