"""Attending to a layer's selected blocks while those that are missing arrive from the host."""

from jaxtyping import Array, Float, Int

from nosa_jax.ffi import NewToken, list_blocks, why_not_listed
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.residency import Residency, bring_in, with_fetched
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
    everything = (q, cache, cis, block_ids, k, v, lengths, page_table, handle, step)

    def apart(q: Array, cache: LayerCache, cis: Array | None, block_ids: Array, k: Array, v: Array, lengths: Array,
              page_table: Array, handle: Array, step: Array) -> tuple[Array, LayerCache, Residency]:  # fmt: skip
        current = lengths // layout.config.block_size
        fetched, listed = list_blocks(
            handle, cache.slots, block_ids, cache.slot_block, cache.last_used, step, current, page_table,
            token=NewToken(k.astype(cache.slots.dtype), v.astype(cache.slots.dtype), lengths), layer=layer,
            n_layers=layout.config.num_layers, pieces=while_fetching.pieces_of(layout.page_bytes),
        )  # fmt: skip
        heads, slots = while_fetching.decode_attention_while_fetching(
            q, fetched.cache, cis, fetched.slot_ids, block_ids, lengths + 1, *listed
        )
        return heads, *with_fetched(cache, fetched._replace(cache=slots))

    def at_once(q: Array, cache: LayerCache, cis: Array | None, block_ids: Array, k: Array, v: Array, lengths: Array,
                *where: Array) -> tuple[Array, LayerCache, Residency]:  # fmt: skip
        cache, there = bring_in(cache, block_ids, k, v, lengths, *where, layer=layer, layout=layout)
        return decode_attention(q, cache.slots, cis, there.slot_ids, block_ids, lengths + 1), cache, there

    return dispatch.run(
        "decode_attention_while_fetching",
        None,
        everything,
        reference=at_once,
        xla=at_once,
        mosaic_gpu=apart,
        unsupported=while_fetching.unsupported(q, cache.slots, cis, block_ids, lengths)
        or why_not_listed(layout.n_slots, layout.n_blocks),
    )
