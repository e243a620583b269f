"""Forward kernel: a tile of neighbouring queries walks the union of their selected blocks once."""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from nosa_jax.pallas_kernels.sparse_attention.layouts import KernelInputs
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
from nosa_jax.pallas_kernels.sparse_attention.tiling import LOG2E, ROWS, Tiling, matrix_transforms


def _body(refs: tuple[Any, ...], scoped: tuple[Any, ...], *, tiling: Tiling, stages: int) -> None:
    """One program; `refs` and `scoped` are what `forward` passes and allocates."""
    q_ref, k_ref, v_ref, cis_ref, ids_ref, bits_ref, count_ref, limit_ref, first_ref, out_ref, lse_ref = refs
    q_smem, k_smem, v_smem, cis_smem, p_smem, ids_smem, bits_smem, limit_smem, lse_smem = scoped[:9]
    k_full, v_full, k_free, v_free, q_full, list_full = scoped[9:]
    row, tiles = lax.axis_index("row"), lax.axis_size("tile")
    tile = tiles - 1 - lax.axis_index("tile")  # late tiles have the longest lists: first
    wg = lax.axis_index("wg")
    listed = row * tiles + tile
    steps = count_ref[listed] * tiling.substeps
    keys_per_row = k_ref.shape[0] // lax.axis_size("row")
    step, head_dim = tiling.step, tiling.head_dim

    @pl.when(wg < tiling.warpgroups)
    def _consumer():
        plgpu.set_max_registers(232 if tiling.warpgroups == 2 else 160, action="increase")
        q_mine, limit_mine, lse_mine = q_smem.at[wg], limit_smem.at[wg], lse_smem.at[wg]
        p_mine = None if p_smem is None else p_smem.at[wg]
        my_rows = pl.ds(listed * tiling.rows + wg * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[my_rows], q_mine, q_full.at[wg])
        plgpu.copy_gmem_to_smem(limit_ref.at[my_rows], limit_mine, q_full.at[wg])
        plgpu.barrier_wait(list_full)
        plgpu.barrier_wait(q_full.at[wg])
        first_limit = first_ref[listed * tiling.warpgroups + wg]
        limit = plgpu.load(limit_mine, layout=ROW)
        row_bit, my_bits = member_bits(tiling, wg, ROW), unit_bits(tiling, wg)

        def attend(j, slot, bits, carry):
            acc, top, total = carry
            bias = None
            if cis_smem is not None:
                bias = along_columns(plgpu.load(cis_smem.at[slot, pl.ds(0, step)], layout=COLUMN), (ROWS, step))
            x, factor = logits(multiply(q_mine, k_smem.at[slot]), bias, head_dim)
            if cis_smem is None:
                plgpu.barrier_arrive(k_free.at[slot])
            else:
                release(k_free.at[slot])
            start = ids_smem[lax.div(j, tiling.substeps)] * tiling.block_size + lax.rem(j, tiling.substeps) * step

            def cut(x):
                key = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA)
                return jnp.where(key + start <= along_rows(limit, x.shape), x, -jnp.inf)

            x = lax.cond(start + (step - 1) > first_limit, cut, lambda x: x, x)
            member = (row_bit & bits) != 0
            new_top = jnp.maximum(top, jnp.where(member, x.max(axis=1) * factor, LOWEST))
            alpha = jnp.exp2(top - new_top)
            p = jnp.exp2(x * factor - along_rows(jnp.where(member, new_top, -LOWEST), x.shape))
            total = total * alpha + p.sum(axis=1)
            acc *= along_rows(alpha, acc.shape)
            p16 = p.astype(q_smem.dtype)
            plgpu.barrier_wait(v_full.at[slot])
            acc = multiply_into(acc, p16, v_smem.at[slot], p_mine)
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, new_top, total

        def skip(j, slot, bits, carry):
            plgpu.barrier_arrive(k_free.at[slot])
            plgpu.barrier_wait(v_full.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
            return carry

        def step_loop(j, carry):
            slot = lax.rem(j, jnp.int32(stages))
            bits = bits_smem[lax.div(j, tiling.substeps)] & my_bits
            plgpu.barrier_wait(k_full.at[slot])
            return lax.cond(bits != 0, partial(attend, j, slot, bits), partial(skip, j, slot, bits), carry)

        acc = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)
        top = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW)
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
        acc, top, total = lax.fori_loop(0, steps, step_loop, (acc, top, total))

        seen = total > 0
        inverse = jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0)
        q_mine[...] = (acc * along_rows(inverse, acc.shape)).astype(q_smem.dtype)
        lse_mine[...] = jnp.where(seen, (top + jnp.log2(jnp.where(seen, total, 1.0))) / LOG2E, -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_mine, out_ref.at[my_rows])
        plgpu.copy_smem_to_gmem(lse_mine, lse_ref.at[my_rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == tiling.warpgroups)
    def _producer():
        plgpu.set_max_registers(40 if tiling.warpgroups == 2 else 32, action="decrease")
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
            def _wait_for_keys():
                plgpu.barrier_wait(k_free.at[slot])

            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem.at[slot], k_full.at[slot])
            if cis_smem is not None:
                plgpu.copy_gmem_to_smem(cis_ref.at[keys], cis_smem.at[slot, pl.ds(0, step)], k_full.at[slot])

            @pl.when(j >= stages)
            def _wait_for_values():
                plgpu.barrier_wait(v_free.at[slot])

            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[slot], v_full.at[slot])

        drain((k_free, v_free), steps, stages)


def forward(inputs: KernelInputs, interpret: plgpu.InterpretGPUParams | None) -> tuple[jax.Array, jax.Array]:
    """Attention of every query row over its selected blocks.

    Returns: the output in the layout and dtype of q, and the natural log of the sum of exponentials per row, float32,
      -inf where nothing is visible (the output is 0 there).
    """
    tiling, q, k, v, cis, limits, unions = inputs
    n_rows, tiles, listed = unions.ids.shape
    stages = tiling.forward_stages(listed)
    wgs, step, head_dim = tiling.warpgroups, tiling.step, tiling.head_dim
    first = limits.reshape(-1, ROWS).min(axis=1)
    has_cis = cis is not None
    matrices = matrix_transforms(step, head_dim)

    def entry(*refs: Any) -> None:
        kernel = partial(_body, tiling=tiling, stages=stages)
        refs = refs if has_cis else (*refs[:3], None, *refs[3:])
        pl.run_scoped(
            lambda *scoped: kernel(refs, scoped),
            plgpu.SMEM((wgs, ROWS, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((stages, step, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((stages, step, head_dim), q.dtype, transforms=matrices),
            plgpu.SMEM((stages, tiling.padded_step), jnp.float32) if has_cis else None,
            plgpu.SMEM((wgs, ROWS, step), q.dtype) if interpret is not None else None,
            plgpu.SMEM((listed,), jnp.int32),
            plgpu.SMEM((listed,), jnp.int32),
            plgpu.SMEM((wgs, ROWS), jnp.int32),
            plgpu.SMEM((wgs, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + has_cis, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=wgs),
            plgpu.Barrier(num_arrivals=2 * len(list_parts(listed))),
            collective_axes="wg",
        )

    kernel = plgpu.kernel(
        entry,
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:1], jnp.float32)),
        grid=(n_rows, tiles),
        grid_names=("row", "tile"),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    ids, bits = (x.reshape(n_rows * tiles, listed) for x in (unions.ids, unions.bits))
    tensors = (q, k, v, cis) if has_cis else (q, k, v)
    return kernel(*tensors, ids, bits, unions.counts.reshape(-1), limits, first)
