"""Query-aware block scores of a few queries per sequence (decoding), as two Mosaic GPU kernels.

The pooled keys are by far the largest operand and are read from memory once. `_logit_kernel` spreads the visible part
of every row over many programs; each writes float32 logits (a quarter of the keys' bytes, so they stay in the L2
cache) and the softmax statistics of its part. `_score_kernel` merges the statistics and turns 64 blocks of logits into
block scores.

A tile of keys holds one *phase* of 64 consecutive blocks: with r = block / stride windows per block, phase p of block b
is window r*b + p. The view [W / r, r * H] of the keys makes it a plain rectangle, and the maximum over a block's
windows becomes an elementwise maximum over phases. The window before the block, r*b - 1, is phase r - 1 one block
earlier: the same logits, read one row higher.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64  # blocks per tile: the rows of one wgmma
HIDDEN = -2e30  # logit of a window that is not visible
LOWEST = -1e30  # initial running maximum: above HIDDEN, so that hidden windows weigh 2**-1e30 = 0; below any logit
HEAD_ALIGN = 8  # the columns of a wgmma come in eights
RING = 6  # key tiles in flight per program
PROGRAMS = 264  # aim for the number of logit programs: two per SM of an H200, all at once (measured: 528 is no faster)


def operand_transforms(head_dim: int) -> tuple[Any, Any]:
    """How wgmma wants a [rows, head_dim] operand of 2-byte numbers to lie in shared memory."""
    swizzle = 128 if head_dim % 64 == 0 else 64
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def visible_windows(position: jax.Array, n_windows: int, window: int, stride: int) -> jax.Array:
    """How many windows end at or before `position`, at most `n_windows`."""
    complete = lax.div(position - (window - 1), jnp.int32(stride)) + 1
    return jnp.where(position >= window - 1, jnp.minimum(complete, n_windows), 0)


def over_rows(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """One value per column, repeated in every row."""
    return lax.broadcast_in_dim(vector, shape, [1])


def _logit_kernel(q_ref: Any, k_ref: Any, positions_ref: Any, logits_ref: Any, top_ref: Any, sum_ref: Any,
                  q_smem: Any, k_smem: Any, q_barrier: Any, k_barriers: Any, *, queries: int, n_kv: int, splits: int,
                  phases: int, n_windows: int, window: int, stride: int, padded_blocks: int,
                  scale: float) -> None:  # fmt: skip
    """Logits (times log2 e) of one split of one row's visible windows, with their maxima and exponential sums.

    A split has every `splits`-th tile, so that its first one is known, and on its way, before the row's position is.
    """
    row, kv, split = (lax.axis_index(name) for name in ("row", "kv", "split"))
    group, head_dim = q_smem.shape
    depth = k_smem.shape[0]
    shape = (TILE, group)
    head_row = row * n_kv + kv
    sequence = lax.div(row, jnp.int32(queries)) * n_kv + kv

    def fetch(step: jax.Array) -> None:
        tile, phase = split + lax.div(step, jnp.int32(phases)) * splits, lax.rem(step, jnp.int32(phases))
        slot = lax.rem(step, jnp.int32(depth))
        plgpu.copy_gmem_to_smem(
            k_ref.at[sequence, pl.ds(tile * TILE, TILE), pl.ds(phase * head_dim, head_dim)],
            k_smem.at[slot],
            k_barriers.at[slot],
        )

    of_first_tile = min(depth, phases)
    for step in range(of_first_tile):
        fetch(jnp.int32(step))
    plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(head_row * group, group)], q_smem, q_barrier)
    limit = visible_windows(positions_ref[row], n_windows, window, stride)
    tiles = pl.cdiv(limit, jnp.int32(TILE * phases))
    count = pl.cdiv(jnp.maximum(tiles - split, 0), jnp.int32(splits))
    for step in range(of_first_tile, depth):
        pl.when(step < count * phases)(functools.partial(fetch, jnp.int32(step)))
    plgpu.barrier_wait(q_barrier)

    def tile_step(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        top, total = carry
        block = (split + index * splits) * TILE
        logits = []
        for phase in range(phases):
            step = index * phases + phase
            slot = lax.rem(step, jnp.int32(depth))
            plgpu.barrier_wait(k_barriers.at[slot])

            def product(acc, slot=slot):
                plgpu.wgmma(acc, k_smem.at[slot], q_smem.transpose((1, 0)))
                return acc[...]

            scaled = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32)) * (scale * math.log2(math.e))
            pl.when(step + depth < count * phases)(functools.partial(fetch, step + depth))
            blocks = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + block
            scaled = jnp.where(blocks * phases + phase < limit, scaled, HIDDEN)
            start = (head_row * phases + phase) * padded_blocks + 1 + block
            logits_ref[pl.ds(start, TILE)] = scaled
            logits.append(scaled)
        raised = functools.reduce(jnp.maximum, logits, top)
        total = total * jnp.exp2(top - raised)
        for scaled in logits:
            total = total + jnp.exp2(scaled - raised)
        return raised, total

    start = (
        plgpu.layout_cast(jnp.full(shape, LOWEST, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA),
    )
    top, total = lax.fori_loop(0, count, tile_step, start)

    @pl.when(count == 0)
    def _():  # no program ends before what it asked for has come
        for step in range(of_first_tile):
            plgpu.barrier_wait(k_barriers.at[step])

    highest = top.max(axis=0)
    total = (total * jnp.exp2(top - over_rows(highest, shape))).sum(axis=0)
    top_ref[head_row * splits + split] = highest
    sum_ref[head_row * splits + split] = total


def _score_kernel(logits_ref: Any, top_ref: Any, sum_ref: Any, positions_ref: Any, out_ref: Any, *, group: int,
                  n_kv: int, splits: int, phases: int, n_windows: int, window: int, stride: int,
                  padded_blocks: int) -> None:  # fmt: skip
    """Scores of 64 blocks: probabilities summed over the group, the maximum over each block's windows."""
    row, kv, tile = (lax.axis_index(name) for name in ("row", "kv", "tile"))
    padded_group = logits_ref.shape[-1]
    shape = (TILE, padded_group)
    head_row = row * n_kv + kv
    limit = visible_windows(positions_ref[row], n_windows, window, stride)
    block = tile * TILE
    blocks = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=plgpu.Layout.WGMMA.reduce(1)) + block
    columns = plgpu.Layout.WGMMA.reduce(0)
    any_visible = block * phases - 1 < limit

    @pl.when(any_visible & (limit > 0))
    def _():
        tops = [plgpu.load(top_ref.at[head_row * splits + s], layout=columns, optimized=False) for s in range(splits)]
        sums = [plgpu.load(sum_ref.at[head_row * splits + s], layout=columns, optimized=False) for s in range(splits)]
        highest = functools.reduce(jnp.maximum, tops)
        total = functools.reduce(jnp.add, [s * jnp.exp2(t - highest) for t, s in zip(tops, sums, strict=True)])
        normaliser = over_rows(highest + jnp.log2(total), shape)
        best = plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        for phase in range(-1, phases):
            first_row = (head_row * phases + phase % phases) * padded_blocks + block + (phase >= 0)
            logits = plgpu.load(logits_ref.at[pl.ds(first_row, TILE)], layout=plgpu.Layout.WGMMA, optimized=False)
            weights = jnp.exp2(logits - normaliser)
            if group != padded_group:
                heads = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                weights = jnp.where(heads < group, weights, 0.0)
            windows = blocks * phases + phase
            visible = (windows >= 0) & (windows < limit)
            best = jnp.maximum(best, jnp.where(visible, weights.sum(axis=1), -jnp.inf))
        out_ref[head_row, pl.ds(block, TILE)] = best

    @pl.when(jnp.logical_not(any_visible & (limit > 0)))
    def _():
        nothing = plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        out_ref[head_row, pl.ds(block, TILE)] = nothing


