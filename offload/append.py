"""Adding one token to a layer's cache: window sums, pooled windows, cis, and the tail block."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nosa_jax.eviction import ranking_scores, token_scores
from nosa_jax.ffi import MAX_HEAD_DIM, EvictionHead, PooledStatistics, append_token, has_cuda
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import LayerCache
from nosa_jax.rope import rope_tables, rotate


def append_projections(
    cache: LayerCache,
    projected: Float[Array, "B NKK H"],
    head: EvictionHead,
    lengths: Int[Array, "B"],
    active: Bool[Array, "B"],
    layout: CacheLayout,
) -> tuple[Float[Array, "B N H"], Float[Array, "B K H"], Float[Array, "B K H"], LayerCache]:
    """Rotate and score one new token per row, and account for those of active rows, before they are selected for.

    Args:
      projected: N queries, K keys and K values of the new tokens, at positions `lengths`, not rotated.
      head: the layer's eviction head; of no effect where the config has none.
      lengths: tokens in each row before it.

    Returns: rotated queries, rotated keys, the values, and the cache with window sums, pooled windows, block scores and
      cis.
    """
    config = layout.config
    cos, sin = rope_tables(lengths[:, None], config)
    before = PooledStatistics(*(getattr(cache, name) for name in PooledStatistics._fields))
    args = (before, projected, cos, sin, head, lengths, active)

    def by_xla(
        before: PooledStatistics, projected: Array, cos: Array, sin: Array, head: EvictionHead, lengths: Array,
        active: Array,
    ) -> tuple[Array, Array, Array, PooledStatistics]:  # fmt: skip
        q, k, v = jnp.split(projected, (config.num_heads, config.num_heads + config.num_kv_heads), axis=1)
        q, k = (rotate(x[:, None], cos, sin)[:, 0] for x in (q, k))
        cis = token_scores(v[:, None], head.delta, head.a, config.eviction)[:, 0]
        return q, k, v, append_pooling(before, k, cis, lengths, active, layout)

    def in_one_launch(
        before: PooledStatistics, projected: Array, cos: Array, sin: Array, head: EvictionHead, lengths: Array,
        active: Array,
    ) -> tuple[Array, Array, Array, PooledStatistics]:  # fmt: skip
        return append_token(
            before, projected, cos[:, 0], sin[:, 0], None if config.eviction == "none" else head, lengths, active,
            stride=config.pool_stride, exponential=config.eviction == "dma",
        )  # fmt: skip

    if has_cuda() and config.head_dim <= MAX_HEAD_DIM:
        q, k, v, after = jax.lax.platform_dependent(*args, cuda=in_one_launch, default=by_xla)
    else:
        q, k, v, after = by_xla(*args)
    return q, k, v, dataclasses.replace(cache, **after._asdict())


def append_pooling(
    statistics: PooledStatistics,
    k: Float[Array, "B K H"],
    cis: Float[Array, "B K"],
    lengths: Int[Array, "B"],
    active: Bool[Array, "B"],
    layout: CacheLayout,
) -> PooledStatistics:
    """Account for one new token per active row.

    Sums over a pooling stride grow token by token, in the order that pooling a whole sequence adds them; when a
    window completes, its mean is the same number bit for bit.

    Args:
      k, cis: rotated key and eviction score of the new token at position `lengths`.
      lengths: tokens in each row before it.
    """
    c = layout.config
    ranking = ranking_scores(cis, c.eviction)
    stride, strides = c.pool_stride, layout.n_strides
    stride_index, offset = lengths // stride, lengths % stride
    current = (stride_index % strides)[:, None] == jnp.arange(strides)  # [B, R]

    def add(sums: jax.Array, x: jax.Array) -> jax.Array:  # [B, K, R, ...] and [B, K, ...]
        fill = (1,) * (sums.ndim - 3)
        x = x.astype(jnp.float32)[:, :, None]
        grown = jnp.where((offset == 0).reshape(-1, 1, 1, *fill), x, sums + x)
        place = (current & active[:, None]).reshape(current.shape[0], 1, strides, *fill)
        return jnp.where(place, grown, sums)

    key_sums, rank_sums = add(statistics.key_sums, k), add(statistics.rank_sums, ranking)

    window = stride_index - (strides - 1)
    complete = active & (offset == stride - 1) & (window >= 0)

    def window_mean(sums: jax.Array) -> jax.Array:  # [B, K, ...]
        order = (window[:, None] + jnp.arange(strides)) % strides
        parts = jnp.take_along_axis(sums, order.reshape(order.shape[0], 1, strides, *(1,) * (sums.ndim - 3)), axis=2)
        total = parts[:, :, 0]
        for index in range(1, strides):
            total = total + parts[:, :, index]
        return total / c.pool_window

    rows = jnp.arange(lengths.shape[0])
    where = jnp.where(complete, window, layout.n_windows)  # out of range: dropped
    # The last window of a block reaches into the next block.
    windows_per_block = c.block_size // stride
    touched = jnp.stack([window, window + 1], axis=1) // windows_per_block  # [B, 2], often the same block twice
    touched = jnp.where(complete[:, None], touched, layout.n_blocks)
    block = jnp.where(active, lengths // c.block_size, layout.n_blocks)
    return PooledStatistics(
        key_sums=key_sums,
        rank_sums=rank_sums,
        pooled_k=statistics.pooled_k.at[rows, :, where].set(
            window_mean(key_sums).astype(statistics.pooled_k.dtype), mode="drop"
        ),
        block_rank=statistics.block_rank.at[rows[:, None], :, touched].max(
            window_mean(rank_sums)[:, None], mode="drop"
        ),
        cis=statistics.cis.at[rows, :, block, lengths % c.block_size].set(cis, mode="drop"),
    )


def append_tail(
    slots: Float[Array, "B K S 2 P H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    tail_slot: Int[Array, "B K"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B K S 2 P H"]:
    """Write the new token's key and value into the slot of each row's current block; a negative slot writes nothing."""
    batch, heads, n_slots, _, block_size, _ = slots.shape
    slot = jnp.where(tail_slot >= 0, tail_slot, n_slots)
    rows, kv_heads = jnp.arange(batch)[:, None], jnp.arange(heads)[None]
    pair = jnp.stack([k, v], axis=2).astype(slots.dtype)
    return slots.at[rows, kv_heads, slot, :, (lengths % block_size)[:, None]].set(pair, mode="drop")
