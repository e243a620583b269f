"""Backward kernel for the queries: a tile walks the union of its blocks again and recomputes the weights."""

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
    list_parts,
    logits,
    member_bits,
    multiply,
    multiply_into,
    release,
    unit_bits,
)
from nosa_jax.pallas_kernels.sparse_attention.tiling import ROWS, Tiling, matrix_transforms


def _body(refs: tuple[Any, ...], scoped: tuple[Any, ...], *, tiling: Tiling, stages: int) -> None:
    """One program; `refs` and `scoped` are what `query_gradient` passes and allocates."""
    q_ref, do_ref, lse_ref, delta_ref, limit_ref, k_ref, v_ref, cis_ref, ids_ref, bits_ref = refs[:10]
    count_ref, first_ref, dq_ref = refs[10:]
    q_smem, do_smem, lse_smem, delta_smem, limit_smem, k_smem, v_smem, cis_smem, ds_smem = scoped[:9]
    ids_smem, bits_smem, *barriers = scoped[9:]
    k_full, v_full, k_free, v_free, q_full, list_full = barriers
    row, tiles = lax.axis_index("row"), lax.axis_size("tile")
    tile = tiles - 1 - lax.axis_index("tile")
    wg = lax.axis_index("wg")
    listed = row * tiles + tile
    steps = count_ref[listed] * tiling.substeps
    keys_per_row = k_ref.shape[0] // lax.axis_size("row")
    step = tiling.step

    @pl.when(wg < tiling.warpgroups)
    def _consumer():
        plgpu.set_max_registers(232, action="increase")
        q_mine, do_mine = q_smem.at[wg], do_smem.at[wg]
        ds_mine = None if ds_smem is None else ds_smem.at[wg]
        my_rows = pl.ds(listed * tiling.rows + wg * ROWS, ROWS)
        for source, target in (
            (q_ref, q_mine), (do_ref, do_mine), (lse_ref, lse_smem.at[wg]), (delta_ref, delta_smem.at[wg]),
            (limit_ref, limit_smem.at[wg]),
        ):  # fmt: skip
            plgpu.copy_gmem_to_smem(source.at[my_rows], target, q_full.at[wg])
        plgpu.barrier_wait(list_full)
        plgpu.barrier_wait(q_full.at[wg])
        first_limit = first_ref[listed * tiling.warpgroups + wg]
        lse, delta, limit = (plgpu.load(x.at[wg], layout=ROW) for x in (lse_smem, delta_smem, limit_smem))
        row_bit, my_bits = member_bits(tiling, wg, ROW), unit_bits(tiling, wg)

        def differentiate(j, slot, bits, dq):
            bias = None
            if cis_smem is not None:
                bias = along_columns(plgpu.load(cis_smem.at[slot, pl.ds(0, step)], layout=COLUMN), (ROWS, step))
            x, factor = logits(multiply(q_mine, k_smem.at[slot]), bias, tiling.head_dim)
            start = ids_smem[lax.div(j, tiling.substeps)] * tiling.block_size + lax.rem(j, tiling.substeps) * step

            def cut(x):
                key = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA)
                return jnp.where(key + start <= along_rows(limit, x.shape), x, -jnp.inf)

            x = lax.cond(start + (step - 1) > first_limit, cut, lambda x: x, x)
            member = (row_bit & bits) != 0
            p = jnp.exp2(x * factor - along_rows(jnp.where(member, lse, -LOWEST), x.shape))
            plgpu.barrier_wait(v_full.at[slot])
            dp = multiply(do_mine, v_smem.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
            ds = (p * (dp - along_rows(delta, x.shape))).astype(q_smem.dtype)
            dq = multiply_into(dq, ds, k_smem.at[slot], ds_mine)
            release(k_free.at[slot])
            return dq

        def skip(j, slot, bits, dq):
            plgpu.barrier_wait(v_full.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
            plgpu.barrier_arrive(k_free.at[slot])
            return dq

        def step_loop(j, dq):
            slot = lax.rem(j, jnp.int32(stages))
            bits = bits_smem[lax.div(j, tiling.substeps)] & my_bits
            plgpu.barrier_wait(k_full.at[slot])
            return lax.cond(bits != 0, partial(differentiate, j, slot, bits), partial(skip, j, slot, bits), dq)

        dq = plgpu.layout_cast(jnp.zeros((ROWS, tiling.head_dim), jnp.float32), plgpu.Layout.WGMMA)
        dq = lax.fori_loop(0, steps, step_loop, dq)
        q_mine[...] = (dq * tiling.head_dim**-0.5).astype(q_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_mine, dq_ref.at[my_rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == tiling.warpgroups)
    def _producer():
        plgpu.set_max_registers(40, action="decrease")
        for part in list_parts(ids_smem.shape[0]):
            plgpu.copy_gmem_to_smem(ids_ref.at[listed, part], ids_smem.at[part], list_full)
            plgpu.copy_gmem_to_smem(bits_ref.at[listed, part], bits_smem.at[part], list_full)
        plgpu.barrier_wait(list_full)

        @pl.loop(0, steps)
        def _fetch(j):
            slot = lax.rem(j, jnp.int32(stages))
            start = ids_smem[lax.div(j, tiling.substeps)] * tiling.block_size + lax.rem(j, tiling.substeps) * step
            keys = pl.ds(row * keys_per_row + start, step)

            @pl.when(j >= stages)
            def _wait_until_free():
                plgpu.barrier_wait(k_free.at[slot])
                plgpu.barrier_wait(v_free.at[slot])

            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem.at[slot], k_full.at[slot])
            if cis_smem is not None:
                plgpu.copy_gmem_to_smem(cis_ref.at[keys], cis_smem.at[slot, pl.ds(0, step)], k_full.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[slot], v_full.at[slot])

        drain((k_free, v_free), steps, stages)


def query_gradient(
    inputs: KernelInputs, cotangents: QueryCotangents, interpret: plgpu.InterpretGPUParams | None
) -> jax.Array:
    """dq in the layout and dtype of q."""
    tiling, q, k, v, cis, limits, unions = inputs
    n_rows, tiles, listed = unions.ids.shape
    stages = tiling.query_gradient_stages(listed)
    wgs, step, head_dim = tiling.warpgroups, tiling.step, tiling.head_dim
    first = limits.reshape(-1, ROWS).min(axis=1)
    has_cis = cis is not None
    matrices = matrix_transforms(step, head_dim)

    def entry(*refs: Any) -> None:
        refs = refs if has_cis else (*refs[:7], None, *refs[7:])
        kernel = partial(_body, tiling=tiling, stages=stages)
        pl.run_scoped(
            lambda *scoped: kernel(refs, scoped),
            plgpu.SMEM((wgs, ROWS, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((wgs, ROWS, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((wgs, ROWS), jnp.float32),
            plgpu.SMEM((wgs, ROWS), jnp.float32),
            plgpu.SMEM((wgs, ROWS), jnp.int32),
            plgpu.SMEM((stages, step, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((stages, step, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((stages, tiling.padded_step), jnp.float32) if has_cis else None,
            plgpu.SMEM((wgs, ROWS, step), q.dtype) if interpret is not None else None,
            plgpu.SMEM((listed,), jnp.int32),
            plgpu.SMEM((listed,), jnp.int32),
            plgpu.Barrier(num_arrivals=1 + has_cis, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=5, num_barriers=wgs),
            plgpu.Barrier(num_arrivals=2 * len(list_parts(listed))),
            collective_axes="wg",
        )

    kernel = plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(n_rows, tiles),
        grid_names=("row", "tile"),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    ids, bits = (x.reshape(n_rows * tiles, listed) for x in (unions.ids, unions.bits))
    tensors = (k, v, cis) if has_cis else (k, v)
    return kernel(q, *cotangents, limits, *tensors, ids, bits, unions.counts.reshape(-1), first)
