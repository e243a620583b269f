"""Backward kernels for keys, values and biases: a block walks the tiles of queries that selected it.

Blocks differ in work (every tile has the sink block), so the list of a block is cut into chunks of equal length; a
program sums over one chunk, and a second kernel adds the chunks' float32 sums in order. No atomics: results repeat.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from nosa_jax.pallas_kernels.sparse_attention.layouts import KernelInputs, QueryCotangents
from nosa_jax.pallas_kernels.sparse_attention.mosaic_parts import (
    COLUMN,
    LOWEST,
    ROW,
    along_columns,
    along_rows,
    drain,
    logits,
    member_bits,
    multiply,
    multiply_into,
    release,
    unit_bits,
)
from nosa_jax.pallas_kernels.sparse_attention.tiling import ROWS, Tiling, matrix_transforms
from nosa_jax.pallas_kernels.sparse_attention.visits import ENTRY, BlockVisits

KEYS = 64  # keys of a program: the M of one wgmma. Blocks of more are cut; beyond a smaller block rows are ignored


def _chunk_body(
    refs: tuple[Any, ...],
    scoped: tuple[Any, ...],
    *,
    tiling: Tiling,
    stages: int,
    blocks: int,
    keys_per_row: int,
    want_k: bool,
    want_v: bool,
) -> None:
    """One program; `refs` and `scoped` are what `_chunk_sums` passes and allocates."""
    q_ref, do_ref, lse_ref, delta_ref, limit_ref, k_ref, v_ref, cis_ref = refs[:8]
    entry_ref, block_ref, first_ref, count_ref, *outs = refs[8:]
    k_smem, v_smem, cis_smem, q_smem, do_smem, lse_smem, delta_smem, limit_smem, entry_smem, p_smem = scoped[:10]
    k_full, q_full, do_full, q_free, do_free = scoped[10:]
    chunk, part, wg = lax.axis_index("chunk"), lax.axis_index("part"), lax.axis_index("wg")
    count, first = count_ref[chunk], first_ref[chunk]
    rows = tiling.rows

    @pl.when(wg < tiling.warpgroups)
    def _consumer():
        plgpu.set_max_registers(232, action="increase")
        p_mine = None if p_smem is None else p_smem.at[wg]
        start = lax.rem(block_ref[chunk], blocks) * tiling.block_size + part * KEYS
        my_rows = pl.ds(wg * ROWS, ROWS)
        col_bit, my_bits = member_bits(tiling, wg, COLUMN), unit_bits(tiling, wg)

        def differentiate(slot, bits, carry):
            dk, dv, dcis = carry
            bias = None if cis_smem is None else along_rows(plgpu.load(cis_smem, layout=ROW), (KEYS, ROWS))
            x, factor = logits(multiply(k_smem, q_smem.at[slot, my_rows]), bias, tiling.head_dim)

            def cut(x):
                limit = plgpu.load(limit_smem.at[slot, my_rows], layout=COLUMN)
                key = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
                return jnp.where(key + start <= along_columns(limit, x.shape), x, -jnp.inf)

            x = lax.cond(start + (KEYS - 1) > entry_smem[slot, 2 + wg], cut, lambda x: x, x)
            if tiling.block_size % KEYS:  # rows of the next block, which its own programs sum over
                key = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
                x = jnp.where(key < tiling.block_size - part * KEYS, x, -jnp.inf)
            lse = plgpu.load(lse_smem.at[slot, my_rows], layout=COLUMN)
            p = jnp.exp2(x * factor - along_columns(jnp.where((col_bit & bits) != 0, lse, -LOWEST), x.shape))
            plgpu.barrier_wait(do_full.at[slot])
            if want_v:
                dv = multiply_into(dv, p.astype(q_smem.dtype), do_smem.at[slot, my_rows], p_mine)
            if want_k:
                dp = multiply(v_smem, do_smem.at[slot, my_rows])
                delta = plgpu.load(delta_smem.at[slot, my_rows], layout=COLUMN)
                ds = p * (dp - along_columns(delta, x.shape))
                if dcis is not None:
                    dcis += ds.sum(axis=1)
                dk = multiply_into(dk, ds.astype(q_smem.dtype), q_smem.at[slot, my_rows], p_mine)
            release(do_free.at[slot], q_free.at[slot])
            return dk, dv, dcis

        def skip(slot, bits, carry):
            plgpu.barrier_wait(do_full.at[slot])
            release(do_free.at[slot], q_free.at[slot])
            return carry

        def step_loop(j, carry):
            slot = lax.rem(j, jnp.int32(stages))
            plgpu.barrier_wait(q_full.at[slot])
            bits = entry_smem[slot, 1] & my_bits
            return lax.cond(bits != 0, partial(differentiate, slot, bits), partial(skip, slot, bits), carry)

        @pl.when(count > 0)
        def _sum():
            plgpu.barrier_wait(k_full)
            zeros = plgpu.layout_cast(jnp.zeros((KEYS, tiling.head_dim), jnp.float32), plgpu.Layout.WGMMA)
            dcis = plgpu.layout_cast(jnp.zeros((KEYS,), jnp.float32), ROW)
            has_dcis = want_k and cis_smem is not None
            init = (zeros if want_k else None, zeros if want_v else None, dcis if has_dcis else None)
            sums = lax.fori_loop(0, count, step_loop, init)
            for out, total in zip(outs, [x for x in sums if x is not None], strict=True):
                out[chunk, part, wg] = total

    @pl.when(wg == tiling.warpgroups)
    def _producer():
        plgpu.set_max_registers(40, action="decrease")

        @pl.when(count > 0)
        def _fetch_block():
            block = block_ref[chunk]
            row = lax.div(block, blocks)
            keys = pl.ds(row * keys_per_row + (block - row * blocks) * tiling.block_size + part * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem, k_full)
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem, k_full)
            if cis_smem is not None:
                plgpu.copy_gmem_to_smem(cis_ref.at[keys], cis_smem, k_full)

        @pl.loop(0, count)
        def _fetch(j):
            slot = lax.rem(j, jnp.int32(stages))
            queries = pl.ds(entry_ref[first + j, 0] * rows, rows)

            @pl.when(j >= stages)
            def _wait_for_queries():
                plgpu.barrier_wait(q_free.at[slot])

            plgpu.copy_gmem_to_smem(entry_ref.at[first + j], entry_smem.at[slot, pl.ds(0, ENTRY)], q_full.at[slot])
            for source, target in ((q_ref, q_smem), (lse_ref, lse_smem), (limit_ref, limit_smem)):
                plgpu.copy_gmem_to_smem(source.at[queries], target.at[slot], q_full.at[slot])

            @pl.when(j >= stages)
            def _wait_for_cotangents():
                plgpu.barrier_wait(do_free.at[slot])

            for source, target in ((do_ref, do_smem), (delta_ref, delta_smem)):
                plgpu.copy_gmem_to_smem(source.at[queries], target.at[slot], do_full.at[slot])

        drain((q_free, do_free), count, stages)


def _chunk_sums(
    inputs: KernelInputs,
    cotangents: QueryCotangents,
    visits: BlockVisits,
    interpret: plgpu.InterpretGPUParams | None,
    *,
    want_k: bool,
    want_v: bool,
) -> list[jax.Array]:
    """Per chunk, part of the block and warpgroup: the wanted ones of dk (before the scale), dv and dcis."""
    tiling, q, k, v, cis, limits, _ = inputs
    chunks, parts, wgs, head_dim = visits.block.shape[0], -(-tiling.block_size // KEYS), tiling.warpgroups, q.shape[1]
    stages = tiling.key_gradient_stages(KEYS)
    has_cis = cis is not None
    matrices = matrix_transforms(ROWS, head_dim)
    keys_per_row = visits.blocks * tiling.block_size
    matrix_sum = jax.ShapeDtypeStruct((chunks, parts, wgs, KEYS, head_dim), jnp.float32)
    bias_sum = jax.ShapeDtypeStruct((chunks, parts, wgs, KEYS), jnp.float32)

    def entry(*refs: Any) -> None:
        refs = refs if has_cis else (*refs[:7], None, *refs[7:])
        kernel = partial(
            _chunk_body, tiling=tiling, stages=stages, blocks=visits.blocks, keys_per_row=keys_per_row,
            want_k=want_k, want_v=want_v,
        )  # fmt: skip
        pl.run_scoped(
            lambda *scoped: kernel(refs, scoped),
            plgpu.SMEM((KEYS, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((KEYS, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((KEYS,), jnp.float32) if has_cis else None,
            plgpu.SMEM((stages, tiling.rows, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((stages, tiling.rows, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((stages, tiling.rows), jnp.float32),
            plgpu.SMEM((stages, tiling.rows), jnp.float32),
            plgpu.SMEM((stages, tiling.rows), jnp.int32),
            plgpu.SMEM((stages, 32), jnp.int32),  # an entry each, at multiples of 128 bytes
            plgpu.SMEM((wgs, KEYS, ROWS), q.dtype) if interpret is not None else None,
            plgpu.Barrier(num_arrivals=2 + has_cis),
            plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            collective_axes="wg",
        )

    kernel = plgpu.kernel(
        entry,
        out_type=[matrix_sum] * (want_k + want_v) + [bias_sum] * (want_k and has_cis),
        grid=(chunks, parts),
        grid_names=("chunk", "part"),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    tensors = (k, v, cis) if has_cis else (k, v)
    return kernel(q, *cotangents, limits, *tensors, visits.entries, visits.block, visits.first, visits.count)


def _add_chunks(
    sums: jax.Array,
    chunk_start: jax.Array,
    scale: float,
    dtype: jnp.dtype,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """[blocks, parts, KEYS, ...]: the sums [chunks, parts, warpgroups, KEYS, ...] of each block's chunks, in order."""
    _, parts, wgs, *shape = sums.shape
    blocks = chunk_start.shape[0] - 1
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else ROW

    def body(sums_ref, start_ref, out_ref):
        block, part = lax.axis_index("block"), lax.axis_index("part")

        def add(chunk, total):
            for wg in range(wgs):
                total += plgpu.load(sums_ref.at[chunk, part, wg], layout=layout, optimized=False)
            return total

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        total = lax.fori_loop(start_ref[block], start_ref[block + 1], add, zeros)
        out_ref[block, part] = (total * scale).astype(dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((blocks, parts, *shape), dtype),
        grid=(blocks, parts),
        grid_names=("block", "part"),
        interpret=interpret,
    )(sums, chunk_start)


