"""Choice of the attention backend from the setting and from what the machine has.

Owns the meaning of `attention_backend`: `sdpa` and `vllm_flash_attn` are orders, obeyed or
refused with the reason; `auto` takes flash on CUDA where a distribution is installed and fits, and
SDPA everywhere else, saying why. Knows no kernel and no model. Invariant: what is returned can run
with the given dtype, block size and head size.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from workers.errors import ConfigError, ModelLoadError
from workers.models.attention.flash import FlashBackend
from workers.models.attention.sdpa import SdpaBackend

if TYPE_CHECKING:
    import torch

    from workers.models.attention.backend import AttentionBackend

logger = logging.getLogger(__name__)


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
) -> AttentionBackend:
    """Return the backend that `attention_backend: name` means on this device.

    Raises:
        ConfigError: The name is unknown, or flash was asked for and this device, dtype, block
            size or head size is not for it.
        ModelLoadError: Flash was asked for and no usable distribution is installed.
    """
    if name == "sdpa":
        return SdpaBackend()
    if name == "vllm_flash_attn":
        return FlashBackend.load(device, dtype, block_size, head_dim)
    if name != "auto":
        raise ConfigError("attention_backend", name, "must be one of auto, sdpa, vllm_flash_attn")
    if device.type != "cuda":
        return SdpaBackend()
    try:
        return FlashBackend.load(device, dtype, block_size, head_dim)
    except (ConfigError, ModelLoadError) as error:
        logger.warning("attention falls back to sdpa: %s", error)
        return SdpaBackend()
