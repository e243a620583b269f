"""Public dual block selection."""

from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from nosa_jax.pallas_kernels import dispatch
from nosa_jax.pallas_kernels.select_blocks import mosaic_gpu, reference
from nosa_jax.pallas_kernels.select_blocks.reference import NO_BLOCK

__all__ = ["NO_BLOCK", "select_blocks"]


def select_blocks(
    score_q: Float[Array, "B T K M"],
    score_e: Float[Array, "B #T K M"],
    positions: Int[Array, "B T"],
    *,
    block_size: int,
    sink: int,
    local: int,
    query: int,
    evict: int,
    implementation: dispatch.Implementation | None = None,
) -> Int[Array, "B T K C"]:
    """Choose the KV blocks that each query attends to (arXiv 2510.13602, dual selection; docs/02).

    With c the block of the query: the first `sink` and the last `local` blocks up to c are forced; then the `query`
    best of the others by `score_q`; then the `evict` best of what remains by `score_e`. Blocks after c are no
    candidates. With fewer candidates than the budget all are selected. Equal scores: the lower block index wins;
    -inf ranks after every number and NaN after that. Not differentiable: ids are integers.

    Args:
      score_q: query-aware scores (`pooled_scores`).
      score_e: query-agnostic scores (pooled cis), one row for all queries or one per query.
      positions: absolute position of each query, in tokens; a query with a negative one selects nothing.
      block_size: tokens per block. sink, local, query, evict: blocks; local counts the current block.
      implementation: "reference" and "xla" are the same code here; "mosaic_gpu" gives the same ids in one pass over the
        scores (Hopper GPUs, up to 16,384 blocks).

    Returns: ascending ids without duplicates, padded at the end with NO_BLOCK; C = sink + local + query + evict.

    Raises:
      NotImplementedError: the named implementation does not exist for this operation, or not for these arguments.
    """
    rules: dict[str, Any] = dict(block_size=block_size, sink=sink, local=local, query=query, evict=evict)
    select = partial(reference.select_blocks, **rules)
    return dispatch.run(
        "select_blocks",
        implementation,
        (score_q, score_e, positions),
        reference=select,
        xla=select,
        mosaic_gpu=partial(mosaic_gpu.select_blocks, **rules),
        unsupported=mosaic_gpu.unsupported(score_q, score_e, slots=sink + local + query + evict),
    )
