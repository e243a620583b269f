"""Sparse attention on Hopper GPUs: the kernels of `mosaic_forward`, `mosaic_dq` and `mosaic_dkv`, put together.

Forward, one program per KV head and tile of neighbouring queries: consumers of 64 rows (query heads times queries)
share a stream of the keys and values of the union of the blocks that the tile's queries selected. Backward: the same
walk again for dq, and for dk, dv and dcis a walk over the tiles that selected a block.

docs/10 has what was measured. At 128K tokens of the 8B shape the union lists take 1.4 ms, layouts and lists of a
backward pass 3.7 ms, dq 27 ms, dk with dv and dcis 40 ms (H200, in a run while they were written).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels.sparse_attention import mosaic_dkv, mosaic_dq, mosaic_forward
from nosa_jax.pallas_kernels.sparse_attention.layouts import (
    QueryCotangents,
    from_key_rows,
    from_query_rows,
    kernel_inputs,
    query_rows,
)
from nosa_jax.pallas_kernels.sparse_attention.mosaic_parts import LOWEST
from nosa_jax.pallas_kernels.sparse_attention.tiling import LOG2E, ROWS, Tiling, forward_warpgroups
from nosa_jax.pallas_kernels.sparse_attention.unions import union_capacity
from nosa_jax.pallas_kernels.sparse_attention.visits import block_visits

Shaped = jax.Array | jax.ShapeDtypeStruct

HEAD_DIMS = (64, 96, 128, 192, 256)
MAX_LISTED = 2048  # blocks in a union list: 16 KiB of shared memory for ids and bits
BACKWARD_WARPGROUPS = 2  # the sums of the backward kernels leave no registers for a third


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cis: jax.Array | None,
    block_ids: jax.Array,
    positions: jax.Array | None,
    lengths: jax.Array | None,
    block_size: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    n_kv = k.shape[2]
    warpgroups = forward_warpgroups(q.shape[3], q.shape[2] // n_kv)
    inputs = kernel_inputs(q, k, v, cis, block_ids, positions, lengths, block_size=block_size, warpgroups=warpgroups)
    out, lse = mosaic_forward.forward(inputs, interpret)
    return from_query_rows(out, q.shape, n_kv, inputs.tiling), from_query_rows(lse, q.shape[:3], n_kv, inputs.tiling)


def _attend_forward(*args):
    out, lse = _attend(*args)
    return (out, lse), (*args[:7], out, lse)


def _attend_backward(block_size, interpret, residuals, cotangents):
    return backward(residuals, cotangents, block_size=block_size, interpret=interpret)


_attend.defvjp(_attend_forward, _attend_backward)


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cis: jax.Array | None,
    block_ids: jax.Array,
    positions: jax.Array | None,
    lengths: jax.Array | None = None,
    *,
    block_size: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What `reference.with_lse` computes, and its gradients. What lies beyond a row's length may be NaN."""
    return _attend(q, k, v, cis, block_ids, positions, lengths, block_size, interpret)


def backward(
    residuals: tuple,
    cotangents: tuple[jax.Array, jax.Array],
    *,
    block_size: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple:
    """Cotangents of q, k, v and cis, then None for the integers.

    Args:
      residuals: the arguments of `sparse_attention` up to `lengths`, then its two results.
      cotangents: those of its two results.
    """
    q, k, v, cis, block_ids, positions, lengths, out, lse = residuals
    d_out, d_lse = cotangents
    n_kv = k.shape[2]
    inputs = kernel_inputs(
        q, k, v, cis, block_ids, positions, lengths, block_size=block_size, warpgroups=BACKWARD_WARPGROUPS
    )
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1) - d_lse
    lse2 = jnp.where(jnp.isfinite(lse), lse * LOG2E, 0.0)
    rows_of = partial(query_rows, n_kv=n_kv, tiling=inputs.tiling)
    cotangents_of_rows = QueryCotangents(rows_of(d_out), rows_of(lse2, padding_value=-LOWEST), rows_of(delta))
    dq = mosaic_dq.query_gradient(inputs, cotangents_of_rows, interpret)
    visits = block_visits(inputs.unions, inputs.limits, -(-k.shape[1] // block_size))
    dk, dv, dcis = mosaic_dkv.key_gradients(inputs, cotangents_of_rows, visits, interpret)
    dk, dv = from_key_rows(dk, k.shape), from_key_rows(dv, v.shape)
    if cis is not None and dcis is not None:
        dcis = from_key_rows(dcis, cis.shape).astype(cis.dtype)
    return from_query_rows(dq, q.shape, n_kv, inputs.tiling), dk, dv, dcis, None, None, None


def unsupported(q: Shaped, k: Shaped, v: Shaped, block_ids: Shaped, block_size: int) -> str | None:
    """Why the kernels do not take these inputs, or None."""
    head_dim, group = q.shape[3], q.shape[2] // k.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v must all be bfloat16 or all float16; they are {q.dtype}, {k.dtype} and {v.dtype}"
    if head_dim not in HEAD_DIMS:
        return f"head dimension {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if group > ROWS:
        return f"{group} query heads per KV head are more than {ROWS}"
    if block_size % 16 or not 16 <= block_size <= 256:
        return f"block_size={block_size} is not a multiple of 16 from 16 to 256"
    if 0 in q.shape or 0 in k.shape or 0 in block_ids.shape:
        return f"an input is empty: q {q.shape}, k {k.shape}, block_ids {block_ids.shape}"
    for warpgroups in {BACKWARD_WARPGROUPS, forward_warpgroups(head_dim, group)}:
        tiling = Tiling.choose(head_dim, block_size, group, warpgroups)
        listed = union_capacity(-(-k.shape[1] // block_size), tiling.tokens, block_ids.shape[3])
        if listed > MAX_LISTED:
            return (
                f"{tiling.tokens} neighbouring queries with {block_ids.shape[3]} blocks each can select {listed} "
                f"different ones; the kernels' lists hold {MAX_LISTED}"
            )
    return None
