"""What comes between a layer's projections and its selection for one token per row, on a GPU in one launch."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from nosa_jax.ffi.registration import has_cuda, register

register()

MAX_HEAD_DIM = 1024  # threads of a thread block, one for each element


class PooledStatistics(NamedTuple):
    """What a layer's cache knows of its tokens beside their keys and values; the letters are those of docs/03."""

    key_sums: Float[Array, "B K R H"]
    rank_sums: Float[Array, "B K R"]
    pooled_k: Float[Array, "B K W H"]
    block_rank: Float[Array, "B K M"]
    cis: Float[Array, "B K M P"]


class EvictionHead(NamedTuple):
    """Weights of the eviction head, float32 (`nosa_jax.eviction`)."""

    delta: Float[Array, "K K H"]
    a: Float[Array, "K"]


def append_token(
    statistics: PooledStatistics,
    projected: Float[Array, "B NKK H"],
    cos: Float[Array, "B half"],
    sin: Float[Array, "B half"],
    head: EvictionHead | None,
    lengths: Int32[Array, " B"],
    active: Bool[Array, " B"],
    *,
    stride: int,
    exponential: bool,
) -> tuple[Float[Array, "B N H"], Float[Array, "B K H"], Float[Array, "B K H"], PooledStatistics]:
    """Rotate the token at position `lengths` of every row, score it, and account for it where the row is active.

    For platform CUDA only, where it takes the place of a dozen small kernels (docs/03). Statistics are updated in
    place; their sums have the bits of pooling a whole sequence.

    Args:
        statistics: donated. A window spans R strides.
        projected: N queries, K keys and K values of the new tokens, not rotated, in the dtype of `pooled_k`.
        cos, sin: `nosa_jax.rope.rope_tables` of the tokens' positions, float32.
        head: gives the tokens' eviction scores; None: they are zero.
        lengths: tokens in each row before this one.
        active: the rows whose statistics change.
        stride: tokens of a pooling stride.
        exponential: blocks are ranked by exp of the eviction scores.

    Returns: rotated queries, rotated keys, the values, and the statistics.
    """
    _load_kernels()
    rows, heads, _, head_dim = statistics.pooled_k.shape
    weights = head or EvictionHead(jnp.zeros((heads, heads, head_dim)), jnp.zeros(heads))
    inputs = (projected.reshape(rows, -1), cos, sin, *weights, lengths, active)
    per_head = [projected.shape[1] - 2 * heads, heads, heads]
    outputs = [jax.ShapeDtypeStruct((rows, n, head_dim), projected.dtype) for n in per_head]
    call = jax.ffi.ffi_call(
        "nosa_append_token",
        (*outputs, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in statistics)),
        input_output_aliases={len(inputs) + index: len(outputs) + index for index in range(len(statistics))},
    )
    rotated_q, rotated_k, same_v, *after = call(
        *inputs, *statistics, stride=stride, scored=int(head is not None), exponential=int(exponential)
    )
    return rotated_q, rotated_k, same_v, PooledStatistics(*after)


@functools.cache
def _load_kernels() -> None:
    """Load them into every device: the first launch may happen while a graph is captured, where loading can fail."""
    try:
        devices = jax.local_devices(backend="cuda") if has_cuda() else []
    except RuntimeError:  # compiled here for a machine with a GPU
        devices = []
    for device in devices:
        from nosa_jax.ffi import _cuda

        _cuda.load_append_kernels(device.local_hardware_id)
