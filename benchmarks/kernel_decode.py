"""Timing what a decode step calls: attention over slots, scores and selection, and the appending of a token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernel_bench import Bench, chain, normal

from nosa_jax.pallas_kernels import decode_attention, pooled_scores, select_blocks
from nosa_jax.pallas_kernels.pooled_scores.decode import SplitLogits, merged_scores, split_logits

INPUT_SETS = 4  # used in turn: together larger than the second-level cache


def attention(bench: Bench) -> None:
    """decode_attention over C of 2C slots, against XLA's version."""
    for rows in bench.options.rows:
        inputs = [_slots_and_ids(bench, rows, index) for index in range(INPUT_SETS)]
        q = normal(9, (rows, bench.shape.heads, bench.shape.head_dim))
        contenders = {
            name: (lambda q, x, name=name: decode_attention(q, *x, implementation=name), q, inputs)
            for name in bench.implementations
        }
        case = f"{rows} rows, C={bench.shape.selected}"
        seconds = bench.seconds(case, contenders, repeats=12, unroll=4)
        floor = rows * bench.shape.kv_heads * bench.shape.selected * bench.shape.page_bytes / bench.bandwidth
        more = {"of_bandwidth": floor / seconds[bench.options.kernel]} if bench.options.kernel in seconds else {}
        bench.add("decode_attention", case, seconds, floor, rows=rows, **more)


def _slots_and_ids(bench: Bench, rows: int, seed: int) -> tuple[jax.Array, ...]:
    s = bench.shape
    n_slots, n_blocks, lists = 2 * s.selected, s.context // s.block, rows * s.kv_heads

    def choose(key: jax.Array, among: int) -> jax.Array:
        keys = jax.random.split(key, lists)
        chosen = jax.vmap(lambda k: jax.random.permutation(k, among)[: s.selected])(keys)
        return chosen.reshape(rows, s.kv_heads, s.selected).astype(jnp.int32)

    slot_key, block_key = jax.random.split(jax.random.key(seed))
    slots = normal(seed, (rows, s.kv_heads, n_slots, 2, s.block, s.head_dim))
    cis = normal(seed, (rows, s.kv_heads, n_blocks, s.block), jnp.float32)
    lengths = jnp.full(rows, s.context - 5, jnp.int32)
    return slots, cis, choose(slot_key, n_slots), jnp.sort(choose(block_key, n_blocks)), lengths


def dense_decode(bench: Bench) -> None:
    """A dense decode by cuDNN (by XLA where there is none) over the context, for the crossover."""
    s, name = bench.shape, "cudnn" if bench.on_gpu else "xla"
    for rows in bench.options.rows:
        q = normal(9, (rows, 1, s.heads, s.head_dim))
        for context in bench.options.contexts:
            floor_bytes = rows * context * s.kv_heads * s.page_bytes / s.block
            if floor_bytes > 20e9:
                continue
            shape = (rows, context, s.kv_heads, s.head_dim)
            sets = 2 if rows * context > 2**19 else INPUT_SETS
            inputs = [(normal(2 * i, shape), normal(2 * i + 1, shape)) for i in range(sets)]
            contenders = {name: (lambda q, kv: jax.nn.dot_product_attention(q, *kv, implementation=name), q, inputs)}
            case = f"{rows} rows, {context} tokens"
            seconds = bench.seconds(case, contenders, repeats=8, unroll=4)
            bench.add("dense decode", case, seconds, floor_bytes / bench.bandwidth, rows=rows, context=context)
            del inputs, contenders


def scores(bench: Bench) -> None:
    """pooled_scores with its two kernels each alone, select_blocks, and both one after the other."""
    for rows in bench.options.rows:
        _scores_of(rows, bench)


