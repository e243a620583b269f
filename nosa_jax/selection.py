"""From queries, pooled keys and pooled cis to selected block ids."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.pallas_kernels import pool_blocks, pool_windows, pooled_scores, select_blocks
from nosa_jax.pallas_kernels.pooled_scores.api import QUERY_CHUNK
from nosa_jax.pallas_kernels.query_chunks import map_query_chunks


def pooled_keys(k: Float[Array, "B S K H"], config: NosaConfig) -> Float[Array, "B K W H"]:
    """Window means of rotated keys, in their dtype."""
    return pool_windows(k, window=config.pool_window, stride=config.pool_stride)


def pooled_ranking(ranking: Float[Array, "B S K"], config: NosaConfig) -> Float[Array, "B K W"]:
    """Window means of the tokens' ranking scores (`eviction.ranking_scores`), float32."""
    return pool_windows(ranking, window=config.pool_window, stride=config.pool_stride)


def select(
    q: Float[Array, "B T N H"],
    pooled_k: Float[Array, "B K W H"],
    pooled_rank: Float[Array, "B K W"],
    positions: Int[Array, "B T"],
    *,
    config: NosaConfig,
    attention: AttentionKind,
    n_blocks: int,
) -> Int[Array, "B T K C"]:
    """Selected block ids of every query under one of the compared systems (docs/02).

    The query-agnostic score of a block is final once the block has left the local window (the config guarantees
    it), and blocks inside that window are forced. So one row of block scores serves every query of a sequence, and
    windows after a query cannot change what it selects.

    Args:
      q: rotated queries. pooled_k: window means of rotated keys; a query sees those that end at or before it.
      pooled_rank: window means of ranking scores; -inf for windows that do not exist.
      positions: absolute positions of the queries, in tokens.
      attention: whose division of the budget to use; "dense" selects like "nosa".
      n_blocks: M, at least the blocks that the last query can see.

    Returns: ascending ids, padded at the end with NO_BLOCK. No gradient flows through the selection.
    """
    q, pooled_k, pooled_rank = jax.lax.stop_gradient((q, pooled_k, pooled_rank))
    budget = config.budget_for(attention)
    block_rank = pool_blocks(pooled_rank, n_blocks=n_blocks, windows_per_block=config.block_size // config.pool_stride)[
        :, None
    ]

    def choose(q_chunk: jax.Array, positions_chunk: jax.Array) -> jax.Array:
        if budget.query:
            score_q = pooled_scores(
                q_chunk,
                pooled_k,
                positions_chunk,
                n_blocks=n_blocks,
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

    return map_query_chunks(choose, (q, positions), QUERY_CHUNK)
