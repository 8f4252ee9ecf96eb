"""The values that cross the line between the text plane and the engine plane.

Owns what a request is (`GenerationRequest`), what a worker answers (`TokenDelta`), what it
says of itself (`WorkerInfo`), and what any process has counted (`Report`). Knows no tensors, no
HTTP and no Ray: only the standard library, so both planes can import it. Invariant: every value is
immutable, can be pickled, and a request carries all that its continuation on another worker needs:
the seed is always set and `emitted_ids` are the tokens the client already has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from workers.telemetry.meter import Snapshot

if TYPE_CHECKING:
    import numpy as np


ContractT = TypeVar("ContractT")


def pickled_by_name(cls: type[ContractT]) -> type[ContractT]:
    """Pickle a frozen slots dataclass as names and values.

    By itself it is pickled as values in the order of its fields: in a rolling update, an ingress
    and a worker that know different fields would silently read one as another. A field that only
    the sender knows is dropped, one that only the receiver knows gets its default.
    """

    def getstate(self: Any) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def setstate(self: Any, state: dict[str, Any]) -> None:
        for f in fields(self):
            if f.name in state:
                value = state[f.name]
            elif f.default_factory is not MISSING:
                value = f.default_factory()
            elif f.default is not MISSING:
                value = f.default
            else:
                raise TypeError(f"{cls.__name__} came without {f.name}")
            object.__setattr__(self, f.name, value)

    cls.__getstate__ = getstate  # type: ignore[method-assign, assignment]
    cls.__setstate__ = setstate  # type: ignore[attr-defined]
    return cls


class FinishReason(StrEnum):
    """Why a request ended. An error is no reason: it is raised."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@pickled_by_name
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose and when to stop; the same for plain and speculative decoding."""

    # Keys the noise of every token: (seed, position, token id). Any signed 64-bit integer.
    seed: int
    # Tokens to emit at most; None = up to the worker's sequence limit.
    max_tokens: int | None = None
    # Below 1e-5 means greedy.
    temperature: float = 1.0
    # 0 = off.
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    # Any of these ids ends the request and stays out of the text. The model's own end-of-sequence
    # ids are added by the worker unless `ignore_eos`.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # No stop id is sampled before this many tokens were emitted.
    min_tokens: int = 0
    # Drafts per step at most for this request; None = the worker's setting, 0 = no speculation.
    max_draft_tokens: int | None = None
    # Taken off the logit of each token that was emitted: once, and for each time.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Divides the positive logits, and multiplies the negative ones, of all tokens of prompt and
    # output.
    repetition_penalty: float = 1.0
    # (token id, what is added to its logit)
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Most likely tokens to report at each emitted one, beside its own log-probability; None = no
    # log-probabilities. They are the model's, before bias, penalties, temperature and filters.
    num_logprobs: int | None = None
    # The same for the prompt's tokens.
    num_prompt_logprobs: int | None = None
    # What the output must match, in llguidance's grammar format; None = anything.
    grammar: str | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@pickled_by_name
@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One preprocessed image and where its placeholders stand in the prompt."""

    pixel_values: np.ndarray  # [t*h*w, channels*temporal*patch*patch] float32
    grid_thw: tuple[int, int, int]  # patches before merging
    # SHA-256 over the pixels and the processor's settings: keys the prefix and embedding caches.
    content_hash: bytes
    # Index of the image's first placeholder token in the prompt.
    start: int
    # Placeholder tokens: t*h*w / merge_size**2.
    num_tokens: int

    @property
    def end(self) -> int:
        """Index one past the image's last placeholder."""
        return self.start + self.num_tokens

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Where its placeholders stand: index of the first, index one past the last."""
        return ((self.start, self.end),)


@pickled_by_name
@dataclass(frozen=True, slots=True, eq=False)
class VideoInput:
    """One preprocessed video and where its placeholders stand in the prompt.

    Some families take a video as one run of placeholders, others as one run for each step of the
    grid's time axis with text (time stamps) between them. The runs are equally long.
    """

    pixel_values: np.ndarray  # [t*h*w, channels*temporal*patch*patch] float32
    grid_thw: tuple[int, int, int]  # patches before merging; t counts pairs of frames
    # SHA-256 over the pixels and the processor's settings.
    content_hash: bytes
    # Index of the first placeholder of each run, ascending.
    starts: tuple[int, ...]
    # Placeholder tokens of all runs together: t*h*w / merge_size**2.
    num_tokens: int
    # Time between two steps of the grid; scales positions in some families.
    seconds_per_grid: float

    @property
    def start(self) -> int:
        """Index of the video's first placeholder."""
        return self.starts[0]

    @property
    def end(self) -> int:
        """Index one past the video's last placeholder."""
        return self.starts[-1] + self.num_tokens // len(self.starts)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Where its placeholders stand: index of the first, index one past the last."""
        run_len = self.num_tokens // len(self.starts)
        return tuple((start, start + run_len) for start in self.starts)


