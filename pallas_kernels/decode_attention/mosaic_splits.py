"""The kernel of decode attention: one program for each row, KV head and part of its list of blocks.

One program (one warpgroup) takes one row, one KV head and a contiguous part of its list of blocks ("split"). It
copies keys, values and biases into shared memory a tile of 64 tokens at a time, some tiles ahead of the one it works
on, and keeps an online softmax over the query heads of the group. Entries that are padding, or that hold no visible
token, cost neither a copy nor arithmetic. The splits of a row are merged afterwards, always in the same order.

The work is bound by the bytes of the selected blocks: the 64 rows of a wgmma hold the few query heads of one group
and are mostly empty, which leaves the tensor cores far from busy.
"""

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels.decode_attention.plan import FLOOR, ROWS, TILE, Plan

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA


class Splits(NamedTuple):
    """Attention over each split: out [B*K*splits*rows, H] and lse [B*K*splits, rows], float32, as `merge.Partial`."""

    out: jax.Array
    lse: jax.Array


# Compiled as a function of its own: its calls in one program, one for each layer, then share one compiled kernel.
@partial(jax.jit, static_argnames=("plan", "interpret"))
def attend_splits(
    q: jax.Array,  # [rows, H]
    slots: jax.Array,
    cis: jax.Array | None,
    slot_ids: jax.Array,
    block_ids: jax.Array,
    lengths: jax.Array,
    late: jax.Array | None,
    early: Splits | None,
    plan: Plan,
    interpret: plgpu.InterpretGPUParams | None,
) -> Splits:
    """Run the kernel.

    Args:
      q: rows of query heads, padded per KV head, and at least as many as a wgmma has.
      late: [B, K, splits * entries], 1 for entries whose slot is being filled; None if there are none.
      early: what this function gave for the same `late` before the slots were filled, to be completed now; None
        to compute the splits without late entries, and leave the others undefined. Without `late`, all are computed.
    """
    batch, n_kv, n_slots, _, block, head_dim = slots.shape
    n_entries, dtype, stages = slot_ids.shape[2], slots.dtype, plan.stages
    piece = math.gcd(block, TILE)  # tokens of one copy
    pieces, parts = TILE // piece, block // piece  # of a tile, of a block
    by_list = plan.align > 1  # cis is in the order of the list
    columns = next((c for c in (128, 64) if head_dim % c == 0), head_dim)  # of the output, multiplied at a time
    # Registers are the faster left operand of a product. But the interpreter takes it from shared memory only, and
    # where both products have 64 columns, what JAX 0.11.2 makes of registers is wrong from the second step on (seen on
    # an H200 with heads of 64; with heads of 128 it is right).
    from_registers = interpret is None and columns != TILE

    arrays = [q, slots.reshape(-1, head_dim)]
    if cis is not None:
        arrays.append(cis.reshape(-1, TILE))
        bias_rows = arrays[-1].shape[0] // (batch * n_kv)
    arrays += [slot_ids.reshape(-1), block_ids.reshape(-1), lengths]
    if late is not None:
        arrays.append(late.reshape(-1))

    def decode_attention_splits(q_ref, kv_ref, *refs):
        bias_ref = refs[0] if cis is not None else None
        late_ref = refs[-3] if late is not None else None
        slot_ref, block_ref, length_ref = refs[cis is not None :][:3]
        out_ref, lse_ref = refs[-2:]
        pair, split = lax.axis_index("pair"), lax.axis_index("split")

        def attend_split():
            length = length_ref[lax.div(pair, jnp.int32(n_kv))]
            blocks = lax.div(length + (block - 1), jnp.int32(block))
            begin = split * plan.entries
            steps = lax.div(jnp.minimum(plan.entries, n_entries - begin) * parts, jnp.int32(pieces))
            first_row = jnp.minimum(pair * plan.rows, q.shape[0] - ROWS)  # 64 rows that exist, the group's among them

            def ids_of(step):
                """(slot, block) of each piece of a tile; of the last tile where the step is past it."""
                first = jnp.minimum(step, steps - 1) * pieces
                at = [pair * n_entries + begin + lax.div(first + i, jnp.int32(parts)) for i in range(pieces)]
                return tuple((slot_ref[a], block_ref[a]) for a in at)

            def part_of(step, i):
                return lax.rem(step * pieces + i, jnp.int32(parts))

            def seen_of(step, ids):
                """Visible tokens of each piece, at most 0 if there are none; more than a piece if all are."""
                seen = [length - block_id * block - part_of(step, i) * piece for i, (_, block_id) in enumerate(ids)]
                # Compared as a block, since the first token of a very large id overflows.
                there = step < steps
                exists = [(slot >= 0) & (block_id >= 0) & (block_id < blocks) & there for slot, block_id in ids]
                return tuple(jnp.where(e, s, 0) for e, s in zip(exists, seen, strict=True))

            def any_of(conditions):
                return reduce(jnp.logical_or, conditions)

            def visible(seen, shape, axis):
                """Which tokens along an axis of a tile are visible."""
                token = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)
                if pieces == 1:
                    return token < seen[0]
                ends = [i * piece + jnp.minimum(s, piece) for i, s in enumerate(seen)]
                return any_of([(token >= i * piece) & (token < end) for i, end in enumerate(ends)])

            def scope(k_smem, v_smem, bias_smem, left_smem, barriers):
                def fetch(step, ids, seen):
                    stage = lax.rem(step, jnp.int32(stages))
                    barrier = barriers.at[stage]

                    @pl.when(any_of([s > 0 for s in seen]))
                    def _():
                        for i, (slot, _) in enumerate(ids):
                            to = pl.ds(i * piece, piece)

                            def copy(slot=slot, to=to, i=i):
                                row = (pair * n_slots + slot) * (2 * block) + part_of(step, i) * piece
                                keys, values = kv_ref.at[pl.ds(row, piece)], kv_ref.at[pl.ds(row + block, piece)]
                                plgpu.copy_gmem_to_smem(keys, k_smem.at[stage, to], barrier)
                                plgpu.copy_gmem_to_smem(values, v_smem.at[stage, to], barrier)

                            def skip():
                                plgpu.barrier_arrive(barrier)
                                plgpu.barrier_arrive(barrier)

                            if pieces == 1:
                                copy()
                            else:
                                pl.when(seen[i] > 0)(copy)
                                pl.when(seen[i] <= 0)(skip)
                        if bias_ref is not None:
                            place = begin * parts // pieces + step if by_list else ids[0][1] * parts + part_of(step, 0)
                            plgpu.copy_gmem_to_smem(bias_ref.at[pair * bias_rows + place], bias_smem.at[stage], barrier)

                def left(value, i):
                    """An array as the left operand of the i-th product."""
                    if from_registers:
                        return value
                    left_smem[i][...] = value
                    plgpu.commit_smem()
                    return left_smem[i]

                def attend(step, seen, carry):
                    acc, top, total = carry
                    stage = lax.rem(step, jnp.int32(stages))
                    plgpu.barrier_wait(barriers.at[stage])

                    def scores(acc_ref):
                        plgpu.wgmma(acc_ref, queries, k_smem.at[stage].transpose((1, 0)))
                        return acc_ref[...]

                    logits = pl.run_scoped(scores, plgpu.ACC((ROWS, TILE), jnp.float32))
                    logits = logits * (LOG2E / math.sqrt(head_dim))
                    if bias_smem is not None:
                        bias = plgpu.load(bias_smem.at[stage], layout=WGMMA.reduce(0), optimized=False)
                        logits = logits + lax.broadcast_in_dim(bias * LOG2E, logits.shape, [1])
                    logits = jnp.where(visible(seen, logits.shape, 1), logits, FLOOR)
                    new_top = jnp.maximum(top, logits.max(axis=1))
                    decay = jnp.exp2(top - new_top)
                    weights = jnp.exp2(logits - lax.broadcast_in_dim(new_top, logits.shape, [0]))
                    total = total * decay + weights.sum(axis=1)

                    @pl.when(any_of([s < piece for s in seen]))
                    def _():  # what follows a row's last token may be NaN, and 0 * NaN would spread
                        values = v_smem.at[stage]
                        loaded = plgpu.load(values, layout=WGMMA, optimized=False)
                        values[...] = jnp.where(visible(seen, loaded.shape, 0), loaded, jnp.zeros_like(loaded))
                        plgpu.commit_smem()

                    weights = left(weights.astype(dtype), 1)

                    def weighted(chunk):
                        def product(acc_ref):
                            plgpu.wgmma(acc_ref, weights, v_smem.at[stage, :, pl.ds(chunk * columns, columns)])
                            return acc_ref[...]

                        return pl.run_scoped(product, plgpu.ACC((ROWS, columns), jnp.float32))

                    acc = tuple(a * lax.broadcast_in_dim(decay, a.shape, [0]) + weighted(i) for i, a in enumerate(acc))
                    return acc, new_top, total

                def step_of(step, carry):
                    state, seens, ids = carry
                    ahead = step + (stages - 1)
                    seens = (*seens, seen_of(ahead, ids))
                    fetch(ahead, ids, seens[-1])
                    ids = ids_of(ahead + 1)  # a step early: nobody waits for them
                    seen = seens[0]
                    state = lax.cond(any_of([s > 0 for s in seen]), lambda s: attend(step, seen, s), lambda s: s, state)
                    return state, seens[1:], ids

                ahead = [(step, ids_of(step)) for step in map(jnp.int32, range(stages - 1))]
                seens = tuple(seen_of(step, ids) for step, ids in ahead)
                for (step, ids), seen in zip(ahead, seens, strict=True):
                    fetch(step, ids, seen)
                ids = ids_of(jnp.int32(stages - 1))
                queries = left(plgpu.load(q_ref.at[pl.ds(first_row, ROWS)], layout=WGMMA, optimized=False), 0)
                start = (
                    tuple(
                        plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), WGMMA)
                        for _ in range(head_dim // columns)
                    ),
                    plgpu.layout_cast(jnp.full((ROWS,), FLOOR, jnp.float32), WGMMA.reduce(1)),
                    plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), WGMMA.reduce(1)),
                )
                (acc, top, total), _, _ = lax.fori_loop(0, steps, step_of, (start, seens, ids))
                safe = jnp.where(total == 0, 1.0, total)
                acc = tuple(a / lax.broadcast_in_dim(safe, a.shape, [0]) for a in acc)
                return acc, jnp.where(total == 0, -jnp.inf, (top + jnp.log2(safe)) / LOG2E)

            acc, lse = pl.run_scoped(
                scope,
                k_smem=_swizzled((stages, TILE, head_dim), dtype),
                v_smem=_swizzled((stages, TILE, head_dim), dtype),
                bias_smem=None if cis is None else plgpu.SMEM((stages, TILE), jnp.float32),
                left_smem=None if from_registers else [_swizzled((ROWS, n), dtype) for n in (head_dim, TILE)],
                barriers=plgpu.Barrier(num_arrivals=2 * pieces + (cis is not None), num_barriers=stages),
            )

            def store(out_smem, lse_smem):
                for i, a in enumerate(acc):
                    out_smem[:, pl.ds(i * columns, columns)] = a
                lse_smem[...] = lse
                plgpu.commit_smem()
                at = pair * plan.splits + split
                group = pl.ds(pair * plan.rows - first_row, plan.rows)
                plgpu.copy_smem_to_gmem(out_smem.at[group], out_ref.at[pl.ds(at * plan.rows, plan.rows)])
                plgpu.copy_smem_to_gmem(lse_smem.at[group], lse_ref.at[at])
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(store, _swizzled((ROWS, head_dim), jnp.float32), plgpu.SMEM((ROWS,), jnp.float32))

        if late is None:
            attend_split()
        else:
            pl.when(_any_late(late_ref, pair * plan.splits + split, plan.entries) == (early is not None))(attend_split)

    n_programs = batch * n_kv * plan.splits
    results = (
        jax.ShapeDtypeStruct((n_programs * plan.rows, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((n_programs, plan.rows), jnp.float32),
    )
    run = plgpu.kernel(
        decode_attention_splits,
        out_type=results if early is None else (),
        grid=(batch * n_kv, plan.splits),
        grid_names=("pair", "split"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    if early is None:
        return Splits(*run(*arrays))
    out, lse = jax.new_ref(early.out), jax.new_ref(early.lse)  # updated in place
    run(*arrays, out, lse)
    return Splits(jax.freeze(out), jax.freeze(lse))


def _any_late(late_ref: Any, program: jax.Array, entries: int) -> jax.Array:
    """Whether an entry of a program's split is late; 16 flags are asked for at a time."""

    def look(step: jax.Array, found: jax.Array) -> jax.Array:
        first = program * entries + step * 16
        return reduce(jnp.bitwise_or, [late_ref[first + i] for i in range(16)], found)

    found = lax.fori_loop(0, entries // 16, look, jnp.int32(0))
    rest = range(entries // 16 * 16, entries)
    return reduce(jnp.bitwise_or, [late_ref[program * entries + i] for i in rest], found) != 0


def _swizzled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> object:
    """Shared memory as wgmma reads it, and free of bank conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
