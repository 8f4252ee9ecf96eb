"""Attention by flash-attn's paged kernels: vllm-flash-attn, vLLM's copy of it, or upstream.

Owns finding an installed distribution, what its kernels accept, and the two shapes of call that
the distributions have. Knows no model and does not choose between backends. The distributions
share a function's name but not its signature, so the call is picked by inspecting the function.

    vllm_flash_attn, flash_attn    lengths of keys as cumulative sums (cu_seqlens_k)
    vllm.vllm_flash_attn           lengths of keys as they are (seqused_k), cu_seqlens_k forbidden

Invariant: nothing is imported before `find_distribution` is called, all lengths are int32 on the
device or host integers known beforehand, and no call waits for the device.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from workers.errors import ConfigError, ModelLoadError
from workers.models.attention.backend import StepMemo

if TYPE_CHECKING:
    from torch import Tensor

    from workers.batch_info import AttentionMetadata

FlashFunction = Callable[..., "Tensor"]

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
# The kernels pad other head sizes by copying, which for a paged cache means all of it.
HEAD_DIM_MULTIPLE = 8
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class _Known:
    """A distribution to look for."""

    module: str
    package: str
    block_multiple: int


# In the order tried. The forks cut upstream's paged blocks from 256 slots to 16.
KNOWN = (
    _Known("vllm_flash_attn", "vllm-flash-attn", 16),
    _Known("vllm.vllm_flash_attn", "vllm", 16),
    _Known("flash_attn", "flash-attn", 256),
)


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """An importable distribution and the function it is used for."""

    package: str
    version: str
    block_multiple: int
    function: FlashFunction
    # Which of the two calls its function takes.
    takes_seqused_k: bool

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


class FlashBackend:
    """One kernel launch per layer, whatever the step mixes."""

    name = "vllm_flash_attn"

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._cu_seqlens_k = StepMemo["Tensor"]()

    @classmethod
    def load(
        cls, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
    ) -> FlashBackend:
        """Make the backend of the first distribution that can be imported.

        Raises:
            ConfigError: The device, dtype, block size or head size is not for the kernels.
            ModelLoadError: No distribution can be imported, or its function is not known here.
        """
        # The device first: importing vLLM takes seconds that a CPU worker need not spend.
        check_device(device)
        distribution = find_distribution()
        check_fits(distribution, dtype, block_size, head_dim)
        return cls(distribution)

    def __call__(
        self,
        query: Tensor,  # [T, H, D]
        key_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
        value_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
        meta: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """See `AttentionBackend`."""
        adapter = _lengths if self._distribution.takes_seqused_k else self._cumulative_lengths
        return self._distribution.function(
            query,
            key_cache,
            value_cache,
            cu_seqlens_q=meta.cu_seqlens_q,
            max_seqlen_q=meta.max_q_len,
            max_seqlen_k=meta.max_kv_len,
            softmax_scale=scale,
            causal=True,
            # Keys to the left and right of a row's own; -1 = all. A pair in both signatures.
            window_size=[-1 if window is None else window - 1, -1 if window is None else 0],
            block_table=meta.block_table,
            **adapter(meta),
        )

    def _cumulative_lengths(self, meta: AttentionMetadata) -> dict[str, Tensor]:
        """Name the key lengths as vllm-flash-attn and upstream do; summed once a step."""
        return {
            "cu_seqlens_k": self._cu_seqlens_k.get(
                meta, (), lambda: pad(meta.kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
            )
        }


def _lengths(meta: AttentionMetadata) -> dict[str, Tensor]:
    """Name the key lengths as vLLM's copy does: with a block table it refuses cumulative ones."""
    return {"seqused_k": meta.kv_lens}


def check_device(device: torch.device) -> None:
    """Refuse devices that the kernels were not built for.

    Raises:
        ConfigError: Not CUDA, or a GPU older than the kernels.
    """
    key = "attention_backend"
    if device.type != "cuda":
        raise ConfigError(key, FlashBackend.name, f"needs a CUDA device, not {device}")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            key,
            FlashBackend.name,
            f"needs compute capability {_dotted(MIN_CAPABILITY)}, {device} has"
            f" {_dotted(capability)}",
        )


def check_fits(
    distribution: Distribution, dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    """Refuse what the distribution's kernels would crash on or copy the whole cache for.

    Raises:
        ConfigError: Names the setting, the distribution and its version.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            "model.dtype", _short(dtype), f"{distribution} takes float16 and bfloat16"
        )
    if block_size % distribution.block_multiple:
        raise ConfigError(
            "cache.block_size",
            block_size,
            f"{distribution} takes multiples of {distribution.block_multiple}",
        )
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        raise ConfigError(
            "attention_backend",
            FlashBackend.name,
            f"{distribution} takes head sizes that are multiples of {HEAD_DIM_MULTIPLE} up to"
            f" {MAX_HEAD_DIM}, the model has {head_dim}",
        )


def find_distribution() -> Distribution:
    """Import the first of `KNOWN` that can be.

    Raises:
        ModelLoadError: None can, with the reason of each; or the function found has neither of
            the two known signatures.
    """
    reasons = []
    for known in KNOWN:
        try:
            module = importlib.import_module(known.module)
            function: FlashFunction = module.flash_attn_varlen_func
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            # A build for another torch fails in each of these ways; the next may still fit.
            reasons.append(f"{known.module}: {error}")
            continue
        version = _version(known.package)
        return Distribution(
            package=known.package,
            version=version,
            block_multiple=known.block_multiple,
            function=function,
            takes_seqused_k=_takes_seqused_k(function, f"{known.package} {version}"),
        )
    raise ModelLoadError(
        f"no flash-attn distribution can be imported beside torch {torch.__version__}"
        f" ({'; '.join(reasons)})"
    )


def _takes_seqused_k(function: FlashFunction, label: str) -> bool:
    """Tell the two signatures apart.

    Raises:
        ModelLoadError: It is neither.
    """
    names = set(inspect.signature(function).parameters)
    common = {
        *("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"),
        "window_size",
    }
    if common | {"block_table", "seqused_k"} <= names:
        return True
    if common | {"block_table", "cu_seqlens_k"} <= names:
        return False
    raise ModelLoadError(
        f"flash_attn_varlen_func of {label} has an unknown signature: {', '.join(sorted(names))}"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
