"""Public attention over selected cache slots some of which are still to be filled, by the same kernel."""

import jax
from jaxtyping import Array, Float, Int

from nosa_jax.pallas_kernels.decode_attention import mosaic_gpu
from nosa_jax.pallas_kernels.decode_attention.mosaic_arrivals import pieces_of
from nosa_jax.pallas_kernels.decode_attention.mosaic_splits import Arriving

__all__ = ["decode_attention_while_fetching", "pieces_of", "unsupported"]


def decode_attention_while_fetching(
    q: Float[Array, "B N H"],
    slots: Float[Array, "B K slots 2 P H"],
    cis: Float[Array, "B K M P"] | None,
    slot_ids: Int[Array, "B K C"],
    block_ids: Int[Array, "B K C"],
    lengths: Int[Array, "B"],
    late: Int[Array, "B K C"],
    arrived: Int[Array, "B K slots"],
    pages: Int[Array, "lists most 4"],
    n_pages: Int[Array, "lists"],
) -> tuple[Float[Array, "B N H"], Float[Array, "B K slots 2 P H"]]:
    """`decode_attention`, of which some blocks are in host memory when it begins: the same bits.

    The first programs of the launch copy the listed pages into their slots, in pieces; the others attend, and wait
    where they come to a late block. For Hopper GPUs, and arguments that `unsupported` accepts; no other implementation.

    Args:
      late, arrived, pages, n_pages: as `nosa_jax.ffi.list_blocks` gives them for `pieces_of(page_bytes)`.
      q, slots, cis, slot_ids, block_ids, lengths: as for `decode_attention`. The slots are updated in place.

    Returns: what `decode_attention` returns for the filled slots, and those slots.
    """
    arriving = Arriving(late, arrived, pages, n_pages)
    return mosaic_gpu.decode_attention_while_fetching(q, slots, cis, slot_ids, block_ids, lengths, arriving)


def unsupported(
    q: jax.Array, slots: jax.Array, cis: jax.Array | None, block_ids: jax.Array, lengths: jax.Array
) -> str | None:
    """Why the kernel does not take such arguments, or None if it does."""
    return mosaic_gpu.unsupported(q, slots, cis, block_ids, block_ids, lengths)