def _scores_of(rows: int, bench: Bench) -> None:
    s = bench.shape
    n_blocks, per_block = s.context // s.block, s.block // s.stride
    windows = n_blocks * per_block  # room as in a cache; the last one is never visible
    score = partial(pooled_scores, n_blocks=n_blocks, **s.pooling)
    choose = partial(select_blocks, block_size=s.block, **s.budget)
    positions = jnp.full((rows, 1), s.context - 3, jnp.int32)
    rank = normal(1, (rows, 1, s.kv_heads, n_blocks), jnp.float32)
    keys = [normal(i, (rows, s.kv_heads, windows, s.head_dim)) for i in range(INPUT_SETS)]
    q = normal(7, (rows, 1, s.heads, s.head_dim))

    def both(q: jax.Array, k: jax.Array, name: str, **budget: int) -> jax.Array:
        found = score(q, k, positions, implementation=name)
        return chain(q, choose(found, rank, positions, implementation=name, **budget))

    contenders: dict[str, Any] = {}
    for name in bench.implementations:
        contenders[f"scores {name}"] = (
            lambda q, k, name=name: chain(q, score(q, k, positions, implementation=name)), q, keys,
        )  # fmt: skip
        contenders[f"scores and selection {name}"] = (partial(both, name=name), q, keys)
    # What is left where the static part of the selection costs nothing: the most that keeping it could save.
    contenders[f"scores and selection {bench.options.kernel}, query part only"] = (
        partial(both, name=bench.options.kernel, evict=0), q, keys,
    )  # fmt: skip
    if bench.options.kernel == "mosaic_gpu":
        contenders |= _kernels_alone(bench, q, keys, positions)
    contenders["empty chain"] = (lambda q, k: chain(q, k), q, keys)
    case = f"decode, {rows} rows, {s.context} tokens"
    seconds = bench.seconds(case, contenders, repeats=12, unroll=4)
    floor = rows * s.kv_heads * windows * s.head_dim * 2 / bench.bandwidth
    # The second kernel reads float32 logits of every window and query head, from the second-level cache if they fit.
    between = rows * s.heads * windows * 4 / bench.bandwidth
    bench.add("pooled_scores", case, seconds, floor, rows=rows, logits_floor_seconds=between)


def _kernels_alone(bench: Bench, q: jax.Array, keys: list[jax.Array], positions: jax.Array) -> dict[str, Any]:
    """Contenders: the kernel that leaves logits, and the one that makes scores of them."""
    s = bench.shape
    n_blocks, per_block = s.context // s.block, s.block // s.stride
    rules: dict[str, Any] = dict(
        n_blocks=n_blocks, phases=per_block, n_windows=n_blocks * per_block, window=s.window, stride=s.stride
    )
    views = [k.reshape(k.shape[0] * k.shape[1], n_blocks, per_block * s.head_dim) for k in keys]
    make = jax.jit(partial(split_logits, **rules))
    parts = [(make(q, view, positions), view) for view in views]

    def logits(q: jax.Array, view: jax.Array) -> jax.Array:
        return chain(q, split_logits(q, view, positions, **rules).sums)

    def merge(q: jax.Array, part: tuple[SplitLogits, jax.Array]) -> jax.Array:
        return chain(q, merged_scores(part[0], q, part[1], positions, **rules))

    return {"logits kernel alone": (logits, q, views), "score kernel alone": (merge, q, parts)}


def selection(bench: Bench) -> None:
    """select_blocks with both parts of its budget, and with each alone."""
    for rows in bench.options.rows:
        _selection_of(rows, bench)


def _selection_of(rows: int, bench: Bench) -> None:
    s = bench.shape
    n_blocks = s.context // s.block
    shape = (rows, 1, s.kv_heads, n_blocks)
    positions = jnp.full((rows, 1), s.context - 3, jnp.int32)
    rank = normal(1, shape, jnp.float32)
    block_scores = [normal(i + 20, shape, jnp.float32) for i in range(INPUT_SETS)]
    budgets = {
        "": s.budget,
        ", query part only": s.budget | {"evict": 0},
        ", static part only": s.budget | {"query": 0},
    }
    contenders: dict[str, Any] = {"empty chain": (chain, rank, block_scores)}
    for name in bench.implementations:
        for label, budget in budgets.items():
            choose = partial(select_blocks, block_size=s.block, implementation=name, **budget)
            contenders[f"{name}{label}"] = (
                lambda r, x, choose=choose: chain(r, choose(x, r, positions)), rank, block_scores,
            )  # fmt: skip
    case = f"decode, {rows} rows, {n_blocks} blocks"
    seconds = bench.seconds(case, contenders, repeats=12, unroll=4)
    floor = rows * s.kv_heads * (2 * n_blocks + s.selected) * 4 / bench.bandwidth
    bench.add("select_blocks", case, seconds, floor, rows=rows)
