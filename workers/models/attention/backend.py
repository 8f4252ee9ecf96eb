"""The seam between a model's attention layers and the kernels that read paged K/V.

Owns the signature every backend answers to, the write of new keys and values, and the memo that
lets a backend prepare a step once for all its layers. Knows no model, no layer index and no
scheduler. Called by the attention function the model runner registers.

Invariant: key and value caches are `[num_blocks, block_size, Hkv, D]` and contiguous for every
backend, so that any of them reads what another wrote; the last query row of a sequence is its
last key (causal, bottom-right aligned). Shape symbols are those of `workers.batch_info`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from workers.batch_info import AttentionMetadata

PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol):
    """Causal attention of a packed step over paged keys and values."""

    @property
    def name(self) -> str:
        """What logs and statistics call it."""
        ...

    def __call__(
        self,
        query: Tensor,  # [T, H, D]
        key_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
        value_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
        meta: AttentionMetadata,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend; the step's own keys and values must already be in the caches.

        Only slots a sequence owns, `[0, kv_len)`, influence its rows, whatever the others hold.
        With `window`, a row sees that many keys at most, its own included: key k is visible to
        row q of its sequence iff `q - window < k <= q`.

        Returns:
            One row per query row, in the query's dtype.  # [T, H, D]
        """
        ...


class StepMemo(Generic[PlanT]):
    """Remembers what was derived from the latest step, since every layer asks for the same.

    NOTE: keyed by the metadata's identity and therefore holding on to it: a freed object's id
    could be another step's. One thread runs a backend.
    """

    def __init__(self) -> None:
        self._meta: AttentionMetadata | None = None
        # One for each kind of layer: those with a window want another plan than those without.
        self._plans: dict[tuple[object, ...], PlanT] = {}

    def get(
        self, meta: AttentionMetadata, key: tuple[object, ...], make: Callable[[], PlanT]
    ) -> PlanT:
        """Return the plan of `meta` and `key`, made anew for another `meta` than the latest."""
        if self._meta is not meta:
            self._meta, self._plans = meta, {}
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]


def write_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Store the step's keys and values, in place.

    Args:
        key_cache: Written at `slot_mapping`.  # [num_blocks, block_size, Hkv, D]
        value_cache: Likewise.  # [num_blocks, block_size, Hkv, D]
        key: Keys after rope; need not be contiguous.  # [T, Hkv, D]
        value: Values.  # [T, Hkv, D]
        slot_mapping: `block_id * block_size + offset` of every token, unique.  # [T] int64
    """
    # `view`, not `reshape` or `flatten`: those would write to a copy of a strided cache.
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slot_mapping, value)
