"""From a request to a sequence, or a refusal with the reason.

Owns every check on what a client sent in token ids, pixels and parameters, against the model and
the limits. Knows no step. Invariant: what passes here cannot make a step fail by its values alone;
whatever goes wrong while a request is prepared is that request's failure and nobody else's.
"""

from __future__ import annotations

import math

from workers.contracts import GenerationRequest, MediaInput, SamplingParams, VideoInput
from workers.errors import GenerationFailed, InvalidRequest, RequestError
from workers.models.families import ModelAdapter
from workers.sampling.grammar import GrammarCompiler, GrammarState
from workers.scheduler import Scheduler
from workers.sequence import Sequence
from workers.spec.breaker import Breaker, BreakerState
from workers.spec.drafter import Drafter

# A day. Positions grow with it, and rope in float32 must still tell them apart.
_MAX_SECONDS_PER_GRID = 86_400.0
# Most likely tokens reported at one position.
MAX_LOGPROBS = 20
_LOGPROBS = f"in [0, {MAX_LOGPROBS}]"


class Admission:
    """Checks requests for one model, its tokens and its drafter."""

    def __init__(
        self,
        adapter: ModelAdapter,
        num_ids: int,
        scheduler: Scheduler,
        drafter: Drafter | None,
        breaker: Breaker,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._adapter = adapter
        self._num_ids = num_ids
        self._scheduler = scheduler
        self._drafter = drafter
        self._breaker = breaker
        # None for a checkpoint without a tokenizer.
        self._grammars = grammars

    def grammar(self, request: GenerationRequest) -> GrammarState | None:
        """Return where the request's output begins in its grammar; None without one.

        May take long for a new grammar, and may be called from any thread.

        Raises:
            InvalidRequest: It cannot be compiled.
        """
        if request.sampling.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("this model's tokens cannot follow a grammar", "grammar")
        return self._grammars.state(request.sampling.grammar)

    def sequence(self, request: GenerationRequest) -> Sequence:
        """Return the sequence for a request.

        Raises:
            RequestError: It is wrong or too long, or could not be prepared.
        """
        try:
            return self._sequence(request)
        except RequestError:
            raise
        except Exception as error:  # the boundary between one request and the engine
            raise GenerationFailed(f"the request could not be prepared: {error!r}") from error

    def _sequence(self, request: GenerationRequest) -> Sequence:
        sampling = request.sampling
        _check_sampling(sampling)
        self._check_ids(request)
        self._check_media(request)
        limit = self._scheduler.sequence_limit(len(request.prompt_ids), sampling.max_tokens)
        room = limit - len(request.prompt_ids) - len(request.emitted_ids)
        if room < 1:
            raise InvalidRequest("the tokens already emitted leave nothing to generate")
        # While drafting is left off no K/V is drafted, so that a sequence which waits for some
        # would neither find nor leave a prefix: one that comes now goes without for good.
        drafter = None if self._breaker.state is BreakerState.OPEN else self._drafter
        may_draft = (
            drafter is not None
            and sampling.max_draft_tokens != 0
            and room > 1  # a single token has no drafts before it
            and limit - room + 1 < drafter.max_sequence_len
        )
        eos_ids = frozenset() if sampling.ignore_eos else self._adapter.eos_ids
        return Sequence(
            request=request,
            stop_ids=eos_ids | frozenset(sampling.stop_token_ids),
            max_len=limit,
            rope=self._adapter.rope_table(request.prompt_ids, request.media),
            grammar=self.grammar(request),
            may_draft=may_draft,
            needs_draft_kv=may_draft and drafter is not None and drafter.needs_kv,
        )

    def _check_ids(self, request: GenerationRequest) -> None:
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        for name, ids in (
            ("prompt", (*request.prompt_ids, *request.emitted_ids)),
            ("stop_token_ids", request.sampling.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in request.sampling.logit_bias]),
        ):
            if ids and (min(ids) < 0 or max(ids) >= self._num_ids):
                raise InvalidRequest(f"{name}: a token id is outside [0, {self._num_ids})", name)

    def _check_media(self, request: GenerationRequest) -> None:
        if request.images and not self._adapter.takes_images:
            raise InvalidRequest("this model takes no images", "messages")
        if request.videos and not self._adapter.takes_videos:
            raise InvalidRequest("this model takes no videos", "messages")
        for video in request.videos:
            self._check_video(video)
        first_free = 0
        for item in request.media:
            self._check_pixels(item)
            is_video = isinstance(item, VideoInput)
            pad = self._adapter.video_token_id if is_video else self._adapter.image_token_id
            for start, end in item.runs:
                # Runs that touch would be one: the positions of the second would be unknown.
                if start < first_free or end > len(request.prompt_ids):
                    raise InvalidRequest(
                        "images and videos must stand in the prompt, in order, with text between",
                        "messages",
                    )
                first_free = end + 1
                # Elsewhere the id is text like any other.
                found = request.prompt_ids[start:end].count(pad)
                if found != end - start:
                    raise InvalidRequest(
                        f"{end - start} placeholders needed, {found} found", "messages"
                    )

    def _check_video(self, video: VideoInput) -> None:
        """Check what only a video has; its runs are read after this."""
        num_runs = max(video.grid_thw[0], 1) if self._adapter.splits_videos else 1
        if len(video.starts) != num_runs or video.num_tokens % num_runs:
            raise InvalidRequest(
                f"a video of {video.grid_thw[0]} steps has {len(video.starts)} runs of"
                f" placeholders, the model takes {num_runs} of equal length",
                "messages",
            )
        if not 0 < video.seconds_per_grid <= _MAX_SECONDS_PER_GRID:
            raise InvalidRequest(
                f"seconds_per_grid must be in (0, {_MAX_SECONDS_PER_GRID}]", "messages"
            )

    def _check_pixels(self, item: MediaInput) -> None:
        """Check an image's or video's grid against its pixels and placeholders."""
        num_patches = math.prod(item.grid_thw)
        merge = self._adapter.merge_size
        _, h, w = item.grid_thw
        if min(item.grid_thw) < 1 or h % merge or w % merge:
            raise InvalidRequest(f"a picture of {h} x {w} patches cannot be merged", "messages")
        has_pixels = item.pixel_values.shape == (num_patches, self._adapter.patch_dim)
        if not has_pixels or item.num_tokens != num_patches // merge**2:
            raise InvalidRequest("pixels or placeholders do not match the size", "messages")


