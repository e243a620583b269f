"""Lists of the blocks that neighbouring queries select together, which the GPU kernels walk.

A tile is `tokens` consecutive queries of one KV head. Neighbours share most of their blocks (docs/02, locality), so a
kernel reads each block of the tile's union once; a bit per query says which of them selected it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TOKEN_BITS = 5  # a sort key holds the query's number within its tile in its lowest bits: at most 32 queries


class TileUnions(NamedTuple):
    """The union lists of R = batch * KV heads rows of tiles.

    ids, bits: [R, tiles, U]; entry j < counts is a block id and the queries (bit i: query i of the tile) selecting it.
    Ids ascend; entries from there on are 0.
    counts: [R, tiles].
    """

    ids: jax.Array
    bits: jax.Array
    counts: jax.Array


def union_capacity(n_blocks: int, tokens: int, selected: int) -> int:
    """U, the most blocks that `tokens` queries with `selected` ids each can name, rounded up for 16-byte copies."""
    return max(4, -(-min(n_blocks, tokens * selected) // 4) * 4)


def tile_unions(block_ids: jax.Array, n_blocks: int, tokens: int) -> TileUnions:
    """Union lists of block_ids [B, T, K, C]; ids outside 0 .. n_blocks-1 are padding, T is padded to whole tiles.

    One sort of (id, query) pairs brings the queries of a block together, a scan over each run collects their bits,
    and a second sort moves the last element of every run to the front.
    """
    batch, length, n_kv, selected = block_ids.shape
    tiles = -(-length // tokens)
    ids = jnp.where((block_ids >= 0) & (block_ids < n_blocks), block_ids.astype(jnp.int32), n_blocks)
    ids = jnp.pad(ids, ((0, 0), (0, tiles * tokens - length), (0, 0), (0, 0)), constant_values=n_blocks)
    ids = jnp.moveaxis(ids, 2, 1).reshape(batch * n_kv, tiles, tokens, selected)
    keys = (ids << TOKEN_BITS) | jnp.arange(tokens, dtype=jnp.int32)[:, None]
    keys = lax.sort(keys.reshape(batch * n_kv, tiles, -1), is_stable=False)

    ids, bits = keys >> TOKEN_BITS, jnp.int32(1) << (keys & (2**TOKEN_BITS - 1))
    distance = 1
    while distance < tokens and distance < ids.shape[-1]:
        same = ids[..., distance:] == ids[..., :-distance]
        bits = bits | jnp.pad(jnp.where(same, bits[..., :-distance], 0), ((0, 0), (0, 0), (distance, 0)))
        distance *= 2
    last = jnp.pad(ids[..., 1:] != ids[..., :-1], ((0, 0), (0, 0), (0, 1)), constant_values=True) & (ids < n_blocks)
    count = last.sum(axis=-1, dtype=jnp.int32)

    capacity = union_capacity(n_blocks, tokens, selected)
    if n_blocks << tokens < 2**31:  # id and bits fit in one word: half the data to sort
        packed = lax.sort(jnp.where(last, (ids << tokens) | bits, 2**31 - 1), is_stable=False)
        ids, bits = packed >> tokens, packed & (2**tokens - 1)
    else:
        ids, bits = lax.sort((jnp.where(last, ids, n_blocks), bits), is_stable=False, num_keys=1)
    missing = max(0, capacity - ids.shape[-1])
    ids, bits = (jnp.pad(x, ((0, 0), (0, 0), (0, missing)))[..., :capacity] for x in (ids, bits))
    listed = jnp.arange(capacity, dtype=jnp.int32) < count[..., None]
    return TileUnions(jnp.where(listed, ids, 0), jnp.where(listed, bits, 0), count)
