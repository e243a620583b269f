"""One row of a layer's cache as a whole: reading earlier tokens back, and storing what a prefill computed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nosa_jax.config import NosaConfig
from nosa_jax.eviction import ranking_scores
from nosa_jax.ffi import TransferList, swap_in, write_pages
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import LayerCache
from nosa_jax.pallas_kernels import NO_BLOCK
from nosa_jax.pallas_kernels.pooling.reference import stride_sums
from nosa_jax.selection import block_ranking, pooled_keys


class RowTokens(NamedTuple):
    """Rotated keys, values and cis of one row, token by token: [1, S, K, H] and [1, S, K]. Zero beyond its length."""

    k: Float[Array, "1 S K H"]
    v: Float[Array, "1 S K H"]
    cis: Float[Array, "1 S K"]


class RowPooling(NamedTuple):
    """Pooled keys [1, K, W, H] and every block's pooled ranking score [1, K, M] of one row."""

    keys: Float[Array, "1 K W H"]
    block_rank: Float[Array, "1 K M"]


class RowPages(NamedTuple):
    """Where a row of one layer lies on the host: the pool, and for every block its page in units of KV heads."""

    handle: Int[Array, "2"]
    table: Int[Array, "1 M"]


def layer_pages(
    page_table: Int[Array, "B M"], handle: Int[Array, "2"], row: Array, layer: Array, n_layers: int
) -> RowPages:
    """The page table of one row and layer, with the layer as data: one compiled prefill serves all layers."""
    groups = lax.dynamic_slice_in_dim(page_table, row, 1)
    return RowPages(handle, jnp.where(groups < 0, -1, groups * n_layers + layer))


def extend_row(
    cache: LayerCache, new: RowTokens, row: Array, start: Array, pages: RowPages, layout: CacheLayout, *, earlier: int
) -> RowTokens:
    """The row's `start` earlier tokens followed by the new ones.

    earlier: room for the former in tokens, whole blocks, at least `start`; 0 where there are none.
    """
    if not earlier:
        return new
    block_size = layout.config.block_size
    before = earlier // block_size
    n_blocks = before + new.k.shape[1] // block_size
    slots = lax.dynamic_slice_in_dim(cache.slots, row, 1)
    heads, _, _, _, head_dim = slots.shape[1:]
    if layout.offload:
        # Full blocks come from the host; the tail block was never written there and is in a slot.
        tail = start // block_size
        every = jnp.broadcast_to(jnp.arange(before, dtype=jnp.int32), (1, heads, before))
        load = TransferList(every, every, jnp.broadcast_to(tail, (1, heads)).astype(jnp.int32))
        old = swap_in(
            pages.handle,
            jnp.zeros((1, heads, n_blocks, 2, block_size, head_dim), slots.dtype),
            load,
            pages.table,
            layer=0,
            n_layers=1,
            keep_if_unused=False,
        )
        slot_block = lax.dynamic_slice_in_dim(cache.slot_block, row, 1)
        holds_tail = (slot_block == tail) & (start % block_size > 0)
        tail_page = jnp.take_along_axis(slots, holds_tail.argmax(axis=-1)[..., None, None, None, None], axis=2)
        tail_page = jnp.where(holds_tail.any(axis=-1)[..., None, None, None, None], tail_page, 0)
        old = lax.dynamic_update_slice_in_dim(old, tail_page, tail, axis=2)
    else:
        old = jnp.pad(slots[:, :, :before], [(0, 0), (0, 0), (0, n_blocks - before)] + [(0, 0)] * 3)
    exists = jnp.arange(n_blocks * block_size) < start

    def by_token(x: jax.Array) -> jax.Array:  # [1, K, M, P, ...] to [1, S, K, ...]
        x = jnp.moveaxis(x.reshape(1, heads, -1, *x.shape[4:]), 1, 2)
        return jnp.where(exists.reshape(1, -1, *(1,) * (x.ndim - 2)), x, 0)

    cis = lax.dynamic_slice_in_dim(cache.cis, row, 1)[:, :, :before]
    cis = jnp.pad(cis, [(0, 0), (0, 0), (0, n_blocks - before), (0, 0)])
    held = RowTokens(by_token(old[:, :, :, 0]), by_token(old[:, :, :, 1]), by_token(cis))
    return RowTokens(*(lax.dynamic_update_slice_in_dim(a, b, start, axis=1) for a, b in zip(held, new, strict=True)))


def pool_row(tokens: RowTokens, length: Array, config: NosaConfig) -> RowPooling:
    """Pool a whole row of `length` tokens."""
    ranking, n_blocks = ranking_scores(tokens.cis, config.eviction), tokens.k.shape[1] // config.block_size
    return RowPooling(pooled_keys(tokens.k, config), block_ranking(ranking, config, n_blocks=n_blocks, length=length))


