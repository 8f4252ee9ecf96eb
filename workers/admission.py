"""From a request to a sequence, or a refusal with the reason.

Owns every check on what a client sent in token ids, pixels and parameters, against the model and
the limits. Knows no step. Invariant: what passes here cannot make a step fail by its values alone;
whatever goes wrong while a request is prepared is that request's failure and nobody else's.
"""

from __future__ import annotations

import math

from workers.contracts import GenerationRequest, ImageInput, SamplingParams
from workers.errors import GenerationFailed, InvalidRequest, RequestError
from workers.models.families import ModelAdapter
from workers.scheduler import Scheduler
from workers.sequence import Sequence
from workers.spec.drafter import Drafter


class Admission:
    """Checks requests for one model, its tokens and its drafter."""

    def __init__(
        self, adapter: ModelAdapter, num_ids: int, scheduler: Scheduler, drafter: Drafter | None
    ) -> None:
        self._adapter = adapter
        self._num_ids = num_ids
        self._scheduler = scheduler
        self._drafter = drafter

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
        self._check_images(request)
        limit = self._scheduler.sequence_limit(len(request.prompt_ids), sampling.max_tokens)
        room = limit - len(request.prompt_ids) - len(request.emitted_ids)
        if room < 1:
            raise InvalidRequest("the tokens already emitted leave nothing to generate")
        drafter = self._drafter
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
            may_draft=may_draft,
            needs_draft_kv=may_draft and drafter is not None and drafter.needs_kv,
        )

    def _check_ids(self, request: GenerationRequest) -> None:
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        for name, ids in (
            ("prompt", (*request.prompt_ids, *request.emitted_ids)),
            ("stop_token_ids", request.sampling.stop_token_ids),
        ):
            if ids and (min(ids) < 0 or max(ids) >= self._num_ids):
                raise InvalidRequest(f"{name}: a token id is outside [0, {self._num_ids})", name)

    def _check_images(self, request: GenerationRequest) -> None:
        if request.images and not self._adapter.takes_images:
            raise InvalidRequest("this model takes no images", "messages")
        end = 0
        for image in request.images:
            if image.start < end or image.end > len(request.prompt_ids):
                raise InvalidRequest("images overlap or leave the prompt", "messages")
            end = image.end
            self._check_grid(image)

    def _check_grid(self, image: ImageInput) -> None:
        num_patches = math.prod(image.grid_thw)
        merge = self._adapter.merge_size
        _, h, w = image.grid_thw
        if min(image.grid_thw) < 1 or h % merge or w % merge:
            raise InvalidRequest(f"an image of {h} x {w} patches cannot be merged", "messages")
        if len(image.pixel_values) != num_patches or image.num_tokens != num_patches // merge**2:
            raise InvalidRequest("an image's pixels or placeholders do not match its size")


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
    }
    for name, (is_right, accepted) in ranges.items():
        if not is_right:
            raise InvalidRequest(f"{name} must be {accepted}", name)
