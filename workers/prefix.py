"""The names of prompt prefixes, the same for whoever keeps them and for whoever looks for them.

Owns what a block's name depends on. Knows no blocks and no sequences: the workers key their prefix
cache by these names, and publish short forms of them, by which a router finds the worker that
knows a prompt. Invariant: two blocks have one name only where their K/V is the same: all tokens up
to and with them, all pixels and their places.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from workers.contracts import GenerationRequest, MediaInput, VideoInput

# Of a name, as it is published. That two are mistaken for one costs a prefix, no token.
SHORT_BYTES = 8


def block_name(
    previous: bytes, token_ids: Sequence[int], media: Sequence[MediaInput], start: int, end: int
) -> bytes:
    """Return the name of the block of tokens `[start, end)`.

    Args:
        previous: The name of the block before it; empty for the first.
        token_ids: Of the whole sequence.
        media: Its images and videos.
        start: Index of the block's first token.
        end: Index one past the last token that its K/V depends on.
    """
    digest = hashlib.sha256(previous)
    digest.update(array("q", token_ids[start:end]).tobytes())
    for item in media:
        if item.start < end and item.end > start:
            digest.update(_media_key(item))
    return digest.digest()


def short_names(
    request: GenerationRequest, block_size: int, lookahead: int, max_blocks: int
) -> list[bytes]:
    """Return the short names of the request's leading full blocks.

    Args:
        request: Its prompt and what was emitted already.
        block_size: Tokens of a block at the workers.
        lookahead: Tokens after a block that its K/V depends on.
        max_blocks: Names at most.
    """
    token_ids = [*request.prompt_ids, *request.emitted_ids]
    media = request.media
    names: list[bytes] = []
    name = b""
    # One token is always left to compute.
    for index in range(min((len(token_ids) - 1) // block_size, max_blocks)):
        start = index * block_size
        name = block_name(name, token_ids, media, start, start + block_size + lookahead)
        names.append(name[:SHORT_BYTES])
    return names


def _media_key(item: MediaInput) -> bytes:
    """All that the K/V of an item's placeholders depends on: which they are, pixels, positions."""
    starts = [start for start, _ in item.runs]
    key = array("q", [len(starts), *starts, *item.grid_thw]).tobytes() + item.content_hash
    if isinstance(item, VideoInput):
        key += array("d", [item.seconds_per_grid]).tobytes()
    return key
