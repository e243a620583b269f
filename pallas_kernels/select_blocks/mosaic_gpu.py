"""Dual block selection as a Mosaic GPU kernel: one warpgroup per query and KV head, scores read once.

The blocks of a row lie in registers, at first in a line, at last as [64 chunks, blocks / 64]. Three steps, whose cost
does not grow with the budget:

1. Scores become integers of the same order (NaN below -inf, -0 equal to +0), so that every comparison is exact.
2. The k best: a search over the integers for a threshold that k of them reach. Two or three candidates are counted at
   once, in the fields of one integer, which one instruction adds up over a warp. It ends as soon as a count fits; where
   equal scores straddle the budget, a second search finds the index up to which they are taken.
3. Ascending ids: slot j of the result lies in the chunk whose running count passes j. A product with a 0/1 matrix hands
   the slot that chunk's running counts, and the position is how many of those do not pass j.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels.select_blocks.reference import NO_BLOCK

SLOTS = 64  # slots of the result per product: the rows of one wgmma
DEPTH = 16  # the depth of one wgmma, of which the length of a chunk is a multiple
COPY = 16  # chunks per copy
ROWS = 8  # TMA reads tiles of eight rows
SHORT = 1024  # rows of no more blocks are read whole, before it is known how many of their blocks exist
WIDE = 8192  # rows of more blocks come as 128 chunks and share one buffer for both kinds of score
MAX_BLOCKS = 16_384
NOT_A_CANDIDATE = -(2**31)
# A row of blocks over all threads, four side by side in each. Unlike in the layout of wgmma, a sum over the lanes of a
# warp is then one instruction.
FLAT = plgpu.Layout.TILED(Tiling(((512,), (128,), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)


def unsupported(score_q: jax.Array, score_e: jax.Array, *, slots: int) -> str | None:
    """Why the kernel does not take these scores for a selection of `slots` blocks, or None if it does."""
    if not (score_q.size and slots):
        return f"scores of shape {score_q.shape} and a budget of {slots} leave nothing to select"
    if score_q.shape[-1] > MAX_BLOCKS:
        return f"{score_q.shape[-1]} blocks exceed its limit of {MAX_BLOCKS}"
    for name, scores in (("score_q", score_q), ("score_e", score_e)):
        if scores.dtype != jnp.float32:
            return f"{name} is {scores.dtype}; the kernel compares float32"
    return None


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _per_row(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [0])


def _per_column(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [1])


# The interpreter knows no references with another shape, the compiler no arrays.
def _load_line(ref: Any, interpreted: bool) -> jax.Array:
    size = math.prod(ref.shape)
    return ref[...].reshape(size) if interpreted else plgpu.load(ref.reshape(size), layout=FLAT, optimized=False)


def _store_line(ref: Any, values: jax.Array, interpreted: bool) -> None:
    if interpreted:
        ref[...] = values.reshape(ref.shape)
    else:
        ref.reshape(values.shape)[...] = values


def ordered(scores: jax.Array) -> jax.Array:
    """Integers that compare as the scores do: -inf below all numbers, NaN below that, -0 equal to +0."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    magnitude = bits & 0x7FFF_FFFF
    keys = jnp.where(bits < 0, -magnitude, bits)
    return jnp.where(magnitude > 0x7F80_0000, NOT_A_CANDIDATE + 1, keys)


