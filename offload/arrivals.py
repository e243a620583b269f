"""Attending to a layer's selected blocks while those that are missing arrive from the host."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int

from nosa_jax.ffi import Fetched, NewToken, fetch_blocks, list_blocks, why_not_listed
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.residency import Residency
from nosa_jax.offload.state import LayerCache
from nosa_jax.pallas_kernels import decode_attention, dispatch
from nosa_jax.pallas_kernels.decode_attention import while_fetching


def attend_while_fetching(
    q: Float[Array, "B N H"],
    cache: LayerCache,
    cis: Float[Array, "B K M P"] | None,
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
) -> tuple[Float[Array, "B N H"], LayerCache, Residency]:
    """`bring_in` and `decode_attention`, to the same bits (docs/04).

    On a GPU with the kernels, one launch finds out what is missing, and the next copies it and attends meanwhile.
    Elsewhere everything is fetched first.
    """
    dtype = cache.slots.dtype
    pieces = while_fetching.pieces_of(layout.page_bytes)
    options: dict[str, Any] = dict(layer=layer, n_layers=layout.config.num_layers)

    def apart(q: Array, cis: Array | None, lengths: Array, k: Array, v: Array, *arrays: Array) -> tuple[Any, Any]:
        fetched, listed = list_blocks(*arrays, token=NewToken(k, v, lengths), pieces=pieces, **options)
        heads, slots = while_fetching.decode_attention_while_fetching(
            q, fetched.cache, cis, fetched.slot_ids, arrays[2], lengths + 1, *listed
        )
        return heads, fetched._replace(cache=slots)

    def at_once(
        q: Array, cis: Array | None, lengths: Array, k: Array, v: Array, *arrays: Array
    ) -> tuple[Array, Fetched]:
        fetched = fetch_blocks(*arrays, token=NewToken(k, v, lengths), keep_if_unused=False, **options)
        return decode_attention(q, fetched.cache, cis, fetched.slot_ids, arrays[2], lengths + 1), fetched

    current = lengths // layout.config.block_size
    arrays = (handle, cache.slots, block_ids, cache.slot_block, cache.last_used, step, current, page_table)
    heads, fetched = dispatch.run(
        "decode_attention_while_fetching",
        None,
        (q, cis, lengths, k.astype(dtype), v.astype(dtype), *arrays),
        reference=at_once,
        xla=at_once,
        mosaic_gpu=apart,
        unsupported=while_fetching.unsupported(q, cache.slots, cis, block_ids, lengths)
        or why_not_listed(layout.n_slots, layout.n_blocks),
    )
    cache = dataclasses.replace(cache, slots=fetched.cache, slot_block=fetched.slot_block, last_used=fetched.last_used)
    return heads, cache, Residency(fetched.slot_ids, fetched.tail_slot, fetched.hits, fetched.misses)
