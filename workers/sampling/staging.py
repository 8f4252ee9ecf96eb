"""Small tensors from the host to the device, without stopping for them.

Owns the way there. Knows nothing of what they hold. Invariant: the copy is ordered before every
kernel that is launched after it, and the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def staged(
    values: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the values as a tensor on the device.

    From ordinary memory a copy waits until the device is idle: so it goes by way of pinned memory,
    which torch keeps until the copy is done.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
