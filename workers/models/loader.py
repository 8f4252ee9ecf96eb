"""From a checkpoint on disk or a hub id to a model ready for packed forward passes.

Owns the choice of family, dtype and device, and what a pair of models must share. Knows no
batches. Invariant: safetensors only, no remote code; a checkpoint that cannot be served is refused
here, at start, with the reason.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig
from transformers.utils import cached_file

from workers.config import ModelConfig
from workers.errors import ConfigError, ModelLoadError
from workers.models.families import ADAPTERS, ModelAdapter
from workers.models.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model and the tokens it was made with."""

    adapter: ModelAdapter
    # None where the checkpoint has no tokenizer.json.
    tokenizer: Tokenizer | None

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The token table."""
        if self.tokenizer is None:
            return None
        added = self.tokenizer.get_added_tokens_decoder().values()
        return Vocabulary(
            self.tokenizer.get_vocab(with_added_tokens=True),
            frozenset(token.content for token in added),
        )

    @property
    def num_ids(self) -> int:
        """Ids that are tokens; the logits may be wider."""
        width = self.adapter.vocab_size
        return width if self.vocabulary is None else min(self.vocabulary.num_ids, width)

    @property
    def filler_id(self) -> int:
        """A token of no meaning, to stand where the model has no token: its padding, or an end."""
        pad = getattr(self.adapter.config, "pad_token_id", None)
        ids = [
            token_id for token_id in (pad, *sorted(self.adapter.eos_ids)) if token_id is not None
        ]
        return next((token_id for token_id in ids if 0 <= token_id < self.num_ids), 0)


def resolve_device(name: str) -> torch.device:
    """Return the device that `auto`, `cpu` or `cuda[:n]` means here.

    Raises:
        ConfigError: There is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", name, "must be auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "torch finds no CUDA device here")
    return device


def load_model(config: ModelConfig, device: torch.device) -> LoadedModel:
    """Load one checkpoint.

    Raises:
        ModelLoadError: It is missing, of an unknown family, or not in safetensors.
    """
    try:
        checkpoint = AutoConfig.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=False
        )
        adapter_class = ADAPTERS.get(checkpoint.model_type)
        if adapter_class is None:
            known = ", ".join(sorted(ADAPTERS))
            raise ModelLoadError(
                f"{config.path}: family {checkpoint.model_type!r} is not served; known: {known}"
            )
        model = adapter_class.model_class().from_pretrained(
            config.path,
            revision=config.revision,
            dtype=_dtype(config.dtype, device),
            attn_implementation=adapter_class.attention_setting(),
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{config.path}: {error}") from error
    model.eval().requires_grad_(False).to(device)
    logger.info("loaded %s as %s on %s", config.path, model.dtype, device)
    return LoadedModel(adapter_class(model), _load_tokenizer(config))


def check_pair(target: LoadedModel, draft: LoadedModel) -> None:
    """Refuse a draft that does not speak the target's token ids, or sees other pixels.

    A text-only draft suits a target with images, and the other way round.

    Raises:
        ModelLoadError: With what differs.
    """
    if target.vocabulary is not None and draft.vocabulary is not None:
        difference = target.vocabulary.difference(draft.vocabulary)
        if difference is not None:
            raise ModelLoadError(f"target and draft have different tokenizers: {difference}")
    elif draft.adapter.vocab_size != target.adapter.vocab_size:
        raise ModelLoadError(
            f"target and draft have {target.adapter.vocab_size} and {draft.adapter.vocab_size} "
            "ids and no tokenizers to compare"
        )
    if target.adapter.takes_images and draft.adapter.takes_images:
        _check_vision(target.adapter, draft.adapter)


def _check_vision(target: ModelAdapter, draft: ModelAdapter) -> None:
    """Refuse a draft that cannot take the images and videos as they were cut for the target."""
    for name in ("patch_size", "temporal_patch_size", "spatial_merge_size"):
        ours, theirs = getattr(target.vision_config, name), getattr(draft.vision_config, name)
        if ours != theirs:
            raise ModelLoadError(f"target has {name}={ours}, the draft {theirs}: other pixels")
    names = ["image_token_id"]
    if target.takes_videos:
        if not draft.takes_videos:
            raise ModelLoadError("the target takes videos, the draft images only")
        if target.splits_videos != draft.splits_videos:
            raise ModelLoadError(
                "one of target and draft takes a video as one run of placeholders, the other as "
                "one for each time stamp"
            )
        names.append("video_token_id")
    for name in names:
        ours, theirs = getattr(target, name), getattr(draft, name)
        if ours != theirs:
            raise ModelLoadError(f"target has {name}={ours}, the draft {theirs}")


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.float32 if device.type == "cpu" else "auto"


def _load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """Read tokenizer.json; None where the checkpoint has none."""
    path = cached_file(
        config.path,
        "tokenizer.json",
        revision=config.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    if path is None:
        logger.warning("%s has no tokenizer.json: every logit counts as a token", config.path)
        return None
    return Tokenizer.from_file(path)
