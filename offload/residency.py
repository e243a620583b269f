"""Getting the selected blocks of one layer into device slots, and full blocks out to the host."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nosa_jax.ffi import Fetched, NewToken, fetch_blocks, store_blocks
from nosa_jax.offload.append import append_tail
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import LayerCache


class Residency(NamedTuple):
    """Where the selected blocks lie, the current one apart (-1: not selected), and what it took."""

    slot_ids: Int[Array, "B K C"]
    tail_slot: Int[Array, "B K"]
    hits: Int[Array, "B K"]
    misses: Int[Array, "B K"]


def bring_in(
    cache: LayerCache,
    block_ids: Int[Array, "B K C"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    lengths: Int[Array, "B"],
    page_table: Int[Array, "B M"],
    handle: Int[Array, "2"],
    step: Int[Array, ""],
    *,
    layer: int,
    layout: CacheLayout,
) -> tuple[LayerCache, Residency]:
    """Make every selected block resident, and write the token at position `lengths` into its block.

    Blocks in a slot stay where they are; the others replace the least recently used blocks and are copied from
    their host pages. The block of position `lengths`, when it is new, gets a slot and no copy.

    Args:
      k, v: rotated key and value of the new token of each row; they go nowhere in a row that does not select its
        current block.
    """
    current = lengths // layout.config.block_size
    if not layout.offload:
        selected = (block_ids >= 0) & (block_ids < layout.n_blocks)
        is_current = block_ids == current[:, None, None]
        new = is_current & (lengths % layout.config.block_size == 0)[:, None, None]
        hits = (selected & ~new).sum(axis=-1, dtype=jnp.int32)
        slot_ids = jnp.where(selected, block_ids, -1)
        tail_slot = jnp.where(is_current, slot_ids, -1).max(axis=-1)
        cache = dataclasses.replace(cache, slots=append_tail(cache.slots, k, v, tail_slot, lengths))
        return cache, Residency(slot_ids, tail_slot, hits, jnp.zeros_like(hits))
    arrays = (handle, cache.slots, block_ids, cache.slot_block, cache.last_used, step, current, page_table)
    token = NewToken(k.astype(cache.slots.dtype), v.astype(cache.slots.dtype), lengths)
    n_layers = layout.config.num_layers
    return with_fetched(cache, fetch_blocks(*arrays, token=token, layer=layer, n_layers=n_layers, keep_if_unused=False))


def with_fetched(cache: LayerCache, fetched: Fetched) -> tuple[LayerCache, Residency]:
    """The cache after a fetch, and where its blocks lie."""
    cache = dataclasses.replace(cache, slots=fetched.cache, slot_block=fetched.slot_block, last_used=fetched.last_used)
    return cache, Residency(fetched.slot_ids, fetched.tail_slot, fetched.hits, fetched.misses)


def write_full_blocks(
    caches: Sequence[LayerCache],
    tail_slots: Sequence[Int[Array, "B K"]],
    lengths: Int[Array, "B"],
    active: Bool[Array, "B"],
    page_table: Int[Array, "B M"],
    handle: Int[Array, "2"],
    *,
    after: Array,
    layout: CacheLayout,
) -> tuple[LayerCache, ...]:
    """Copy the tail block of every row that the token at position `lengths` has filled to its host pages.

    Once a step, for all layers: a slot that was given out in a step keeps its block until the layer's next swap, which
    takes the caches that come out of here.

    Args:
      caches, tail_slots: of every layer, the current block's slot as `bring_in` found it.
      after: an array that is computed from the step's last attention, so that no cache is still to be read.
    """
    if not layout.offload:
        return tuple(caches)
    block_size = layout.config.block_size
    slots = store_blocks(
        handle,
        [cache.slots for cache in caches],
        tail_slots,
        lengths // block_size,
        active & (lengths % block_size == block_size - 1),
        page_table,
        after=after,
        keep_if_unused=False,
    )
    return tuple(dataclasses.replace(cache, slots=own) for cache, own in zip(caches, slots, strict=True))
