"""Fetching one layer's blocks in a decode step: in one call, or in two with work between them while bytes arrive."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from nosa_jax.ffi.handlers import DEFAULT_CTAS, TransferList, check_call, guard
from nosa_jax.ffi.registration import has_cuda


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


class PendingFetch(NamedTuple):
    """Copies under way: what `finish_fetch` needs, since they read all of it.

    late: 1 where a wanted block is being copied into its slot, 0 where it can be read already.
    """

    late: Int32[Array, "B K C"]
    load: TransferList
    handle: Int32[Array, "2"]
    page_table: Int32[Array, "B M"]


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


def start_fetch(
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
) -> tuple[Fetched, PendingFetch]:
    """The first half of `fetch_blocks`: all its results are there, but blocks marked as late may still be on their way.

    On a GPU the copies run on a stream beside XLA's. Until `finish_fetch`, whose cache is the one to go on with,
    nothing may write to this one, and late slots may not be read. On the CPU everything is copied at once.

    The call is kept out of captured CUDA graphs, which could end between the two halves. Arguments and errors are
    those of `fetch_blocks`. The cache that `finish_fetch` returns must be used, or else copies would run that nobody
    waits for.
    """
    args, options = _prepare(
        "start_fetch", handle, cache, wanted, slot_block, last_used, step, fresh_from, page_table, token, layer,
        n_layers, n_ctas,
    )  # fmt: skip
    results = (*options.pop("result_shape_dtypes"), jax.ShapeDtypeStruct(wanted.shape, jnp.int32))
    call = jax.ffi.ffi_call("nosa_start_fetch", results, **options)
    *got, block, slot, late = call(*args, layer=layer, n_layers=n_layers, n_ctas=n_ctas)
    fetched = Fetched(*got)
    load = TransferList(block, slot, fetched.misses)
    return fetched, PendingFetch(late, load, args[0], page_table)


def finish_fetch(
    cache: Shaped[Array, "B K S 2 P H"], pending: PendingFetch, *, after: Any = ()
) -> Shaped[Array, "B K S 2 P H"]:
    """The second half: the cache, updated in place, with every late block in its slot.

    Args:
        cache: from `start_fetch`.
        pending: from the same call.
        after: arrays; the call comes after whatever computes them. What reads the cache before its late blocks are
            there belongs here: otherwise XLA may run it later, or copy the cache for it.

    Raises:
        jax.errors.JaxRuntimeError: (on a GPU) nothing was started for this cache, or XLA copied it in between.
    """
    read_by_copies = jax.tree.leaves((pending, after))
    call = jax.ffi.ffi_call(
        "nosa_finish_fetch", jax.ShapeDtypeStruct(cache.shape, cache.dtype), input_output_aliases={0: 0}
    )
    return call(*guard("finish_fetch", cache, *read_by_copies))


def settle() -> None:
    """Wait for copies of every `start_fetch` so far whose program failed before its `finish_fetch`.

    They may be writing into memory that the failed program's caches had; call it before that memory is used again.
    Without a GPU there are none.
    """
    if not has_cuda():
        return
    from nosa_jax.ffi import _cuda

    _cuda.settle()


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
    if slot_block.shape[2] < n_wanted:
        raise ValueError(
            f"{name}: {slot_block.shape[2]} slots cannot hold {n_wanted} wanted blocks; plan at least as many"
        )
    per_wanted = jax.ShapeDtypeStruct(wanted.shape, jnp.int32)
    per_head = jax.ShapeDtypeStruct((rows, heads), jnp.int32)
    table = jax.ShapeDtypeStruct(slot_block.shape, jnp.int32)
    load_list = (per_wanted, per_wanted)
    results = (jax.ShapeDtypeStruct(cache.shape, cache.dtype), per_wanted, table, table, *(per_head,) * 3, *load_list)
    arrays = (wanted, slot_block, last_used, step, fresh_from, page_table, *(token or ()))
    args = guard(name, jnp.asarray(handle), cache, *arrays)
    return args, {"result_shape_dtypes": results, "input_output_aliases": {1: 0, 3: 2, 4: 3}}
