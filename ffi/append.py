"""Adding one token per row to a layer's pooled statistics on a GPU, in one launch."""

import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int32

from nosa_jax.ffi.registration import has_cuda, register

register()


class PooledStatistics(NamedTuple):
    """What a layer's cache knows of its tokens beside their keys and values; the letters are those of docs/03."""

    key_sums: Float[Array, "B K R H"]
    rank_sums: Float[Array, "B K R"]
    pooled_k: Float[Array, "B K W H"]
    block_rank: Float[Array, "B K M"]
    cis: Float[Array, "B K M P"]


def append_token(
    statistics: PooledStatistics,
    k: Float[Array, "B K H"],
    cis: Float[Array, "B K"],
    ranking: Float[Array, "B K"],
    lengths: Int32[Array, " B"],
    active: Bool[Array, " B"],
    *,
    stride: int,
) -> PooledStatistics:
    """Account for the token at position `lengths` of every active row; everything is updated in place (docs/03).

    For platform CUDA only, where it takes the place of half a dozen small kernels and gives the same bits.

    Args:
        statistics: donated. A window spans R strides.
        k: rotated keys of the new tokens, in the dtype of `pooled_k`. cis: their eviction scores, float32.
        ranking: what is pooled of them for the ranking of blocks, float32.
        lengths: tokens in each row before this one.
        active: the rows to touch.
        stride: tokens of a pooling stride.
    """
    _load_kernels()
    n_inputs = 5
    call = jax.ffi.ffi_call(
        "nosa_append_token",
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in statistics),
        input_output_aliases={n_inputs + index: index for index in range(len(statistics))},
    )
    return PooledStatistics(*call(k, cis, ranking, lengths, active, *statistics, stride=stride))


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
