"""Query-aware block scores of many queries per sequence (prefill, training), as one Mosaic GPU kernel.

A program scores a few tokens per consumer warpgroup against every visible pooled key, twice: the first pass finds each
query head's log-sum-exp, the second the probabilities, which are summed over the group and maximised over each block's
windows in registers. Logits are never written to memory.

Logits lie as [64 blocks, tokens * heads]: the sum over a group is a sum over neighbouring columns, and the maximum over
a block's windows an elementwise one (keys arrive in phases, see `decode`). The window before a block comes from shared
memory, where the last phase's scores are read one block higher.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels.pooled_scores.decode import HEAD_ALIGN, HIDDEN, LOWEST, TILE, operand_transforms, over_rows

COLUMNS = 128  # query heads times tokens per consumer warpgroup: one wgmma's columns
SHARED_BYTES = 220 * 1024  # of the 227 KiB of a Hopper SM
TMA_ROW = 4  # rows that TMA writes are a multiple of 16 bytes
ROW = plgpu.Layout.WGMMA.reduce(1)  # one value per block of a tile
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value per query head


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Consumer warpgroups per program, and how many products each starts before it waits for the first."""

    consumers: int
    in_flight: int

    @classmethod
    def best(cls, head_dim: int) -> "Tuning":
        """As measured on an H200 with heads of 128: three warpgroups hide more of each other's exponentials than two
        with a second product on its way (5.8 against 6.3 ms for 64K tokens of 32 heads); larger queries of three leave
        too little shared memory for keys."""
        return cls(consumers=3, in_flight=1) if head_dim <= 128 else cls(consumers=2, in_flight=2)


def _row_splat(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), ROW)


def _splat(value: float, shape: tuple[int, int]) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA)


def _div(a: jax.Array, b: int) -> jax.Array:
    return lax.div(a, jnp.int32(b))


def _rem(a: jax.Array, b: int) -> jax.Array:
    return lax.rem(a, jnp.int32(b))


