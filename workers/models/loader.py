"""From a checkpoint on disk or a hub id to a model ready for packed forward passes.

Owns the choice of family, dtype and device, and what a pair of models must share. Knows no
batches. Invariant: safetensors only, no remote code; a checkpoint that cannot be served is refused
here, at start, with the reason.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig
from transformers.utils import cached_file

from workers.config import ModelConfig
from workers.errors import ConfigError, ModelLoadError
from workers.models.families import ADAPTERS, ModelAdapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model and the tokens it was made with."""

    adapter: ModelAdapter
    # token -> id; None where the checkpoint has no tokenizer.json.
    vocab: dict[str, int] | None

    @property
    def num_ids(self) -> int:
        """Ids that are tokens; the logits may be wider."""
        width = self.adapter.vocab_size
        return width if self.vocab is None else min(max(self.vocab.values()) + 1, width)


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
    return LoadedModel(adapter_class(model), _load_vocab(config))


def check_pair(target: LoadedModel, draft: LoadedModel) -> None:
    """Refuse a draft that does not speak the target's token ids, or sees other pixels.

    Raises:
        ModelLoadError: With what differs.
    """
    if target.vocab is not None and draft.vocab is not None:
        if target.vocab != draft.vocab:
            raise ModelLoadError("target and draft have different tokenizers")
    elif draft.adapter.vocab_size != target.adapter.vocab_size:
        raise ModelLoadError(
            f"target and draft have {target.adapter.vocab_size} and {draft.adapter.vocab_size} "
            "ids and no tokenizers to compare"
        )
    if target.adapter.takes_images and draft.adapter.takes_images:
        for name in ("patch_size", "temporal_patch_size", "spatial_merge_size"):
            ours = getattr(target.adapter.vision_config, name)
            theirs = getattr(draft.adapter.vision_config, name)
            if ours != theirs:
                raise ModelLoadError(f"target has {name}={ours}, the draft {theirs}: other pixels")


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.float32 if device.type == "cpu" else "auto"


def _load_vocab(config: ModelConfig) -> dict[str, int] | None:
    """Read the token table from tokenizer.json; None where the checkpoint has none."""
    path = cached_file(
        config.path,
        "tokenizer.json",
        revision=config.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    if path is None:
        logger.warning("%s has no tokenizer.json: every logit counts as a token", config.path)
        return None
    vocab: dict[str, int] = Tokenizer.from_file(path).get_vocab(with_added_tokens=True)
    return vocab