def key_gradients(
    inputs: KernelInputs,
    cotangents: QueryCotangents,
    visits: BlockVisits,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """dk, dv [R * padded keys, H] in the dtype of k, and dcis [R * padded keys] float32 or None."""
    k, block_size, head_dim = inputs.k, inputs.tiling.block_size, inputs.tiling.head_dim
    inputs = inputs._replace(
        k=_with_tail(k, block_size),
        v=_with_tail(inputs.v, block_size),
        cis=None if inputs.cis is None else _with_tail(inputs.cis, block_size),
    )
    sums = partial(_chunk_sums, inputs, cotangents, visits, interpret)
    if head_dim <= 128:
        dk, dv, *dcis = sums(want_k=True, want_v=True)
    else:  # both sums together do not fit in registers
        dk, *dcis = sums(want_k=True, want_v=False)
        (dv,) = sums(want_k=False, want_v=True)
    dk = _add_chunks(dk, visits.chunk_start, head_dim**-0.5, k.dtype, interpret)
    dv = _add_chunks(dv, visits.chunk_start, 1.0, k.dtype, interpret)
    dk, dv = (x.reshape(x.shape[0], -1, head_dim)[:, :block_size].reshape(k.shape) for x in (dk, dv))
    if not dcis:
        return dk, dv, None
    totals = _add_chunks(dcis[0], visits.chunk_start, 1.0, dcis[0].dtype, interpret)
    return dk, dv, totals.reshape(totals.shape[0], -1)[:, :block_size].reshape(-1)


def _with_tail(x: jax.Array, block_size: int) -> jax.Array:
    """Rows behind the last block, where programs read KEYS rows from the start of a part that is smaller."""
    if block_size % KEYS == 0:
        return x
    return jnp.pad(x, ((0, KEYS), *((0, 0),) * (x.ndim - 1)))
