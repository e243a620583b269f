"""Public query-aware block scores."""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from nosa_jax.pallas_kernels import dispatch
from nosa_jax.pallas_kernels.pooled_scores import mosaic_gpu, reference
from nosa_jax.pallas_kernels.query_chunks import map_query_chunks

QUERY_CHUNK = 256  # query positions scored at a time by "xla"


def pooled_scores(
    q: Float[Array, "B T N H"],
    pooled_k: Float[Array, "B K W H"],
    positions: Int[Array, "B T"],
    *,
    n_blocks: int,
    block_size: int,
    window: int,
    stride: int,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T K M"]:
    """Query-aware score of every KV block (arXiv 2510.13602, section on query-aware selection; docs/02).

    For a query at position i the windows that end at or before i are visible. Probabilities are a softmax of
    q·pooled_k/sqrt(H) over them, summed over the query heads that share the KV head; a block takes the maximum
    of the windows that touch it.

    Args:
      q: rotated queries.
      pooled_k: window means of rotated keys; rows beyond the windows of a sequence are never looked at.
      positions: absolute position of each query, in tokens.
      n_blocks: M. block_size, window, stride: tokens.
      implementation: "reference" keeps [B, T, N, W] at once; "xla" one chunk of queries at a time; "mosaic_gpu" keeps
        none of it (bfloat16 or float16 on a Hopper GPU) and copies pooled_k unless W is a multiple of
        8 * block_size / stride.

    Returns: float32, -inf where a block has no visible window.

    Raises:
      NotImplementedError: the named implementation does not exist for this operation, or not for these arguments.
    """
    sizes: dict[str, Any] = dict(n_blocks=n_blocks, block_size=block_size, window=window, stride=stride)
    score = partial(reference.pooled_scores, n_blocks=n_blocks, block_size=block_size, window=window, stride=stride)

    def in_chunks(q: jax.Array, pooled_k: jax.Array, positions: jax.Array) -> jax.Array:
        return map_query_chunks(lambda *rows: score(rows[0], pooled_k, rows[1]), (q, positions), QUERY_CHUNK)

    return dispatch.run(
        "pooled_scores",
        implementation,
        (q, pooled_k, positions),
        reference=score,
        xla=in_chunks,
        mosaic_gpu=partial(mosaic_gpu.pooled_scores, **sizes),
        unsupported=mosaic_gpu.unsupported(q, pooled_k, n_blocks=n_blocks, block_size=block_size, stride=stride),
    )
