"""What is served, as clients ask for it: GET /v1/models.

Owns the shape of a model's entry, and the short memory of what workers say of themselves. Knows
no routes and no Ray. Invariant: the entry is given also while no worker answers, with null for
what only a worker knows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Literal

from pydantic import BaseModel

from serving.prompts import PromptBuilder
from workers.contracts import WorkerClient
from workers.errors import QueueFull, WorkerLost

logger = logging.getLogger(__name__)

# A redeployed worker may have another limit.
MEMORY_S = 30.0
# So that those who waited for an answer in vain do not wait again, one after the other.
RETRY_S = 2.0

Modality = Literal["text", "image", "video"]


class Model(BaseModel):
    """One model that can be named in a request."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specserve"
    # The model that this one derives from: itself, as no adapters are served.
    root: str
    # Prompt plus answer at most, in tokens.
    max_model_len: int | None
    # What a message may hold.
    modalities: list[Modality]


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class ServedModel:
    """The one model behind the API."""

    def __init__(self, model_id: str, prompts: PromptBuilder, workers: WorkerClient) -> None:
        self._id = model_id
        self._prompts = prompts
        self._workers = workers
        self._created = int(time.time())
        self._max_model_len: int | None = None
        # On the monotonic clock: until then, no worker is asked.
        self._known_until_s = 0.0
        # One question for all that wait for its answer.
        self._asking = asyncio.Lock()

    async def entry(self) -> Model:
        """Describe the model."""
        return Model(
            id=self._id,
            created=self._created,
            root=self._id,
            max_model_len=await self.max_model_len(),
            modalities=self._modalities(),
        )

    async def max_model_len(self) -> int | None:
        """Return the workers' limit, the last one known while none answers, None before that."""
        async with self._asking:
            if time.monotonic() >= self._known_until_s:
                memory_s = MEMORY_S
                try:
                    self._max_model_len = (await self._workers.info()).max_sequence_len
                except (WorkerLost, QueueFull) as error:
                    logger.warning("no worker said what it serves: %s", error)
                    memory_s = RETRY_S
                self._known_until_s = time.monotonic() + memory_s
            return self._max_model_len

    def _modalities(self) -> list[Modality]:
        modalities: list[Modality] = ["text"]
        if self._prompts.takes_images:
            modalities.append("image")
        if self._prompts.takes_videos:
            modalities.append("video")
        return modalities
