"""Public attention of many queries over selected blocks, or over everything."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nosa_jax.pallas_kernels import dispatch
from nosa_jax.pallas_kernels.sparse_attention import reference, xla


def sparse_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    cis: Float[Array, "B S K"] | None,
    block_ids: Int[Array, "B T K C"],
    positions: Int[Array, "B T"] | None = None,
    *,
    block_size: int,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention of every query over its own selected KV blocks (arXiv 2510.13602, attention; docs/02).

    Token t of a selected block takes part when t <= position; its weight is exp(q·k_t/sqrt(H) + cis_t).
    Differentiable in q, k, v and cis. A query that sees no token gives zeros.

    Args:
      q, k: rotated queries and keys. v: values. N is a multiple of K.
      cis: additive bias per key, float32, or None.
      block_ids: ids per query and KV head, each at most once. Anything outside 0 .. ceil(S/block_size)-1 is padding.
      positions: absolute positions of the queries in tokens; None when query i stands at position i.
      block_size: tokens per block.
      implementation: "reference" gathers per query and never touches unselected keys; "xla" masks matrix products
        over all keys in chunks of queries, so keys and values must be finite even where they are not selected.

    Returns: [B, T, N, H] in the dtype of q; logits, softmax and sums are float32.

    Raises:
      NotImplementedError: the named implementation does not exist for this operation.
    """

    def by_reference(
        q: jax.Array, k: jax.Array, v: jax.Array, cis: jax.Array | None, ids: jax.Array, positions: jax.Array | None
    ) -> jax.Array:
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
        return reference.sparse_attention(q, k, v, cis, ids, positions, block_size=block_size)

    return dispatch.run(
        "sparse_attention",
        implementation,
        (q, k, v, cis, block_ids, positions),
        reference=by_reference,
        xla=partial(xla.sparse_attention, block_size=block_size),
    )