def _check_sampling(sampling: SamplingParams) -> None:
    """Refuse parameters outside their ranges; `not (a <= x)` also catches NaN."""
    ranges = {
        "temperature": (0 <= sampling.temperature < math.inf, "at least 0"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]"),
        "min_p": (0 <= sampling.min_p <= 1, "in [0, 1]"),
        "top_k": (sampling.top_k >= 0, "at least 0"),
        "max_tokens": (sampling.max_tokens is None or sampling.max_tokens >= 1, "at least 1"),
        "min_tokens": (sampling.min_tokens >= 0, "at least 0"),
        "max_draft_tokens": ((sampling.max_draft_tokens or 0) >= 0, "at least 0"),
        "seed": (-(2**63) <= sampling.seed < 2**63, "a signed 64-bit integer"),
        "presence_penalty": (-2 <= sampling.presence_penalty <= 2, "in [-2, 2]"),
        "frequency_penalty": (-2 <= sampling.frequency_penalty <= 2, "in [-2, 2]"),
        "repetition_penalty": (0 < sampling.repetition_penalty < math.inf, "above 0"),
        "logit_bias": (all(abs(b) <= 100 for _, b in sampling.logit_bias), "in [-100, 100]"),
        "num_logprobs": (0 <= (sampling.num_logprobs or 0) <= MAX_LOGPROBS, _LOGPROBS),
        "num_prompt_logprobs": (
            0 <= (sampling.num_prompt_logprobs or 0) <= MAX_LOGPROBS,
            _LOGPROBS,
        ),
    }
    for name, (is_right, accepted) in ranges.items():
        if not is_right:
            raise InvalidRequest(f"{name} must be {accepted}", name)
