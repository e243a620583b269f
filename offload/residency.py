"""Getting the selected blocks of one layer into device slots, and full blocks out to the host."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from nosa_jax.ffi import TransferList, assign_slots, swap_in, write_pages
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import LayerCache


class Residency(NamedTuple):
    """Where the selected blocks lie, and what it took: slot ids [B, K, C] and counts [B, K]."""

    slot_ids: Int[Array, "B K C"]
    hits: Int[Array, "B K"]
    misses: Int[Array, "B K"]


def bring_in(
    cache: LayerCache,
    block_ids: Int[Array, "B K C"],
    lengths: Int[Array, "B"],
    page_table: Int[Array, "B M"],
    handle: Int[Array, "2"],
    step: Int[Array, ""],
    *,
    layer: int,
    layout: CacheLayout,
) -> tuple[LayerCache, Residency]:
    """Make every selected block resident.

    Blocks in a slot stay where they are; the others replace the least recently used blocks and are copied from
    their host pages. The block of position `lengths`, when it is new, gets a slot and no copy.
    """
    if not layout.offload:
        selected = (block_ids >= 0) & (block_ids < layout.n_blocks)
        current = (lengths // layout.config.block_size)[:, None, None]
        new = (block_ids == current) & (lengths % layout.config.block_size == 0)[:, None, None]
        hits = (selected & ~new).sum(axis=-1, dtype=jnp.int32)
        return cache, Residency(jnp.where(selected, block_ids, -1), hits, jnp.zeros_like(hits))
    assignment = assign_slots(
        block_ids,
        cache.slot_block,
        cache.last_used,
        step,
        lengths // layout.config.block_size,
        n_blocks=layout.n_blocks,
    )
    slots = swap_in(
        handle,
        cache.slots,
        assignment.load,
        page_table,
        layer=layer,
        n_layers=layout.config.num_layers,
        keep_if_unused=False,
    )
    cache = dataclasses.replace(cache, slots=slots, slot_block=assignment.slot_block, last_used=assignment.last_used)
    return cache, Residency(assignment.slot_ids, assignment.hits, assignment.misses)


def write_full_blocks(
    cache: LayerCache,
    tail_slot: Int[Array, "B K"],
    lengths: Int[Array, "B"],
    active: Bool[Array, "B"],
    page_table: Int[Array, "B M"],
    handle: Int[Array, "2"],
    *,
    layer: int,
    layout: CacheLayout,
) -> LayerCache:
    """Copy the tail block of every row that the token at position `lengths` has filled to its host page."""
    if not layout.offload:
        return cache
    block_size = layout.config.block_size
    full = active & (lengths % block_size == block_size - 1)
    shape = tail_slot.shape
    store = TransferList(
        block=jnp.broadcast_to((lengths // block_size)[:, None, None], (*shape, 1)),
        slot=tail_slot[..., None],
        count=jnp.broadcast_to(full[:, None], shape).astype(jnp.int32),
    )
    slots = write_pages(
        handle, cache.slots, store, page_table, layer=layer, n_layers=layout.config.num_layers, keep_if_unused=False
    )
    return dataclasses.replace(cache, slots=slots)
