"""From queries, pooled keys and pooled cis to selected block ids."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.pallas_kernels import pool_blocks, pool_windows, pooled_scores, select_blocks
from nosa_jax.pallas_kernels.dispatch import why_no_kernels
from nosa_jax.pallas_kernels.query_chunks import map_query_chunks

# Query positions whose block scores exist at once: as few as XLA needs to bound its temporaries, and as many as it
# takes to fill a GPU with programs of a kernel that has none.
QUERY_CHUNK, KERNEL_QUERY_CHUNK = 256, 4096


def pooled_keys(k: Float[Array, "B S K H"], config: NosaConfig) -> Float[Array, "B K W H"]:
    """Window means of rotated keys, in their dtype."""
    return pool_windows(k, window=config.pool_window, stride=config.pool_stride)


def block_ranking(
    ranking: Float[Array, "B S K"], config: NosaConfig, *, n_blocks: int, length: Int[Array, ""] | None = None
) -> Float[Array, "B K M"]:
    """Query-agnostic score of every block: the largest window mean of its tokens' ranking scores, float32.

    Args:
      ranking: of every token (`eviction.ranking_scores`).
      n_blocks: M.
      length: windows that end after so many tokens do not count; None counts all.

    Returns: -inf where a block has no window.
    """
    windows = pool_windows(ranking, window=config.pool_window, stride=config.pool_stride)
    if length is not None:
        last = jnp.arange(windows.shape[-1]) * config.pool_stride + config.pool_window - 1
        windows = jnp.where(last < length, windows, -jnp.inf)
    return pool_blocks(windows, n_blocks=n_blocks, windows_per_block=config.block_size // config.pool_stride)


def select(
    q: Float[Array, "B T N H"],
    pooled_k: Float[Array, "B K W H"],
    block_rank: Float[Array, "B K M"],
    positions: Int[Array, "B T"],
    *,
    config: NosaConfig,
    attention: AttentionKind,
) -> Int[Array, "B T K C"]:
    """Selected block ids of every query under one of the compared systems (docs/02).

    The query-agnostic score of a block is final once the block has left the local window (the config guarantees
    it), and blocks inside that window are forced. So one row of block scores serves every query of a sequence, and
    windows after a query cannot change what it selects.

    Args:
      q: rotated queries. pooled_k: window means of rotated keys; a query sees those that end at or before it.
      block_rank: query-agnostic score of every block (`block_ranking`); M is at least the blocks that the last query
        can see.
      positions: absolute positions of the queries, in tokens; at a negative one nothing is selected.
      attention: whose division of the budget to use; "dense" selects like "nosa".

    Returns: ascending ids, padded at the end with NO_BLOCK. No gradient flows through the selection.
    """
    q, pooled_k, block_rank = jax.lax.stop_gradient((q, pooled_k, block_rank))
    budget = config.budget_for(attention)
    block_rank = block_rank[:, None]

    def choose(q_chunk: jax.Array, positions_chunk: jax.Array) -> jax.Array:
        if budget.query:
            score_q = pooled_scores(
                q_chunk,
                pooled_k,
                positions_chunk,
                n_blocks=block_rank.shape[-1],
                block_size=config.block_size,
                window=config.pool_window,
                stride=config.pool_stride,
            )
        else:
            score_q = jnp.zeros((*positions_chunk.shape, *block_rank.shape[2:]), jnp.float32)
        return select_blocks(
            score_q,
            block_rank,
            positions_chunk,
            block_size=config.block_size,
            sink=budget.sink,
            local=budget.local,
            query=budget.query,
            evict=budget.evict,
        )

    chunk = QUERY_CHUNK if why_no_kernels() else KERNEL_QUERY_CHUNK
    return map_query_chunks(choose, (q, positions), chunk)
