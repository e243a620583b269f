"""Public attention of many queries over selected blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nosa_jax.pallas_kernels import dispatch
from nosa_jax.pallas_kernels.sparse_attention import mosaic_gpu, reference, xla


def sparse_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    cis: Float[Array, "B S K"] | None,
    block_ids: Int[Array, "B T K C"],
    positions: Int[Array, "B T"] | None = None,
    lengths: Int[Array, "B"] | None = None,
    *,
    block_size: int,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention of every query over its own selected KV blocks (arXiv 2510.13602, attention; docs/02).

    Token t of a selected block takes part when t <= position; its weight is exp(q·k_t/sqrt(H) + cis_t).
    Differentiable in q, k, v and cis. A query that sees no token gives zeros. Documents that lie one behind the other
    in a row see each other, also where `positions` begin anew: give each a row of its own, with `lengths`.

    Args:
      q, k: rotated queries and keys. v: values. N is a multiple of K.
      cis: additive bias per key, float32, or None.
      block_ids: ids per query and KV head, each at most once. Anything outside 0 .. ceil(S/block_size)-1 is padding.
      positions: absolute positions of the queries in tokens; None when query i stands at position i.
      lengths: tokens of each row; later ones are invisible, and queries at their positions give zeros. None: S.
      block_size: tokens per block.
      implementation: "reference" gathers per query and never touches unselected keys; "xla" masks matrix products
        over all keys in chunks of queries; "mosaic_gpu" lets neighbouring queries walk the union of their blocks
        (bfloat16 or float16 on a Hopper GPU). For "xla" and "mosaic_gpu" keys and values must be finite even where
        they are not selected; for "mosaic_gpu" only up to the row's length.

    Returns: [B, T, N, H] in the dtype of q; logits, softmax and sums are float32.

    Raises:
      NotImplementedError: the named implementation does not exist for this operation, or not for these arguments.
    """
    return sparse_attention_with_lse(
        q, k, v, cis, block_ids, positions, lengths, block_size=block_size, implementation=implementation
    )[0]


def sparse_attention_with_lse(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    cis: Float[Array, "B S K"] | None,
    block_ids: Int[Array, "B T K C"],
    positions: Int[Array, "B T"] | None = None,
    lengths: Int[Array, "B"] | None = None,
    *,
    block_size: int,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`sparse_attention` and the natural log of each query's sum of exponentials, float32, -inf for an empty sum.

    With it attention over disjoint sets of keys can be merged. Both results are differentiable.
    """
    args = (q, k, v, cis, block_ids, positions, lengths)
    reason = mosaic_gpu.unsupported(q, k, v, block_ids, block_size)
    if reason is None and dispatch.why_no_kernels() is None:
        return _differentiated_by_dispatch(*args, block_size, implementation)
    return _run(*args, block_size, implementation)


def _run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cis: jax.Array | None,
    block_ids: jax.Array,
    positions: jax.Array | None,
    lengths: jax.Array | None,
    block_size: int,
    implementation: dispatch.Implementation | None,
) -> tuple[jax.Array, jax.Array]:
    return dispatch.run(
        "sparse_attention",
        implementation,
        (q, k, v, cis, block_ids, positions, lengths),
        reference=partial(_reference, block_size=block_size),
        xla=partial(xla.with_lse, block_size=block_size),
        mosaic_gpu=partial(mosaic_gpu.sparse_attention, block_size=block_size),
        unsupported=mosaic_gpu.unsupported(q, k, v, block_ids, block_size),
    )


# Where a program is compiled for the platform's own implementation, the choice of the backward pass is made like that
# of the forward pass. Differentiating through the choice instead would keep what both of the backward passes need.
_differentiated_by_dispatch = jax.custom_vjp(_run, nondiff_argnums=(7, 8))


def _forward(*args: Any) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    out, lse = _run(*args)
    return (out, lse), (*args[:7], out, lse)


def _backward(
    block_size: int,
    implementation: dispatch.Implementation | None,
    residuals: tuple,
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple:
    q, k, v, _, block_ids, *_ = residuals

    def gradients(*saved: Any, of: Callable) -> tuple:
        *differentiable, ids, positions, lengths, _, _, d_out, d_lse = saved
        _, pullback = jax.vjp(lambda *x: of(*x, ids, positions, lengths, block_size=block_size), *differentiable)
        return pullback((d_out, d_lse))

    def by_kernels(*saved: Any) -> tuple:
        return mosaic_gpu.backward(saved[:-2], saved[-2:], block_size=block_size)[:4]

    grads = dispatch.run(
        "sparse_attention",
        implementation,
        (*residuals, *cotangents),
        reference=partial(gradients, of=_reference),
        xla=partial(gradients, of=xla.with_lse),
        mosaic_gpu=by_kernels,
        unsupported=mosaic_gpu.unsupported(q, k, v, block_ids, block_size),
    )
    return (*grads, None, None, None)


_differentiated_by_dispatch.defvjp(_forward, _backward)


def _reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cis: jax.Array | None,
    ids: jax.Array,
    positions: jax.Array | None,
    lengths: jax.Array | None,
    *,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
    return reference.with_lse(q, k, v, cis, ids, positions, lengths, block_size=block_size)