def store_row(
    cache: LayerCache,
    tokens: RowTokens,
    pooling: RowPooling,
    selected: Int[Array, "K C"],
    row: Array,
    start: Array,
    length: Array,
    step: Array,
    pages: RowPages,
    layout: CacheLayout,
) -> LayerCache:
    """Put a row of `length` tokens, of which those from `start` on are new, into the cache.

    Blocks that the new tokens completed go to their host pages. Slots get the blocks that the last token selected,
    so that the locality bound holds from the first decode step on, then the most recent others.
    """
    config = layout.config
    block_size = config.block_size
    n_tokens, heads = tokens.k.shape[1:3]
    n_blocks = n_tokens // block_size
    paged = jnp.stack([tokens.k, tokens.v], axis=1).reshape(1, 2, n_blocks, block_size, heads, -1)
    paged = paged.transpose(0, 4, 2, 1, 3, 5)  # [1, K, M, 2, P, H]
    if layout.offload:
        first, end = start // block_size, length // block_size
        blocks = first + jnp.arange(n_blocks + 1, dtype=jnp.int32)
        blocks = jnp.broadcast_to(blocks, (1, heads, n_blocks + 1))
        store = TransferList(blocks, blocks, jnp.broadcast_to(end - first, (1, heads)).astype(jnp.int32))
        paged = write_pages(pages.handle, paged, store, pages.table, layer=0, n_layers=1, keep_if_unused=False)
        slots, slot_block, last_used = _choose_slots(paged, selected[None], length, step, layout)
    else:
        slots = paged[:, :, : layout.n_blocks]
        slot_block = lax.dynamic_slice_in_dim(cache.slot_block, row, 1)
        last_used = lax.dynamic_slice_in_dim(cache.last_used, row, 1)

    key_sums, rank_sums = _latest_sums(tokens, length, layout)
    cis = jnp.moveaxis(tokens.cis, 1, 2).reshape(1, heads, n_blocks, block_size)
    # Of the whole row: decoding takes the maximum with what is there.
    room = max(0, layout.n_blocks - n_blocks)
    block_rank = jnp.pad(pooling.block_rank, [(0, 0), (0, 0), (0, room)], constant_values=-jnp.inf)
    new = dict(
        slots=slots,
        slot_block=slot_block,
        last_used=last_used,
        cis=cis[:, :, : layout.n_blocks],
        pooled_k=pooling.keys[:, :, : layout.n_windows],
        block_rank=block_rank[..., : layout.n_blocks],
        key_sums=key_sums,
        rank_sums=rank_sums,
        selected=selected[None],
    )

    def put(old: jax.Array, value: jax.Array) -> jax.Array:
        at = (row, *(jnp.zeros((), row.dtype) for _ in range(old.ndim - 1)))
        return lax.dynamic_update_slice(old, value.astype(old.dtype), at)

    return LayerCache(**{name: put(getattr(cache, name), value) for name, value in new.items()})


def _choose_slots(
    paged: jax.Array, selected: jax.Array, length: jax.Array, step: jax.Array, layout: CacheLayout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slots [1, K, S, 2, P, H], their blocks and their last use, for the selected and then the latest blocks."""
    n_blocks = paged.shape[2]
    block = jnp.arange(n_blocks, dtype=jnp.int32)
    wanted = (selected[..., None] == block).any(axis=-2)
    exists = block * layout.config.block_size < length
    rank = jnp.where(exists, jnp.where(wanted, n_blocks, 0) + block, -1).astype(jnp.int32)
    order = lax.top_k(rank, min(layout.n_slots, n_blocks))[1].astype(jnp.int32)
    slot_block = jnp.where(jnp.take_along_axis(rank, order, axis=-1) >= 0, order, NO_BLOCK)
    slots = jnp.take_along_axis(paged, order[..., None, None, None], axis=2)
    # Older blocks were used longer ago, as far as the replacement is concerned.
    age = -1 - jnp.arange(slot_block.shape[-1], dtype=jnp.int32)
    last_used = jnp.where(jnp.take_along_axis(wanted, order, axis=-1), step, age)
    empty = layout.n_slots - slot_block.shape[-1]
    pad = [(0, 0), (0, 0), (0, empty)]
    return (
        jnp.pad(slots, [*pad, (0, 0), (0, 0), (0, 0)]),
        jnp.pad(slot_block, pad, constant_values=NO_BLOCK),
        jnp.pad(last_used, pad, constant_values=-1),
    )


def _latest_sums(tokens: RowTokens, length: jax.Array, layout: CacheLayout) -> tuple[jax.Array, jax.Array]:
    """Sums over the latest strides, at their places in the ring: [1, K, R, H] and [1, K, R]."""
    config, strides = layout.config, layout.n_strides
    newest = jnp.maximum(length - 1, 0) // config.pool_stride
    ring = jnp.arange(strides)
    index = newest - (newest - ring) % strides  # the latest stride with each place in the ring
    exists = jnp.arange(tokens.k.shape[1]) < length
    rank = jnp.where(exists[None, :, None], ranking_scores(tokens.cis, config.eviction), 0.0)

    def latest(x: jax.Array) -> jax.Array:
        sums = stride_sums(x, config.pool_stride)  # zeros beyond the length leave a partial sum's bits alone
        picked = jnp.where((index >= 0).reshape(-1, *(1,) * (x.ndim - 2)), sums[0, jnp.maximum(index, 0)], 0)
        return jnp.moveaxis(picked, 0, 1)[None]

    return latest(tokens.k), latest(rank)
