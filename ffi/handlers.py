"""Typed wrappers of the handlers; each runs inside `jax.jit` on whatever platform its arrays are on.

A block m of row b lies, for a layer and a KV head k, on host page `(page_table[b, m] * n_layers + layer) * K + k`.
Handlers are ordered by data flow alone: the cache goes in and comes out (aliased, so donate it), and whatever must
happen after a swap takes the cache that came out of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Shaped

from nosa_jax.ffi.registration import register

register()

# 16 thread blocks saturate a PCIe 5 link with pages of 32 KiB: 64 and 132 gain nothing from 512 KiB a call upwards.
DEFAULT_CTAS = 16
MAX_SLOTS = 4096  # what fits in the shared memory of sm_80; the same everywhere, so that a CPU's step also fits a GPU


class TransferList(NamedTuple):
    """Blocks to move between host pages and slots: entries j < count, of every row and KV head."""

    block: Int32[Array, "B K n"]
    slot: Int32[Array, "B K n"]
    count: Int32[Array, "B K"]  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


class Assignment(NamedTuple):
    """Where the wanted blocks are, the updated tables, and what has to be loaded first."""

    slot_ids: Int32[Array, "B K C"]  # -1 where the wanted id is no block
    slot_block: Int32[Array, "B K S"]
    last_used: Int32[Array, "B K S"]
    load: TransferList  # n = C; in the order of `wanted`, -1 from `count` on
    hits: Int32[Array, "B K"]
    misses: Int32[Array, "B K"]


def assign_slots(
    wanted: Int32[Array, "B K C"],
    slot_block: Int32[Array, "B K S"],
    last_used: Int32[Array, "B K S"],
    step: Int32[Array, ""],
    fresh_from: Int32[Array, " B"],
    *,
    n_blocks: int,
) -> Assignment:
    """Give every wanted block a slot, replacing the least recently used ones.

    A resident block is a hit. Any other takes, in the order of `wanted`, an empty slot (`slot_block` < 0; the lowest
    first) or else the least recently used slot that holds no block wanted now (the lower of equals). `last_used` of
    every wanted block's slot becomes `step`. Ids outside [0, n_blocks) are padding. A repeated id counts once.

    Args:
        wanted: block ids, padded with anything outside [0, n_blocks).
        slot_block: the block in each slot, -1 for empty. No block may be in two slots.
        last_used: the step at which each slot was wanted last.
        step: the number of this step; the caller counts upwards.
        fresh_from: blocks from here on have no host page yet: they get a slot, are not loaded, and count neither as
            hit nor as miss.
        n_blocks: M, the blocks of a row.

    Raises:
        ValueError: fewer slots than wanted blocks, or more than 4096.
    """
    rows, heads, n_wanted = wanted.shape
    n_slots = slot_block.shape[2]
    check_slots("assign_slots", n_slots, n_wanted)
    list_of_wanted = jax.ShapeDtypeStruct(wanted.shape, jnp.int32)
    per_head = jax.ShapeDtypeStruct((rows, heads), jnp.int32)
    table = jax.ShapeDtypeStruct(slot_block.shape, jnp.int32)
    call = jax.ffi.ffi_call(
        "nosa_assign_slots",
        (list_of_wanted, table, table, list_of_wanted, list_of_wanted, per_head, per_head, per_head),
        input_output_aliases={1: 1, 2: 2},
    )
    args = guard("assign_slots", wanted, slot_block, last_used, step, fresh_from)
    slot_ids, slot_block, last_used, block, slot, count, hits, misses = call(*args, n_blocks=n_blocks)
    return Assignment(slot_ids, slot_block, last_used, TransferList(block, slot, count), hits, misses)


def swap_in(
    handle: Int32[Array, "2"] | Int32[np.ndarray, "2"],
    slots: Shaped[Array, "B K S 2 P H"],
    load: TransferList,
    page_table: Int32[Array, "B M"],
    *,
    layer: int,
    n_layers: int,
    n_ctas: int = DEFAULT_CTAS,
    keep_if_unused: bool = True,
) -> Shaped[Array, "B K S 2 P H"]:
    """Copy the listed blocks of one layer from their host pages into slots; returns the cache, updated in place.

    Args:
        handle: `HostPool.handle`.
        slots: the layer's cache, of any dtype; bytes are copied as they are.
        load: which block goes to which slot.
        page_table: where each block of a row lies in the pool, in units of `n_layers * K` pages.
        layer, n_layers: which of the layers that share the pool this is.
        n_ctas: thread blocks that do the copying on a GPU; the rest of the GPU stays free. No meaning on the CPU.
        keep_if_unused: run the call even where its result is not used, and twice where two calls are equal. JAX then
            dispatches the step that holds it from Python (1 to 2 ms a step); False where the result is always used.

    Raises:
        ValueError: `layer` is outside the layers.
        jax.errors.JaxRuntimeError: (on the CPU, when the result is read) a closed pool, a page size other than the
            slots', or a number out of range; nothing was copied then. On a GPU the entry at fault is left out and
            `HostPool.check` raises.
    """
    return _transfer("swap_in", handle, slots, load, page_table, layer, n_layers, n_ctas, keep_if_unused)


def write_pages(
    handle: Int32[Array, "2"] | Int32[np.ndarray, "2"],
    pages: Shaped[Array, "B K S 2 P H"],
    store: TransferList,
    page_table: Int32[Array, "B M"],
    *,
    layer: int,
    n_layers: int,
    n_ctas: int = DEFAULT_CTAS,
    keep_if_unused: bool = True,
) -> Shaped[Array, "B K S 2 P H"]:
    """Copy the listed blocks of one layer from slots to their host pages; returns `pages`, unchanged.

    Use the returned array from here on: that is what orders later swaps after this write. Arguments and errors are
    those of `swap_in`.
    """
    return _transfer("write_pages", handle, pages, store, page_table, layer, n_layers, n_ctas, keep_if_unused)


def store_blocks(
    handle: Int32[Array, "2"] | Int32[np.ndarray, "2"],
    caches: Sequence[Shaped[Array, "B K S 2 P H"]],
    slots: Sequence[Int32[Array, "B K"]],
    block: Int32[Array, " B"],
    full: Bool[Array, " B"],
    page_table: Int32[Array, "B M"],
    *,
    after: Array,
    n_ctas: int = DEFAULT_CTAS,
    keep_if_unused: bool = True,
) -> tuple[Shaped[Array, "B K S 2 P H"], ...]:
    """Copy one block of every full row from its slots to its host pages, in all layers; returns the caches, unchanged.

    One call per step takes the place of a `write_pages` per layer: where no row is full, nothing is looked at but
    `full`. Use the returned caches from here on, as with `write_pages`.

    Args:
        handle: `HostPool.handle`.
        caches: the caches of all layers that share the pool, in order.
        slots: for every layer, the slot that holds the block.
        block: the block of each row.
        full: the rows to copy.
        page_table: as for `swap_in`.
        after: any array; the call comes after whatever computes it. With the last reader of the caches here, they are
            updated in place; otherwise a reader that might come later has XLA copy them.
        n_ctas, keep_if_unused: as for `swap_in`.

    Raises:
        ValueError: no layers, or another number of slots than of caches.
        jax.errors.JaxRuntimeError: as for `swap_in`.
    """
    if not caches or len(caches) != len(slots):
        raise ValueError(f"store_blocks: {len(caches)} caches and {len(slots)} arrays of slots; give one per layer")
    check_call("store_blocks", 0, len(caches), n_ctas)
    fixed = (jnp.asarray(handle), block, full, page_table, after)
    call = jax.ffi.ffi_call(
        "nosa_store_blocks",
        tuple(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches),
        input_output_aliases={len(fixed) + layer: layer for layer in range(len(caches))},
        has_side_effect=keep_if_unused,
    )
    return tuple(call(*guard("store_blocks", *fixed, *caches, *slots), n_ctas=n_ctas))


def check_call(name: str, layer: int, n_layers: int, n_ctas: int) -> None:
    """Raise ValueError for a layer or a number of thread blocks out of range."""
    if not 0 <= layer < n_layers:
        raise ValueError(f"{name}: layer={layer} is outside the {n_layers} layers")
    if not 1 <= n_ctas < 2**16:
        raise ValueError(f"{name}: n_ctas={n_ctas} is outside 1..65535")


def check_slots(name: str, n_slots: int, n_wanted: int) -> None:
    """Raise ValueError for fewer slots than wanted blocks, or more than the handlers take."""
    if n_slots < n_wanted:
        raise ValueError(f"{name}: {n_slots} slots cannot hold {n_wanted} wanted blocks; plan at least as many")
    if n_slots > MAX_SLOTS:
        raise ValueError(f"{name}: {n_slots} slots are more than the {MAX_SLOTS} that a handler takes; plan fewer")


def _transfer(
    name: str,
    handle: Any,
    cache: Array,
    entries: TransferList,
    page_table: Array,
    layer: int,
    n_layers: int,
    n_ctas: int,
    keep_if_unused: bool,
) -> Array:
    check_call(name, layer, n_layers, n_ctas)
    call = jax.ffi.ffi_call(
        f"nosa_{name}",
        jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={1: 0},
        has_side_effect=keep_if_unused,
    )
    args = guard(name, jnp.asarray(handle), cache, *entries, page_table)
    return call(*args, layer=layer, n_layers=n_layers, n_ctas=n_ctas)


def guard(name: str, *args: Array) -> tuple[Array, ...]:
    """The same arrays; `vmap` and differentiation stop here with an error that says what to do instead."""

    def identity(*args: Array) -> tuple[Array, ...]:
        return args

    def no_vmap(*_: Any) -> Any:
        raise NotImplementedError(
            f"nosa_jax.ffi.{name} cannot be vmapped: it moves pages of one pool for a whole batch at a time. "
            "Its arrays have a row dimension already; put the mapped axis there."
        )

    def no_jvp(*_: Any) -> Any:
        raise NotImplementedError(
            f"nosa_jax.ffi.{name} cannot be differentiated: it belongs to decoding with an offloaded cache. "
            "Train with the resident model, or wrap the cache in jax.lax.stop_gradient."
        )

    mapped: Callable[..., Any] = jax.custom_batching.custom_vmap(identity)
    mapped.def_vmap(no_vmap)  # type: ignore[attr-defined]
    guarded = jax.custom_jvp(mapped)
    guarded.defjvp(no_jvp)
    return guarded(*args)