def best(keys: jax.Array, index: jax.Array, candidates: jax.Array, count: int) -> jax.Array:
    """Mask of the `count` largest keys, equal ones by lower index, or of all candidates when there are fewer.

    Args:
      keys: NOT_A_CANDIDATE, or more. index: of each key. candidates: how many keys are candidates.
    """
    n_blocks = keys.size
    few = candidates <= count
    lowest = -jnp.where(keys > NOT_A_CANDIDATE, -keys, NOT_A_CANDIDATE + 1).max()
    highest = keys.max()
    # Thresholds lie above the lowest candidate, so that at most n_blocks - 1 keys reach one: a count fits its field.
    bits = (n_blocks - 1).bit_length()
    thresholds = 31 // max(bits, 10)

    # n_low keys reach `low`, at least `count`; n_high < count keys reach `high`.
    def narrow(state: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        low, high, n_low, n_high = state
        part = jnp.maximum(lax.div((high >> 1) - (low >> 1), jnp.int32(thresholds + 1)) * 2, 1)
        tried = [jnp.minimum(low + part * (i + 1), high - 1) for i in range(thresholds)]
        fields = [jnp.where(keys >= threshold, 1 << bits * i, 0) for i, threshold in enumerate(tried)]
        counts = functools.reduce(jnp.add, fields).sum()
        for i, threshold in enumerate(tried):  # they ascend
            n = (counts >> bits * i) & ((1 << bits) - 1)
            low, n_low = jnp.where(n >= count, threshold, low), jnp.where(n >= count, n, n_low)
        for i, threshold in reversed(list(enumerate(tried))):
            n = (counts >> bits * i) & ((1 << bits) - 1)
            high, n_high = jnp.where(n < count, threshold, high), jnp.where(n < count, n, n_high)
        return low, high, n_low, n_high

    def unsettled(state: tuple[Any, Any, Any, Any]) -> jax.Array:
        low, high, n_low, _ = state
        return (n_low > count) & (high - 1 > low)

    low, _, n_low, n_high = lax.while_loop(unsettled, narrow, (lowest, highest + 1, candidates, jnp.int32(0)))

    # Where more keys equal the threshold than the budget has room for, take those below an index.
    tied = jnp.logical_not(few) & (n_low > count)
    room = count - n_high

    def halve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        below, above = state
        middle = (below + above) >> 1
        enough = jnp.where((keys == low) & (index < middle), 1, 0).sum() >= room
        return jnp.where(enough, below, middle), jnp.where(enough, middle, above)

    start = (jnp.where(tied, 0, n_blocks - 1).astype(jnp.int32), jnp.int32(n_blocks))
    _, bound = lax.while_loop(lambda state: state[1] - state[0] > 1, halve, start)
    return ((keys > low) | ((keys == low) & (index < bound))) & (keys > NOT_A_CANDIDATE)


def _multiply(a: Any, b: Any) -> jax.Array:
    """a @ b.T of references."""

    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def write_ids(chosen: jax.Array, write: Callable[[int, jax.Array], None], slots: int, mask_smem: Any, prefix_smem: Any,
              triangle_smem: Any, pick_smem: Any, counts_smem: Any) -> None:  # fmt: skip
    """Call `write(first, ids)` with the ascending ids of the True entries for each 64 of `slots` slots.

    Args:
      triangle_smem: 1 on and below the diagonal, 0 above.
    """
    chunks, length = chosen.shape
    square, picks = (chunks, chunks), (SLOTS, chunks)
    ones = jnp.where(chosen, 1.0, 0.0)
    mask_smem[...] = ones.astype(jnp.bfloat16)
    counts_smem[...] = ones.sum(axis=1)
    plgpu.commit_smem()
    # Running counts within each chunk, at most 128: exact in bfloat16. [length, chunks]
    prefix_smem[...] = _multiply(triangle_smem, mask_smem).astype(jnp.bfloat16)
    counts = _per_column(plgpu.load(counts_smem, layout=COLUMN, optimized=False), square)
    counts_smem[...] = jnp.where(_iota(square, 1) <= _iota(square, 0), counts, 0.0).sum(axis=1)
    ends = _per_column(plgpu.load(counts_smem, layout=COLUMN, optimized=False), picks)
    for first in range(0, slots, SLOTS):
        slot = plgpu.broadcasted_iota(jnp.int32, (SLOTS,), 0, layout=ROW) + first
        passed = ends <= _per_row(slot.astype(jnp.float32), picks)
        home = jnp.where(passed, 1, 0).sum(axis=1)
        offset = slot.astype(jnp.float32) - jnp.where(passed, ends, 0.0).max(axis=1)
        pick = _iota(picks, 1) == _per_row(home, picks)
        pick_smem[...] = jnp.where(pick, 1.0, 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()
        running = _multiply(pick_smem, prefix_smem.at[pl.ds(0, length)])
        position = jnp.where(running <= _per_row(offset, (SLOTS, length)), 1, 0).sum(axis=1)
        write(first, jnp.where(home < chunks, home * length + position, NO_BLOCK))


def _select_kernel(score_q_ref: Any, score_e_ref: Any, positions_ref: Any, ids_ref: Any, scores_smem: Any,
                   mask_smem: Any, prefix_smem: Any, triangle_smem: Any, pick_smem: Any, counts_smem: Any,
                   barriers: Any, *, n_blocks: int, n_kv: int, queries: int, queries_e: int, block_size: int,
                   sink: int, local: int, query: int, evict: int, interpreted: bool) -> None:  # fmt: skip
    """The selected ids of one query and KV head."""
    program = lax.axis_index("program")
    row, kv = lax.div(program, jnp.int32(n_kv)), lax.rem(program, jnp.int32(n_kv))
    row_e = lax.div(row, jnp.int32(queries)) if queries_e == 1 else row
    buffers, *shape = scores_smem.shape
    shape, size = tuple(shape), math.prod(shape)
    part_chunks = shape[0] if n_blocks <= SHORT else COPY
    most_copies = shape[0] // part_chunks
    sources = [
        (ref, source_row, count)
        for ref, source_row, count in ((score_q_ref, program, query), (score_e_ref, row_e * n_kv + kv, evict))
        if count
    ]

    def fetch(which: int, copies: jax.Array | int) -> None:
        ref, source_row, _ = sources[which]

        def copy(part: jax.Array | int, _: None) -> None:
            chunks = pl.ds(part * part_chunks, part_chunks)
            plgpu.copy_gmem_to_smem(
                ref.at[source_row, chunks],
                scores_smem.at[which % buffers, chunks],
                barriers.at[which * most_copies + part],
            )

        lax.fori_loop(0, copies, copy, None)

    position = positions_ref[row]
    current = jnp.where(position < 0, -1, jnp.minimum(lax.div(position, jnp.int32(block_size)), n_blocks - 1))
    # Blocks after the current one are not read, where they are many.
    copies = 1 if most_copies == 1 else lax.div(current, jnp.int32(part_chunks * shape[1])) + 1
    for which in range(min(buffers, len(sources))):
        fetch(which, copies)
    triangle = triangle_smem.shape
    triangle_smem[...] = jnp.where(_iota(triangle, 1) <= _iota(triangle, 0), 1.0, 0.0).astype(jnp.bfloat16)
    index = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=FLAT)
    exists = index <= current
    chosen = exists & ((index < sink) | (index > current - local))
    candidates = jnp.maximum(current + 1 - (sink + local), 0)
    for which, (_, _, count) in enumerate(sources):
        if which >= buffers:
            fetch(which, copies)

        def landed(part: jax.Array | int, _: None, which: int = which) -> None:
            plgpu.barrier_wait(barriers.at[which * most_copies + part])

        lax.fori_loop(0, copies, landed, None)
        scores = _load_line(scores_smem.at[which % buffers], interpreted)
        keys = jnp.where(chosen, NOT_A_CANDIDATE, jnp.where(exists, ordered(scores), NOT_A_CANDIDATE))
        chosen = chosen | best(keys, index, candidates, count)
        candidates = jnp.maximum(candidates - count, 0)

    # By way of shared memory into the layout of wgmma.
    _store_line(scores_smem.at[0], jnp.where(chosen, 1.0, 0.0), interpreted)
    chosen = plgpu.load(scores_smem.at[0], layout=plgpu.Layout.WGMMA, optimized=False) > 0

    def write(first: int, ids: jax.Array) -> None:
        ids_ref[program, pl.ds(first, SLOTS)] = ids

    write_ids(chosen, write, ids_ref.shape[1], mask_smem, prefix_smem, triangle_smem, pick_smem, counts_smem)


def _operand(rows: int, columns: int) -> Any:
    swizzle = next(s for s in (128, 64, 32) if columns % (s // 2) == 0)
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM((rows, columns), jnp.bfloat16, transforms=transforms)


@functools.partial(jax.jit, static_argnames=("block_size", "sink", "local", "query", "evict", "interpret"))
def select_blocks(
    score_q: jax.Array,
    score_e: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    sink: int,
    local: int,
    query: int,
    evict: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Selected block ids, ascending: int32 [B, T, K, C]; equal to the reference, id for id.

    Jitted, so that many layers compile one kernel.
    """
    batch, queries, n_kv, n_blocks = score_q.shape
    chunks = SLOTS if n_blocks <= WIDE else 2 * SLOTS
    length = pl.cdiv(n_blocks, chunks * DEPTH) * DEPTH
    rounded = pl.cdiv(length, SLOTS) * SLOTS

    def chunked(scores: jax.Array) -> jax.Array:
        missing = -n_blocks % (ROWS * length)
        if missing:
            scores = jnp.pad(scores, ((0, 0),) * 3 + ((0, missing),))
        return scores.reshape(-1, (n_blocks + missing) // length, length)

    total = sink + local + query + evict
    slots = pl.cdiv(total, SLOTS) * SLOTS
    ids = plgpu.kernel(
        functools.partial(
            _select_kernel,
            n_blocks=n_blocks,
            n_kv=n_kv,
            queries=queries,
            queries_e=score_e.shape[1],
            block_size=block_size,
            sink=sink,
            local=local,
            query=query,
            evict=evict,
            interpreted=interpret is not None,
        ),
        out_type=jax.ShapeDtypeStruct((batch * queries * n_kv, slots), jnp.int32),
        scratch_types=(
            plgpu.SMEM((2 if n_blocks <= WIDE else 1, chunks, length), jnp.float32),
            _operand(chunks, length),
            _operand(rounded, chunks),
            _operand(rounded, length),
            _operand(SLOTS, chunks),
            plgpu.SMEM((chunks,), jnp.float32),
            plgpu.Barrier(num_barriers=2 * chunks // COPY),
        ),
        grid=(batch * queries * n_kv,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name="select_blocks",
    )(
        chunked(score_q),
        chunked(score_e),
        positions.reshape(-1).astype(jnp.int32),
    )
    return ids[:, :total].reshape(batch, queries, n_kv, total)
