"""Dual block selection in plain jnp.

Every choice is exact: the rank of a block is decided by its score alone, ties by the lower index, and NaN scores
come after all others. `lax.top_k` supplies a threshold only, since it has no rule for NaN.
"""

import jax
import jax.numpy as jnp
from jax import lax

NO_BLOCK = -1


def best(scores: jax.Array, candidates: jax.Array, count: int) -> jax.Array:
    """Mask of the `count` best candidates along the last axis, or of all when there are fewer.

    Ranking: higher scores first, then -inf, then NaN; equal ranks by lower index.
    """
    count = min(count, scores.shape[-1])
    if count == 0:
        return jnp.zeros(candidates.shape, bool)
    unranked = jnp.isneginf(scores) | jnp.isnan(scores)
    keys = jnp.where(candidates & ~unranked, scores, -jnp.inf)
    threshold = lax.top_k(keys, count)[0][..., -1:]
    # The candidates in order of rank, as classes. Only the class in which the budget ends is taken in part.
    classes = (
        candidates & (keys > threshold),
        candidates & (keys == threshold) & ~unranked,
        candidates & jnp.isneginf(scores),
        candidates & jnp.isnan(scores),
    )
    chosen = jnp.zeros(candidates.shape, bool)
    partial = jnp.zeros(candidates.shape, bool)
    left = jnp.full((*candidates.shape[:-1], 1), count, jnp.int32)
    room = left
    for members in classes:
        size = members.sum(axis=-1, keepdims=True, dtype=jnp.int32)
        fits = size <= left
        chosen |= members & fits
        first_partial = ~fits & (left > 0)
        partial |= members & first_partial
        room = jnp.where(first_partial, left, room)
        left = jnp.where(fits, left - size, 0)
    return chosen | (partial & (jnp.cumsum(partial, axis=-1, dtype=jnp.int32) <= room))


def ids_of(mask: jax.Array, count: int) -> jax.Array:
    """Ascending indices of the True entries along the last axis, then NO_BLOCK: int32 [..., count]."""
    n_blocks = mask.shape[-1]
    # Indices are exact in float32 up to 2**24 blocks, and top_k is fastest there.
    keys = jnp.where(mask, -jnp.arange(n_blocks, dtype=jnp.float32), -jnp.inf)
    found = lax.top_k(keys, min(count, n_blocks))[0]
    ids = jnp.where(jnp.isneginf(found), NO_BLOCK, -found).astype(jnp.int32)
    return jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, count - ids.shape[-1])], constant_values=NO_BLOCK)


def select_blocks(
    score_q: jax.Array,
    score_e: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    sink: int,
    local: int,
    query: int,
    evict: int,
) -> jax.Array:
    """Selected block ids, ascending: int32 [B, T, K, C]."""
    n_blocks = score_q.shape[-1]
    block = jnp.arange(n_blocks)
    current = (positions // block_size)[:, :, None, None]
    exists = jnp.broadcast_to(block <= current, score_q.shape)
    forced = exists & ((block < sink) | (block > current - local))
    by_query = best(score_q, exists & ~forced, query)
    rest = exists & ~forced & ~by_query
    by_evict = best(jnp.broadcast_to(score_e, score_q.shape), rest, evict)
    return ids_of(forced | by_query | by_evict, sink + local + query + evict)
