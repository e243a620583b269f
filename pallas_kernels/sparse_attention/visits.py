"""Which tiles of queries visit a block: the union lists turned round, cut into chunks for the backward kernel."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from nosa_jax.pallas_kernels.sparse_attention.tiling import ROWS
from nosa_jax.pallas_kernels.sparse_attention.unions import TileUnions

ENTRY = 4  # int32 words of a list entry: 16 bytes, the least that a bulk copy moves
MANY_CHUNKS = 8192  # lists are cut so that about this many chunks cover all of them: it bounds the partial sums' memory
SHORTEST_CHUNK = 16  # entries; shorter ones would spend more on their sums than on the products


@partial(jax.tree_util.register_dataclass, data_fields=["entries", "block", "first", "count", "chunk_start"],
         meta_fields=["blocks"])  # fmt: skip
@dataclasses.dataclass(frozen=True)
class BlockVisits:
    """Lists of the tiles that selected each block, one after another, and their division into chunks.

    Blocks are numbered row * blocks + id over R = batch * KV heads rows.

    entries: [E, 4] int32: tile (counted over all rows), the bits of its queries that selected the block, and for each
      half of the tile the last key that all of its queries may see. Sorted by block, then by tile.
    block, first, count: [chunks] the block of a chunk, its first entry and how many it has: 0 for unused chunks.
    chunk_start: [R * blocks + 1] the chunks of block b are chunk_start[b] .. chunk_start[b + 1] - 1.
    blocks: block ids per row.
    """

    entries: jax.Array
    block: jax.Array
    first: jax.Array
    count: jax.Array
    chunk_start: jax.Array
    blocks: int


def block_visits(unions: TileUnions, limits: jax.Array, n_blocks: int) -> BlockVisits:
    """Turn union lists of tiles with 2 * 64 rows round; `limits` [rows] holds the last visible key of every row."""
    n_rows, tiles, listed = unions.ids.shape
    total = n_rows * n_blocks
    valid = jnp.arange(listed, dtype=jnp.int32) < unions.counts[..., None]
    keys = jnp.where(valid, unions.ids + n_blocks * jnp.arange(n_rows, dtype=jnp.int32)[:, None, None], total)
    place = jnp.arange(keys.size, dtype=jnp.int32)
    keys, place = lax.sort((keys.reshape(-1), place), num_keys=1)
    tile = place // listed
    first_limit = limits.reshape(n_rows * tiles, -1, ROWS).min(axis=2)
    words = (tile, unions.bits.reshape(-1)[place], first_limit[tile, 0], first_limit[tile, 1])
    entries = jnp.stack(words, axis=1)

    bounds = jnp.searchsorted(keys, jnp.arange(total + 1, dtype=jnp.int32)).astype(jnp.int32)
    visits = bounds[1:] - bounds[:-1]
    chunk_length = jnp.maximum(SHORTEST_CHUNK, -(-bounds[-1] // MANY_CHUNKS))
    chunk_end = jnp.cumsum(-(-visits // chunk_length), dtype=jnp.int32)
    chunk_start = jnp.concatenate([jnp.zeros(1, jnp.int32), chunk_end])
    chunks = min(MANY_CHUNKS, -(-keys.size // SHORTEST_CHUNK)) + total
    chunk = jnp.arange(chunks, dtype=jnp.int32)
    block = jnp.minimum(jnp.searchsorted(chunk_end, chunk, side="right").astype(jnp.int32), total - 1)
    offset = (chunk - chunk_start[block]) * chunk_length
    count = jnp.where(chunk < chunk_end[-1], jnp.minimum(visits[block] - offset, chunk_length), 0)
    first = jnp.where(count > 0, bounds[block] + offset, 0)
    return BlockVisits(entries, block, first, count, chunk_start, n_blocks)