def _scores_kernel(q_ref: Any, k_ref: Any, limits_ref: Any, most_ref: Any, least_ref: Any, out_ref: Any, q_smem: Any,
                   k_smem: Any, best_smem: Any, last_smem: Any, limits_smem: Any, flags_smem: Any, q_barriers: Any,
                   k_barriers: Any, consumed: Any, decided: Any, turns: Any, *, tuning: Tuning, tokens: int,
                   heads: int, group: int, n_kv: int, phases: int, length: int, n_blocks: int,
                   scale: float) -> None:  # fmt: skip
    """Block scores of `consumers * tokens` queries of one KV head.

    The key tiles stream in order, once per pass: step 0 is a first look at the first one, pass n is the steps from
    1 + n * steps on.
    """
    batch, kv = lax.axis_index("batch"), lax.axis_index("kv")
    program = lax.axis_size("tokens") - 1 - lax.axis_index("tokens")  # the longest rows start first
    worker = lax.axis_index("warpgroup")
    depth, _, head_dim = k_smem.shape
    # One tile past the last visible window: the first block of it can touch that window.
    tiles = _div(most_ref[batch, program], TILE * phases) + 1
    whole = _div(least_ref[batch, program], TILE * phases)  # tiles that every token sees in full
    steps = tiles * phases

    def repeats() -> jax.Array:
        return functools.reduce(jnp.maximum, [flags_smem[c] for c in range(tuning.consumers)])

    @pl.when(worker == tuning.consumers)
    def _producer():
        plgpu.set_max_registers(40 if tuning.consumers == 2 else 32, action="decrease")

        def fetch(step: jax.Array) -> None:
            within, slot = lax.rem(jnp.maximum(step - 1, 0), steps), _rem(step, depth)
            rows, columns = pl.ds(_div(within, phases) * TILE, TILE), pl.ds(_rem(within, phases) * head_dim, head_dim)
            plgpu.copy_gmem_to_smem(k_ref.at[batch * n_kv + kv, rows, columns], k_smem.at[slot], k_barriers.at[slot])

        def await_slot(step: jax.Array, _: None) -> None:
            pl.when(step >= depth)(lambda: plgpu.barrier_wait(consumed.at[_rem(step, depth)]))

        def refill(step: jax.Array, _: None) -> None:
            await_slot(step, None)
            fetch(step)

        lax.fori_loop(0, 1 + 2 * steps, refill, None)
        plgpu.barrier_wait(decided)
        end = 1 + (2 + repeats()) * steps
        lax.fori_loop(1 + 2 * steps, end, refill, None)
        lax.fori_loop(end, end + depth, await_slot, None)  # a barrier must be seen to complete before it goes

    @pl.when(worker < tuning.consumers)
    def _consumer():
        plgpu.set_max_registers(232 if tuning.consumers == 2 else 160, action="increase")
        first_token = (program * tuning.consumers + worker) * tokens
        limits = []
        for t in range(tokens):
            token = jnp.minimum(first_token + t, length - 1)
            columns = pl.ds(t * heads, heads)
            start = ((batch * length + token) * n_kv + kv) * heads
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(start, heads)], q_smem.at[worker, columns], q_barriers.at[worker])
            limits.append(limits_ref[batch, token])
            limits_smem[worker, columns] = plgpu.layout_cast(jnp.full((heads,), limits[-1], jnp.int32), COLUMN)
        plgpu.barrier_wait(q_barriers.at[worker])
        shape = (TILE, tokens * heads)
        accumulator = plgpu.ACC(shape, jnp.float32)
        factor = scale * math.log2(math.e)

        def multiply(acc: Any, step: jax.Array) -> None:
            slot = _rem(step, depth)
            plgpu.barrier_wait(k_barriers.at[slot])
            plgpu.wgmma(acc, k_smem.at[slot], q_smem.at[worker].transpose((1, 0)))

        def products(first: jax.Array, count: int, carry: Any, use: Callable) -> Any:
            """Thread `carry` through `use(carry, i, product)` for steps first + i, i < count."""

            def run(*accumulators: Any) -> Any:
                result = carry
                multiply(accumulators[0], first)
                for i, acc in enumerate(accumulators):
                    last = i + 1 == count
                    if not last:
                        multiply(accumulators[i + 1], first + i + 1)
                    product = plgpu.wgmma_accumulator_load(acc, wait_n=0 if last else 1)
                    plgpu.barrier_arrive(consumed.at[_rem(first + i, depth)])
                    result = use(result, i, product)
                return result

            return pl.run_scoped(run, *[accumulator] * count)

        together = math.gcd(tuning.in_flight, phases)

        def hide(logits: jax.Array, within: jax.Array) -> jax.Array:
            first_block = _div(within, phases) * TILE
            blocks = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first_block
            limit = plgpu.load(limits_smem.at[worker], layout=COLUMN, optimized=False)
            return jnp.where(blocks * phases + _rem(within, phases) < over_rows(limit, shape), logits, HIDDEN)

        def sweep(first: jax.Array, begin: jax.Array, end: jax.Array, carry: Any, use: Callable, masked: bool) -> Any:
            """Thread `carry` through `use(carry, logits)` for steps begin to end of the pass that starts at `first`."""

            def some(index: jax.Array, carry: Any) -> Any:
                within = index * together

                def one(carry: Any, i: int, product: jax.Array) -> Any:
                    logits = product * factor
                    return use(carry, hide(logits, within + i) if masked else logits)

                return products(first + within, together, carry, one)

            return lax.fori_loop(_div(begin, together), _div(end, together), some, carry)

        def in_turn(reduce: Callable[[], jax.Array]) -> jax.Array:
            """Reductions across warps go through one scratch buffer of the program: one warpgroup after another."""
            pl.when(worker > 0)(lambda: plgpu.barrier_wait(turns.at[worker]))
            result = reduce()
            plgpu.barrier_arrive(turns.at[_rem(worker + 1, tuning.consumers)])
            pl.when(worker == 0)(lambda: plgpu.barrier_wait(turns.at[0]))
            return result

        # First pass. Weights are relative to the largest of the first logits, so that each costs one exponential.
        # Should a later logit exceed that one by more than float32's range, the sum becomes infinite and the pass is
        # repeated with a running maximum.
        first = products(jnp.int32(0), 1, None, lambda _, i, product: hide(product * factor, jnp.int32(0)))
        top = jnp.maximum(in_turn(lambda: first.max(axis=0)), LOWEST)

        def add(total: jax.Array, logits: jax.Array) -> jax.Array:
            return total + jnp.exp2(logits - over_rows(top, shape))

        total = sweep(jnp.int32(1), jnp.int32(0), whole * phases, _splat(0.0, shape), add, masked=False)
        parts = sweep(jnp.int32(1), whole * phases, steps, total, add, masked=True)
        total = in_turn(lambda: parts.sum(axis=0))
        flags_smem[worker] = jnp.where(total.max() < jnp.inf, 0, 1).astype(jnp.int32)
        plgpu.commit_smem()
        plgpu.barrier_arrive(decided)
        plgpu.barrier_wait(decided)
        again = repeats()

        def with_running_maximum() -> jax.Array:
            def raise_and_add(carry: tuple[jax.Array, jax.Array], logits: jax.Array) -> tuple[jax.Array, jax.Array]:
                top, total = carry
                raised = jnp.maximum(top, logits)
                return raised, total * jnp.exp2(top - raised) + jnp.exp2(logits - raised)

            start = (_splat(LOWEST, shape), _splat(0.0, shape))
            tops, totals = sweep(1 + steps, jnp.int32(0), steps, start, raise_and_add, masked=True)
            top = in_turn(lambda: tops.max(axis=0))
            return top + jnp.log2(in_turn(lambda: (totals * jnp.exp2(tops - over_rows(top, shape))).sum(axis=0)))

        normaliser = lax.cond(again > 0, with_running_maximum, lambda: top + jnp.log2(total))
        if group != heads:  # heads that only pad the group weigh nothing
            heads_index = _rem(plgpu.broadcasted_iota(jnp.int32, (tokens * heads,), 0, layout=COLUMN), heads)
            normaliser = jnp.where(heads_index < group, normaliser, jnp.inf)

        # Second pass.
        second = 1 + (1 + again) * steps
        best_tile, last_tile = best_smem.at[worker], last_smem.at[worker]

        def write(tile: jax.Array) -> None:
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                best_tile, out_ref.at[batch, pl.ds(first_token, tokens), kv, pl.ds(tile * TILE, TILE)]
            )

        nothing = [_row_splat(-jnp.inf)] * tokens
        for t in range(tokens):
            last_tile[t, pl.ds(0, TILE)] = nothing[t]

        def score_tile(tile: jax.Array, _: None) -> None:
            blocks = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW) + tile * TILE

            def score(best: list[jax.Array], phase: jax.Array, product: jax.Array) -> tuple[list, list]:
                weights = jnp.exp2(product * factor - over_rows(normaliser, shape))
                sums = [weights[:, t * heads : (t + 1) * heads].sum(axis=1) for t in range(tokens)]
                windows = blocks * phases + phase
                sums = [jnp.where(windows < limit, s, -jnp.inf) for s, limit in zip(sums, limits, strict=True)]
                return [jnp.maximum(b, s) for b, s in zip(best, sums, strict=True)], sums

            def some(index: jax.Array, carry: tuple[list, list]) -> tuple[list, list]:
                within = index * together
                return products(
                    second + tile * phases + within,
                    together,
                    carry,
                    lambda carry, i, product: score(carry[0], within + i, product),
                )

            best, last = lax.fori_loop(0, phases // together, some, (nothing, nothing))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for t in range(tokens):
                last_tile[t, pl.ds(TILE, TILE)] = last[t]
            for t in range(tokens):
                before = plgpu.load(last_tile.at[t, pl.ds(TILE - 1, TILE)], layout=ROW, optimized=False)
                best_tile[t] = jnp.maximum(best[t], before)
            for t in range(tokens):
                last_tile[t, pl.ds(0, TILE)] = last[t]
            pl.when(tile * TILE < n_blocks)(lambda: write(tile))

        lax.fori_loop(0, tiles, score_tile, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for t in range(tokens):
            best_tile[t] = nothing[t]
        lax.fori_loop(tiles, pl.cdiv(n_blocks, TILE), lambda tile, _: write(tile), None)
        plgpu.wait_smem_to_gmem(0)


def prefill_scores(
    q: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    *,
    n_blocks: int,
    phases: int,
    n_windows: int,
    window: int,
    stride: int,
    tuning: Tuning | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Block scores [B, T, K, M] of queries [B, T, N, H]; arguments as for `decode.decode_scores`."""
    tuning = tuning or Tuning.best(q.shape[-1])
    batch, length, n_heads, head_dim = q.shape
    n_kv = keys.shape[0] // batch
    group = n_heads // n_kv
    heads = -(-group // HEAD_ALIGN) * HEAD_ALIGN
    grouped = q.reshape(batch * length * n_kv, group, head_dim)
    if heads != group:
        grouped = jnp.pad(grouped, ((0, 0), (0, heads - group), (0, 0)))
    tokens = max(1, COLUMNS // heads)
    consumers = tuning.consumers
    programs = pl.cdiv(length, consumers * tokens)
    limits = jnp.clip((positions.astype(jnp.int32) - window + 1) // stride + 1, 0, n_windows)
    per_program = jnp.pad(limits, ((0, 0), (0, programs * consumers * tokens - length)), mode="edge").reshape(
        batch, programs, consumers * tokens
    )
    padded_blocks = pl.cdiv(n_blocks, TMA_ROW) * TMA_ROW
    transforms = operand_transforms(head_dim)
    staging = consumers * tokens * (3 * TILE + heads) * 4
    queries = consumers * tokens * heads * head_dim * q.dtype.itemsize
    depth = max(2, min(8, (SHARED_BYTES - staging - queries) // (TILE * head_dim * q.dtype.itemsize)))
    scores = plgpu.kernel(
        functools.partial(
            _scores_kernel,
            tuning=tuning,
            tokens=tokens,
            heads=heads,
            group=group,
            n_kv=n_kv,
            phases=phases,
            length=length,
            n_blocks=padded_blocks,
            scale=1 / math.sqrt(head_dim),
        ),
        out_type=jax.ShapeDtypeStruct((batch, length, n_kv, padded_blocks), jnp.float32),
        scratch_types=(
            plgpu.SMEM((consumers, tokens * heads, head_dim), q.dtype, transforms=transforms),
            plgpu.SMEM((depth, TILE, head_dim), q.dtype, transforms=transforms),
            plgpu.SMEM((consumers, tokens, TILE), jnp.float32),
            plgpu.SMEM((consumers, tokens, 2 * TILE), jnp.float32),
            plgpu.SMEM((consumers, tokens * heads), jnp.int32),
            plgpu.SMEM((consumers,), jnp.int32),
            plgpu.Barrier(num_arrivals=tokens, num_barriers=consumers),
            plgpu.Barrier(num_barriers=depth),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=depth),
            plgpu.Barrier(num_arrivals=consumers),
            plgpu.Barrier(num_barriers=consumers),
        ),
        grid=(programs, n_kv, batch),
        grid_names=("tokens", "kv", "batch"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="pooled_scores",
    )(grouped.reshape(-1, head_dim), keys, limits, per_program.max(axis=-1), per_program.min(axis=-1))
    return scores[..., :n_blocks]