# Both have pixels, a grid, a hash and runs of placeholders whose embeddings follow each other.
MediaInput = ImageInput | VideoInput


@pickled_by_name
@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """What a client asked, in token ids; replayable on any worker of the same model."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    images: tuple[ImageInput, ...] = ()
    # Tokens already delivered to the client by an earlier worker, in order.
    emitted_ids: tuple[int, ...] = ()
    videos: tuple[VideoInput, ...] = ()
    # The span that the worker's are under (W3C trace context); empty = it is not traced.
    traceparent: str = ""

    @property
    def media(self) -> tuple[MediaInput, ...]:
        """Images and videos in the prompt's order."""
        if not self.videos:
            return self.images
        return tuple(sorted((*self.images, *self.videos), key=lambda item: item.start))

    @property
    def modality(self) -> str:
        """What its prompt holds, for statistics: text alone, or images or videos too."""
        return "image" if self.images or self.videos else "text"

    def resume_after(self, emitted_ids: list[int]) -> GenerationRequest:
        """Return the request that continues after `emitted_ids` (all emitted so far)."""
        return replace(self, emitted_ids=tuple(emitted_ids))


@pickled_by_name
@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model thought a token."""

    token_id: int
    logprob: float
    # (token id, log-probability) of the most likely ones, the likeliest first; as many as asked.
    top: tuple[tuple[int, float], ...] = ()


@pickled_by_name
@dataclass(frozen=True, slots=True)
class TokenDelta:
    """All tokens of one request from one step; the last one carries the finish reason."""

    request_id: str
    # Index among the emitted tokens of the first id here; replays count on from the first worker.
    start: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    # Prompt tokens whose K/V came from the prefix cache.
    num_cached_tokens: int = 0
    # Totals for the request on this worker; accepted as verified, before a stop trims a block.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # Steps that gave the request tokens, and those that went without drafts by a failure.
    num_steps: int = 0
    num_fallbacks: int = 0
    # One a token, if asked.
    logprobs: tuple[TokenLogprob, ...] | None = None
    # One a prompt token, the first None, if asked; with the first delta only.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def after(self, num_emitted: int) -> TokenDelta:
        """Drop the tokens that a client holding `num_emitted` tokens already has."""
        skip = max(0, min(num_emitted - self.start, len(self.token_ids)))
        if skip == 0:
            return self
        return replace(
            self,
            start=self.start + skip,
            token_ids=self.token_ids[skip:],
            logprobs=None if self.logprobs is None else self.logprobs[skip:],
        )


@pickled_by_name
@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker serves: facts that hold for its whole life."""

    worker_id: str
    model_id: str
    target: str
    draft: str | None
    method: str
    attention_backend: str
    # Prompt plus emitted tokens at most, by the model's context and by the KV pool.
    max_sequence_len: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    # Recurrent state of one running sequence, for models with linear attention.
    state_bytes: int = 0


class Role(StrEnum):
    """What a process is."""

    WORKER = "worker"
    INGRESS = "ingress"


@pickled_by_name
@dataclass(frozen=True, slots=True)
class Report:
    """What a process has counted, for the exporter."""

    role: Role
    model_id: str
    # Of the process: a replacement has another one.
    source: str
    # Grows with every report of the process: an overtaken one is known by it.
    number: int
    snapshot: Snapshot
    # The process ends itself, and is not missed.
    is_last: bool = False


class WorkerClient(Protocol):
    """How the text plane reaches the workers; the Ray router and test doubles implement it."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Stream the request's deltas; closing the iterator aborts it in the engine.

        Raises:
            WorkerLost: The worker died or became unusable; the request can be replayed.
            RequestError: The request itself was refused or failed.
        """
        ...

    async def info(self) -> WorkerInfo:
        """Return what a worker serves; of several, the one with the shortest limit.

        Raises:
            WorkerLost: None answers.
        """
        ...

    async def check_health(self) -> None:
        """Return when a worker can generate.

        Raises:
            WorkerLost: No worker is ready.
        """
        ...
