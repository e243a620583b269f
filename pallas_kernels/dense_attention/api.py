"""Public causal attention over every token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nosa_jax.pallas_kernels import dispatch
from nosa_jax.pallas_kernels.sparse_attention import xla


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    positions: Int[Array, "B T"] | None = None,
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention over every token up to each query's position.

    Args:
      q, k: rotated queries and keys. v: values. N is a multiple of K.
      positions: absolute positions of the queries in tokens; None when query i stands at position i.
      implementation: "xla" is a masked product over chunks of queries, as for `sparse_attention`. "library" is cuDNN's
        flash attention: on a GPU, in 16-bit numbers, for queries at their own positions.

    Returns: [B, T, N, H] in the dtype of q; logits, softmax and sums are float32.

    Raises:
      NotImplementedError: the named implementation does not exist or does not take these arguments.
    """
    return dispatch.run(
        "dense_attention",
        implementation,
        (q, k, v, positions),
        library=_cudnn,
        unsupported=_unsupported(q, k, positions),
        xla=lambda q, k, v, positions: xla.sparse_attention(q, k, v, None, None, positions, block_size=1),
    )


def _unsupported(q: jax.Array, k: jax.Array, positions: jax.Array | None) -> str | None:
    if positions is not None:
        return "it wants query i at position i"
    if q.shape[1] != k.shape[1]:
        return f"it wants as many queries as keys, not {q.shape[1]} and {k.shape[1]}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"it takes head dimensions that are multiples of 8 up to 256, not {q.shape[-1]}"
    return None


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, positions: None) -> jax.Array:
    del positions
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