class SplitLogits(NamedTuple):
    """What the first kernel leaves for the second.

    logits: times log2 e, [rows * K * phases * padded blocks, group padded to eights], one row of padding before the
      blocks of every phase. tops, sums: softmax statistics of each split of each row.
    """

    logits: jax.Array
    tops: jax.Array
    sums: jax.Array


class _Sizes(NamedTuple):
    """How the work of both kernels is cut."""

    rows: int
    n_kv: int
    group: int
    padded_group: int
    splits: int
    score_tiles: int
    padded_blocks: int


def _sizes(q: jax.Array, keys: jax.Array, n_blocks: int) -> _Sizes:
    batch, queries, n_heads, _ = q.shape
    n_kv = keys.shape[0] // batch
    group, rows = n_heads // n_kv, batch * queries
    key_tiles, score_tiles = pl.cdiv(keys.shape[1], TILE), pl.cdiv(n_blocks, TILE)
    return _Sizes(
        rows=rows,
        n_kv=n_kv,
        group=group,
        padded_group=-(-group // HEAD_ALIGN) * HEAD_ALIGN,
        splits=max(1, min(key_tiles, PROGRAMS // (rows * n_kv))),
        score_tiles=score_tiles,
        padded_blocks=1 + max(key_tiles, score_tiles) * TILE,
    )


def split_logits(
    q: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    *,
    n_blocks: int,
    phases: int,
    n_windows: int,
    window: int,
    stride: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> SplitLogits:
    """The first kernel: logits of every visible window; arguments as for `decode_scores`."""
    queries, head_dim = q.shape[1], q.shape[3]
    sizes = _sizes(q, keys, n_blocks)
    grouped = q.reshape(sizes.rows * sizes.n_kv, sizes.group, head_dim)
    if sizes.padded_group != sizes.group:
        grouped = jnp.pad(grouped, ((0, 0), (0, sizes.padded_group - sizes.group), (0, 0)))
    transforms = operand_transforms(head_dim)
    statistics = jax.ShapeDtypeStruct((sizes.rows * sizes.n_kv * sizes.splits, sizes.padded_group), jnp.float32)
    logits = (sizes.rows * sizes.n_kv * phases * sizes.padded_blocks, sizes.padded_group)
    depth = max(2, min(RING, 98_304 // (TILE * head_dim * 2)))
    return SplitLogits(
        *plgpu.kernel(
            functools.partial(
                _logit_kernel, queries=queries, scale=1 / math.sqrt(head_dim), n_kv=sizes.n_kv, splits=sizes.splits,
                phases=phases, n_windows=n_windows, window=window, stride=stride, padded_blocks=sizes.padded_blocks,
            ),
            out_type=(jax.ShapeDtypeStruct(logits, jnp.float32), statistics, statistics),
            scratch_types=(
                plgpu.SMEM((sizes.padded_group, head_dim), q.dtype, transforms=transforms),
                plgpu.SMEM((depth, TILE, head_dim), q.dtype, transforms=transforms),
                plgpu.Barrier(),
                plgpu.Barrier(num_barriers=depth),
            ),
            grid=(sizes.rows, sizes.n_kv, sizes.splits),
            grid_names=("row", "kv", "split"),
            num_threads=1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
            kernel_name="pooled_logits",
        )(grouped.reshape(-1, head_dim), keys, positions.reshape(sizes.rows).astype(jnp.int32))
    )  # fmt: skip


def merged_scores(
    parts: SplitLogits,
    q: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    *,
    n_blocks: int,
    phases: int,
    n_windows: int,
    window: int,
    stride: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """The second kernel: block scores from the logits; of `q` and `keys` only the shapes count."""
    sizes = _sizes(q, keys, n_blocks)
    scores = plgpu.kernel(
        functools.partial(
            _score_kernel, group=sizes.group, n_kv=sizes.n_kv, splits=sizes.splits, phases=phases, n_windows=n_windows,
            window=window, stride=stride, padded_blocks=sizes.padded_blocks,
        ),
        out_type=jax.ShapeDtypeStruct((sizes.rows * sizes.n_kv, sizes.score_tiles * TILE), jnp.float32),
        grid=(sizes.rows, sizes.n_kv, sizes.score_tiles),
        grid_names=("row", "kv", "tile"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="pooled_scores",
    )(*parts, positions.reshape(sizes.rows).astype(jnp.int32))  # fmt: skip
    return scores[:, :n_blocks].reshape(*q.shape[:2], sizes.n_kv, n_blocks)


def decode_scores(
    q: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    *,
    n_blocks: int,
    phases: int,
    n_windows: int,
    window: int,
    stride: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Block scores [B, T, K, M] of queries [B, T, N, H], for small T.

    Args:
      q: queries. keys: pooled keys as [B * K, W', phases * H], W' blocks of `phases` windows.
      positions: [B, T]. n_blocks: M. n_windows: windows that exist, at most W' * phases.
    """
    rules: dict[str, Any] = dict(
        n_blocks=n_blocks, phases=phases, n_windows=n_windows, window=window, stride=stride, interpret=interpret
    )
    return merged_scores(split_logits(q, keys, positions, **rules), q, keys, positions, **rules)
