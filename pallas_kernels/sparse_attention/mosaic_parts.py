"""What the forward and backward kernels of sparse attention share."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from nosa_jax.pallas_kernels.sparse_attention.tiling import LOG2E, ROWS, Tiling

ROW = plgpu.Layout.WGMMA.reduce(1)  # one value per row of a wgmma result
COLUMN = plgpu.Layout.WGMMA.reduce(0)
LOWEST = -1e30  # stands for minus infinity where a difference of two of them may not become NaN


def member_bits(tiling: Tiling, warpgroup: jax.Array, layout: Any) -> jax.Array:
    """[64] int32 per query row of a warpgroup: the bit that stands for the row's query in a union list's entry.

    layout: ROW or COLUMN, whichever way the query rows lie in the products.
    """
    token = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout) >> (tiling.padded_group.bit_length() - 1)
    return lax.shift_left(jnp.full_like(token, 1), token + warpgroup * tiling.unit_tokens)


def unit_bits(tiling: Tiling, warpgroup: jax.Array) -> jax.Array:
    """The bits of all queries of a warpgroup."""
    return lax.shift_left(jnp.int32(2**tiling.unit_tokens - 1), warpgroup * tiling.unit_tokens)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value per row, for all columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value per column, for all rows."""
    return lax.broadcast_in_dim(x, shape, [1])


def logits(products: jax.Array, bias: jax.Array | None, head_dim: int) -> tuple[jax.Array, float]:
    """x and the factor that turns x into exponents of 2, for products of queries and keys and biases of their shape.

    With a bias x is the logit itself, rounded once: a constant added to all biases cancels as it would in exact
    arithmetic, since exp2(x * factor - top) is a fused multiply-add with one rounded `top` per query.
    """
    if bias is None:
        return products, head_dim**-0.5 * LOG2E
    return products * head_dim**-0.5 + bias, LOG2E


def multiply(left: Any, right: Any) -> jax.Array:
    """left @ right.T of two shared-memory matrices, in float32 registers."""

    def product(ref):
        plgpu.wgmma(ref, left, right.transpose((1, 0)))
        return ref[...]

    return pl.run_scoped(product, plgpu.ACC((left.shape[0], right.shape[0]), jnp.float32))


def multiply_into(acc: jax.Array, left: jax.Array, right: Any, scratch: Any) -> jax.Array:
    """acc + left @ right, with `left` in registers.

    `scratch` is None on the GPU. The interpreter takes the left operand from shared memory only, and no initialised
    accumulators: there it is a buffer that `left` passes through.
    """
    if scratch is None:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, left, right))(plgpu.ACC.init(acc))
    scratch[...] = left
    plgpu.commit_smem()

    def product(ref):
        plgpu.wgmma(ref, scratch, right)
        return ref[...]

    return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))


def list_parts(listed: int) -> list[pl.Slice]:
    """The pieces in which a union list is copied: one copy moves at most 256 elements of a dimension."""
    return [pl.ds(start, min(256, listed - start)) for start in range(0, listed, 256)]


def release(*barriers: Any) -> None:
    """Give stages back to the copies, after every thread's ordinary reads of them (wgmma's reads need no fence)."""
    plgpu.commit_smem()
    for barrier in barriers:
        plgpu.barrier_arrive(barrier)


def drain(free: tuple[Any, ...], steps: jax.Array, stages: int) -> None:
    """The producer's end: wait until the consumers have released the stages that nothing refills."""

    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def _drain(j: jax.Array) -> None:
        for barriers in free:
            plgpu.barrier_wait(barriers.at[lax.rem(j, jnp.int32(stages))])
