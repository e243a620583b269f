"""The kernel of decode attention: one program for each row, KV head and part of its list of blocks.

One program (one warpgroup) takes one row, one KV head and a contiguous part of its list of blocks ("split"). It
copies keys, values and biases into shared memory a tile of 64 tokens at a time, some tiles ahead of the one it works
on, and keeps an online softmax over the query heads of the group. Entries that are padding, or that hold no visible
token, cost neither a copy nor arithmetic. The splits of a row are merged afterwards, always in the same order.

Blocks may still be in host memory when the kernel begins: its first programs then copy them (`mosaic_arrivals.py`). A
program that comes to such a block goes on copying those behind it, and waits only to attend to it. What is computed,
and in which order, is the same.

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

from nosa_jax.pallas_kernels.decode_attention.mosaic_arrivals import (
    COPIERS,
    Order,
    copy_pieces,
    page_is_there,
    pieces_of,
    wait_for_page,
)
from nosa_jax.pallas_kernels.decode_attention.plan import FLOOR, ROWS, TILE, Plan

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA


class Arriving(NamedTuple):
    """Blocks on their way, as `nosa_jax.ffi.list_blocks` gives them."""

    late: jax.Array
    arrived: jax.Array
    pages: jax.Array
    n_pages: jax.Array


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
    arriving: Arriving | None,
    plan: Plan,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Splits, jax.Array]:
    """Run the kernel.

    Args:
      q: rows of query heads, padded per KV head, and at least as many as a wgmma has.
      arriving: blocks to be copied into their slots meanwhile; its `late` is padded as the lists are.

    Returns: the splits, and the slots, with every block in its own.
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

    page_bytes = 2 * block * head_dim * dtype.itemsize
    copiers = 0 if arriving is None else COPIERS
    rows = slots.reshape(-1, head_dim)
    biases = None if cis is None else cis.reshape(-1, TILE)
    bias_rows = 0 if biases is None else biases.shape[0] // (batch * n_kv)
    arrays: dict[str, Any] = {"q": q, "bias": biases}
    arrays |= {"slot": slot_ids.reshape(-1), "block": block_ids.reshape(-1), "length": lengths}
    if arriving is None:
        arrays["kv"] = rows
    else:
        arrays |= {"late": arriving.late.reshape(-1), "pages": arriving.pages, "n_pages": arriving.n_pages}
        arrays |= {"kv": jax.new_ref(rows), "arrived": jax.new_ref(arriving.arrived.reshape(-1))}  # updated in place
    arrays = {name: array for name, array in arrays.items() if array is not None}

    def decode_attention_splits(*refs):
        *inputs, out_ref, lse_ref = refs
        named = dict(zip(arrays, inputs, strict=True))
        q_ref, kv_ref, bias_ref = named["q"], named["kv"], named.get("bias")
        slot_ref, block_ref, length_ref = named["slot"], named["block"], named["length"]
        late_ref, arrived_ref = named.get("late"), named.get("arrived")
        if copiers:
            program = lax.axis_index("program")
            number = program - copiers
            pair, split = lax.div(number, jnp.int32(plan.splits)), lax.rem(number, jnp.int32(plan.splits))
        else:
            pair, split = lax.axis_index("pair"), lax.axis_index("split")

        def attend_split():
            length = length_ref[lax.div(pair, jnp.int32(n_kv))]
            blocks = lax.div(length + (block - 1), jnp.int32(block))
            begin = split * plan.entries
            steps = lax.div(jnp.minimum(plan.entries, n_entries - begin) * parts, jnp.int32(pieces))
            first_row = jnp.minimum(pair * plan.rows, q.shape[0] - ROWS)  # 64 rows that exist, the group's among them

            def ids_of(step):
                """(slot, block, late) of each piece of a tile; of the last tile where the step is past it."""
                first = jnp.minimum(step, steps - 1) * pieces
                at = [pair * n_entries + begin + lax.div(first + i, jnp.int32(parts)) for i in range(pieces)]
                nothing = jnp.int32(0)
                return tuple((slot_ref[a], block_ref[a], nothing if late_ref is None else late_ref[a]) for a in at)

            def part_of(step, i):
                return lax.rem(step * pieces + i, jnp.int32(parts))

            def seen_of(step, ids):
                """Visible tokens of each piece, at most 0 if there are none; more than a piece if all are."""
                seen = [length - block_id * block - part_of(step, i) * piece for i, (_, block_id, _) in enumerate(ids)]
                # Compared as a block, since the first token of a very large id overflows.
                there = step < steps
                exists = [(slot >= 0) & (block_id >= 0) & (block_id < blocks) & there for slot, block_id, _ in ids]
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
                def copy(step, i, slot):
                    """Begin the copy of a piece's keys and values."""
                    stage, to = lax.rem(step, jnp.int32(stages)), pl.ds(i * piece, piece)
                    row = (pair * n_slots + slot) * (2 * block) + part_of(step, i) * piece
                    keys, values = kv_ref.at[pl.ds(row, piece)], kv_ref.at[pl.ds(row + block, piece)]
                    plgpu.copy_gmem_to_smem(keys, k_smem.at[stage, to], barriers.at[stage])
                    plgpu.copy_gmem_to_smem(values, v_smem.at[stage, to], barriers.at[stage])

                def arrivals_of(slot):
                    assert arrived_ref is not None
                    return arrived_ref.at[pl.ds(pair * n_slots + slot, 1)], pieces_of(page_bytes)

                def fetch(step, ids, seen):
                    """Begin the copies of a tile's pieces, but not of those that are not there yet; these are returned.

                    Returns: per piece its slot + 1 if it has to be waited for, else 0.
                    """
                    stage = lax.rem(step, jnp.int32(stages))
                    barrier, nothing = barriers.at[stage], jnp.int32(0)

                    def skip():
                        plgpu.barrier_arrive(barrier)
                        plgpu.barrier_arrive(barrier)
                        return nothing

                    def begin_piece(i, slot, late):
                        def now():
                            copy(step, i, slot)
                            return nothing

                        if arrived_ref is None:
                            return now()
                        there = lax.cond(late != 0, lambda: page_is_there(*arrivals_of(slot)), lambda: jnp.bool(True))
                        return lax.cond(there, now, lambda: slot + 1)

                    def tile():
                        if bias_ref is not None:
                            place = begin * parts // pieces + step if by_list else ids[0][1] * parts + part_of(step, 0)
                            plgpu.copy_gmem_to_smem(bias_ref.at[pair * bias_rows + place], bias_smem.at[stage], barrier)
                        if pieces == 1:
                            return (begin_piece(0, *ids[0][::2]),)
                        return tuple(
                            lax.cond(seen[i] > 0, partial(begin_piece, i, slot, late), skip)
                            for i, (slot, _, late) in enumerate(ids)
                        )

                    return lax.cond(any_of([s > 0 for s in seen]), tile, lambda: (nothing,) * pieces)

                def left(value, i):
                    """An array as the left operand of the i-th product."""
                    if from_registers:
                        return value
                    left_smem[i][...] = value
                    plgpu.commit_smem()
                    return left_smem[i]

                def attend(step, seen, awaited, carry):
                    acc, top, total = carry
                    stage = lax.rem(step, jnp.int32(stages))
                    for i, awaited_slot in enumerate(awaited if copiers else ()):

                        def late_copy(i=i, slot=awaited_slot - 1):
                            wait_for_page(*arrivals_of(slot))
                            copy(step, i, slot)

                        pl.when(awaited_slot > 0)(late_copy)
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
                    state, tiles, ids = carry
                    tiles = (*tiles, begin_tile(step + (stages - 1), ids))
                    ids = ids_of(step + stages)  # a step early: nobody waits for them
                    seen, awaited = tiles[0]
                    state = lax.cond(
                        any_of([s > 0 for s in seen]), lambda s: attend(step, seen, awaited, s), lambda s: s, state
                    )
                    return state, tiles[1:], ids

                def begin_tile(step, ids):
                    """(what `seen_of`, what `fetch` returns) of a tile."""
                    seen = seen_of(step, ids)
                    return seen, fetch(step, ids, seen)

                ahead = [(step, ids_of(step)) for step in map(jnp.int32, range(stages - 1))]
                tiles = tuple(begin_tile(step, ids) for step, ids in ahead)
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
                (acc, top, total), _, _ = lax.fori_loop(0, steps, step_of, (start, tiles, ids))
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

        if copiers:
            pl.when(program >= copiers)(attend_split)
            order = Order(n_slots, plan.splits, plan.entries)
            copy = partial(copy_pieces, named["pages"], named["n_pages"], kv_ref, arrived_ref, page_bytes, order)
            pl.when(program < copiers)(copy)
        else:
            attend_split()

    n_programs = batch * n_kv * plan.splits
    run = plgpu.kernel(
        decode_attention_splits,
        out_type=(
            jax.ShapeDtypeStruct((n_programs * plan.rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((n_programs, plan.rows), jnp.float32),
        ),
        grid=(copiers + n_programs,) if copiers else (batch * n_kv, plan.splits),
        grid_names=("program",) if copiers else ("pair", "split"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    splits = Splits(*run(*arrays.values()))
    return splits, slots if arriving is None else jax.freeze(arrays["kv"]).reshape(slots.shape)


def _swizzled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> object:
    """Shared memory as wgmma reads it, and free of bank conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
