"""Public attention over selected cache slots."""

from jaxtyping import Array, Float, Int

from nosa_jax.pallas_kernels import dispatch
from nosa_jax.pallas_kernels.decode_attention import mosaic_gpu, reference
from nosa_jax.pallas_kernels.decode_attention.merge import Partial


def decode_attention(
    q: Float[Array, "B N H"],
    slots: Float[Array, "B K slots 2 P H"],
    cis: Float[Array, "B K M P"] | None,
    slot_ids: Int[Array, "B K C"],
    block_ids: Int[Array, "B K C"],
    lengths: Int[Array, "B"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B N H"]:
    """Attention of one new token per row over its selected blocks in a slotted KV cache (docs/03).

    Entry j of a row and KV head is block block_ids[j], which lies in slot slot_ids[j]; -1 in either is padding.
    Weights are exp(q·k_t/sqrt(H) + cis_t) over the tokens t < length of those blocks. The result depends on
    the blocks, their order and their bytes, not on which slots hold them.

    Args:
      q: rotated query of each row's newest token.
      slots: keys (index 0) and values (index 1) of one block per slot; unused parts may hold anything, NaN too.
      cis: additive bias of every token of the row by block, float32, or None.
      lengths: tokens in each row, the newest included.
      implementation: "reference" and "xla" are the same code here and gather the blocks; "mosaic_gpu" reads each
        block once, where it lies (bfloat16 or float16 on a Hopper GPU).

    Returns: [B, N, H] in the dtype of q; zeros for a row without a visible token.

    Raises:
      NotImplementedError: the named implementation does not exist for this operation, or not for these arguments.
    """
    args = (q, slots, cis, slot_ids, block_ids, lengths)
    return dispatch.run(
        "decode_attention",
        implementation,
        args,
        reference=reference.decode_attention,
        xla=reference.decode_attention,
        mosaic_gpu=mosaic_gpu.decode_attention,
        unsupported=mosaic_gpu.unsupported(*args),
    )


def decode_attention_partial(
    q: Float[Array, "B N H"],
    slots: Float[Array, "B K slots 2 P H"],
    cis: Float[Array, "B K M P"] | None,
    slot_ids: Int[Array, "B K C"],
    block_ids: Int[Array, "B K C"],
    lengths: Int[Array, "B"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Partial:
    """Attention over some of a row's blocks, to be merged with attention over its others by `merge_partials`.

    For blocks that become available at different times: attend to those that are there, and to the late ones when
    they have come. Arguments and errors are those of `decode_attention`.

    Returns: `out` [B, N, H] and `lse` [B, N], both float32; zeros and -inf for a row without a visible token.
    """
    args = (q, slots, cis, slot_ids, block_ids, lengths)
    return dispatch.run(
        "decode_attention_partial",
        implementation,
        args,
        reference=reference.decode_attention_partial,
        xla=reference.decode_attention_partial,
        mosaic_gpu=mosaic_gpu.decode_attention_partial,
        unsupported=mosaic_gpu.unsupported(*args),
    )
