"""Gumbel noise that is a pure function of (request seed, position, token id).

Owns the counter-based hash. Keeps no random state and knows no request: whoever asks with the same
key gets the same noise, on any worker, in any batch, for target and draft alike. Invariant: the
noise of one id does not depend on which other ids are asked for, so a filtered row and a whole
row agree.

Sampling `argmax(logits + gumbel)` draws from `softmax(logits)` (Gumbel-max). Sharing the noise
between draft and target couples their draws: Daliri et al., arXiv 2408.07978.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from workers.sampling.staging import staged

_MASK64 = (1 << 64) - 1


def row_key(seed: int, position: int) -> int:
    """Hash a request's seed and a token's index in its sequence to a signed 32-bit key."""
    # splitmix64's finaliser; seeds and positions are small and close together.
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    x = (x ^ (x >> 31)) & 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x


class GumbelNoise:
    """The noise of a vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        # Hashed once, so that a row costs one xor and one finaliser.
        self._id_hashes = _finalise(ids.mul_(_signed(0x9E3779B1)))  # [V] int32

    def keys(self, seeds_and_positions: Iterable[tuple[int, int]]) -> Tensor:
        """Return one key a row.  # [R] int32."""
        keys = [row_key(seed, position) for seed, position in seeds_and_positions]
        return staged(keys, torch.int32, self._id_hashes.device)

    def rows(self, keys: Tensor) -> Tensor:
        """Return the noise of the whole vocabulary for each key.

        Args:
            keys: One a row.  # [R] int32

        Returns:
            Standard Gumbel noise.  # [R, V] float32
        """
        return _gumbel(self._id_hashes ^ keys.unsqueeze(1))

    def at(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Return the noise of some ids: equal to `rows(keys).gather(1, token_ids)`.

        Args:
            keys: One a row.  # [R] int32
            token_ids: Ids to look up.  # [R, C] int64

        Returns:
            Standard Gumbel noise.  # [R, C] float32
        """
        return _gumbel(self._id_hashes[token_ids] ^ keys.unsqueeze(1))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _finalise(h: Tensor) -> Tensor:
    """Mix 32 bits in place (murmur3's finaliser); int32 products wrap, as the hash wants."""
    # `>>` on int32 copies the sign: mask to a logical shift.
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h *= _signed(0x85EBCA6B)
    h ^= (h >> 13).bitwise_and_(0x7FFFF)
    h *= _signed(0xC2B2AE35)
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    return h


def _gumbel(h: Tensor) -> Tensor:
    """Turn hash input into -log(-log(u)), in place as far as types allow.

    Large noise comes from `1 - u` near 0, so `v = 1 - u` is what is drawn: float32 is fine
    there (down to 2**-32), while near 1 it would come in steps of 2**-24.
    """
    minus_v = _finalise(h).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    # A `v` that rounds to 1 would give -inf, and even an id of probability 1 would lose.
    minus_v.add_(0.5).mul_(-(2.0**-31)).clamp_(min=-(1 - 2.0**-24))
    return minus_v.log1p_().neg_().log_().neg_()
