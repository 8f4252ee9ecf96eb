"""Tells a device that is lost from a step that failed.

Owns one question about an exception. Knows nothing of what was run. Invariant: out of memory is no
lost device; an error that the driver raises asynchronously is, since nothing after it can be
trusted in this process.
"""

from __future__ import annotations

import torch


def is_device_lost(error: BaseException) -> bool:
    """Whether this process can no longer use its device."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    # Newer torch has a type for it; before, only the driver's words tell.
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
