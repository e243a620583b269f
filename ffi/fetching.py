"""Fetching one layer's blocks in a decode step: copied at once, or listed for a kernel that attends meanwhile."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from nosa_jax.ffi.handlers import DEFAULT_CTAS, check_call, check_slots, guard


class NewToken(NamedTuple):
    """What one token adds to a layer's cache: its key and value, in the cache's dtype, and its position in the row."""

    k: Shaped[Array, "B K H"]
    v: Shaped[Array, "B K H"]
    position: Int32[Array, " B"]


class Fetched(NamedTuple):
    """A cache whose slots hold the wanted blocks, and where; arrays as those of `Assignment`."""

    cache: Shaped[Array, "B K S 2 P H"]
    slot_ids: Int32[Array, "B K C"]
    slot_block: Int32[Array, "B K S"]
    last_used: Int32[Array, "B K S"]
    hits: Int32[Array, "B K"]
    misses: Int32[Array, "B K"]
    tail_slot: Int32[Array, "B K"]  # of block `fresh_from`, -1 where it is not wanted


class ListedPages(NamedTuple):
    """Host pages to be copied, for `nosa_jax.pallas_kernels.decode_attention_while_fetching`.

    late: 1 where a wanted block is among them.
    arrived: pieces of the block that are in a slot, where it is late; 0 at first, or all where its page has a fault.
    pages: lists of (address's low and high half, slot among all rows' and heads', which of its C wanted entries), of
      n_pages entries each.
    """

    late: Int32[Array, "B K C"]
    arrived: Int32[Array, "B K S"]
    pages: Int32[Array, "lists most 4"]
    n_pages: Int32[Array, " lists"]


def fetch_blocks(
    handle: Int32[Array, "2"] | Int32[np.ndarray, "2"],
    cache: Shaped[Array, "B K S 2 P H"],
    wanted: Int32[Array, "B K C"],
    slot_block: Int32[Array, "B K S"],
    last_used: Int32[Array, "B K S"],
    step: Int32[Array, ""],
    fresh_from: Int32[Array, " B"],
    page_table: Int32[Array, "B M"],
    *,
    token: NewToken | None = None,
    layer: int,
    n_layers: int,
    n_ctas: int = DEFAULT_CTAS,
    keep_if_unused: bool = True,
) -> Fetched:
    """`assign_slots`, then `swap_in` of what has to be loaded: the same results, in one call.

    On a GPU with thread block clusters (sm_90 on) it is one launch, unless a row has more than 512 slots, so many
    blocks that a map of them does not fit in 96 KiB, or pages that 16 does not divide; then, and on older ones, three.
    Arguments and errors are those of the two; M comes from `page_table`.

    Args:
        token: written into the slot of block `fresh_from`, at its position modulo P. Nothing is written for a row and
            KV head that do not want that block.
    """
    args, options = _prepare(
        "fetch_blocks", handle, cache, wanted, slot_block, last_used, step, fresh_from, page_table, token, layer,
        n_layers, n_ctas,
    )  # fmt: skip
    call = jax.ffi.ffi_call("nosa_fetch_blocks", **options, has_side_effect=keep_if_unused)
    return Fetched(*call(*args, layer=layer, n_layers=n_layers, n_ctas=n_ctas)[: len(Fetched._fields)])


def list_blocks(
    handle: Int32[Array, "2"] | Int32[np.ndarray, "2"],
    cache: Shaped[Array, "B K S 2 P H"],
    wanted: Int32[Array, "B K C"],
    slot_block: Int32[Array, "B K S"],
    last_used: Int32[Array, "B K S"],
    step: Int32[Array, ""],
    fresh_from: Int32[Array, " B"],
    page_table: Int32[Array, "B M"],
    *,
    token: NewToken | None = None,
    layer: int,
    n_layers: int,
    pieces: int,
    n_ctas: int = DEFAULT_CTAS,
) -> tuple[Fetched, ListedPages]:
    """`fetch_blocks` but for the copies: all its results are there, and the pages that are to be copied are listed.

    For platform CUDA only, on GPUs and for sizes that `why_not_listed` accepts. Slots of late blocks hold nothing until
    somebody has copied their pages. Other arguments and errors are those of `fetch_blocks`.

    Args:
        pieces: in how many a page will be copied: what `arrived` is from the start where a page has a fault.
    """
    args, options = _prepare(
        "list_blocks", handle, cache, wanted, slot_block, last_used, step, fresh_from, page_table, token, layer,
        n_layers, n_ctas,
    )  # fmt: skip
    most = -(-wanted.shape[0] * wanted.shape[1] // n_ctas) * wanted.shape[2]
    lists = (wanted.shape, slot_block.shape, (n_ctas, most, 4), (n_ctas,))
    results = (*options.pop("result_shape_dtypes"), *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in lists))
    call = jax.ffi.ffi_call("nosa_list_blocks", results, **options)
    got = call(*args, layer=layer, n_layers=n_layers, n_ctas=n_ctas, pieces=pieces)
    return Fetched(*got[: len(Fetched._fields)]), ListedPages(*got[-len(ListedPages._fields) :])


def why_not_listed(n_slots: int, n_blocks: int) -> str | None:
    """Why `list_blocks` does not take tables of these sizes, or None if it does."""
    if n_slots > 512:
        return f"{n_slots} slots are more than the 512 that a warp holds"
    if n_blocks > 32_768:
        return f"a map of {n_blocks} blocks leaves no shared memory"
    return None


def _prepare(
    name: str,
    handle: Any,
    cache: Array,
    wanted: Array,
    slot_block: Array,
    last_used: Array,
    step: Array,
    fresh_from: Array,
    page_table: Array,
    token: NewToken | None,
    layer: int,
    n_layers: int,
    n_ctas: int,
) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """Operands and options of the call of either kind."""
    check_call(name, layer, n_layers, n_ctas)
    rows, heads, n_wanted = wanted.shape
    check_slots(name, slot_block.shape[2], n_wanted)
    per_wanted = jax.ShapeDtypeStruct(wanted.shape, jnp.int32)
    per_head = jax.ShapeDtypeStruct((rows, heads), jnp.int32)
    table = jax.ShapeDtypeStruct(slot_block.shape, jnp.int32)
    load_list = (per_wanted, per_wanted)
    results = (jax.ShapeDtypeStruct(cache.shape, cache.dtype), per_wanted, table, table, *(per_head,) * 3, *load_list)
    arrays = (wanted, slot_block, last_used, step, fresh_from, page_table, *(token or ()))
    args = guard(name, jnp.asarray(handle), cache, *arrays)
    return args, {"result_shape_dtypes": results, "input_output_aliases": {1: 0, 3: 2, 4: 3}}
