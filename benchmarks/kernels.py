"""The Pallas kernels against their floors and against the best alternative on the same GPU, in one run.

    python benchmarks/kernels.py --out benchmarks/results

Shapes are those of NOSA-8B (32 query heads, 2 KV heads, head dimension 128, blocks of 64 tokens, 64 selected) in
bfloat16. A floor is bytes over the memory bandwidth or operations over the matrix rate, both measured first. Writes
kernels.json and kernels.png.
"""

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import tyro
from selections import drifting_selection, union_size
from timing import matmul_rate, seconds_per_call

from nosa_jax.infer.environment import environment
from nosa_jax.infer.rates import measure_rates
from nosa_jax.pallas_kernels import decode_attention, pooled_scores, select_blocks, sparse_attention

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 2, 128, 64
BUDGET = dict(sink=1, local=17, query=15, evict=31)
SELECTED = sum(BUDGET.values())
POOLING = dict(block_size=BLOCK, window=32, stride=16)
PAGE_BYTES = 2 * BLOCK * HEAD_DIM * 2
INPUT_SETS = 4  # used in turn: together larger than the second-level cache


@dataclass(frozen=True)
class Options:
    """Time the kernels."""

    rows: tuple[int, ...] = (16, 64)
    """Requests in a decoding batch."""
    contexts: tuple[int, ...] = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
    """Context lengths of the dense decode that decode_attention is compared with."""
    lengths: tuple[int, ...] = (32_768, 65_536, 131_072)
    """Sequence lengths of sparse_attention."""
    changed_picks: float = 3.6
    """Selected blocks that change from one token to the next (3.58 was published for NOSA-8B at 16K)."""
    sections: tuple[str, ...] = ("decode", "scores", "sequence")
    out: Path = Path("benchmarks/results")


@dataclass
class Report:
    """Figures so far, and the device's own rates."""

    bandwidth: float
    matmul: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kernel: str, case: str, seconds: dict[str, float], floor: float, **more: Any) -> None:
        """Keep and print one row: the seconds of each contender and the floor."""
        row = {"kernel": kernel, "case": case, "seconds": seconds, "floor_seconds": floor, **more}
        self.rows.append(row)
        times = ", ".join(f"{name} {value * 1e6:,.1f}" for name, value in seconds.items())
        print(f"{kernel:18} {case:34} us: {times}; floor {floor * 1e6:,.1f} {more or ''}", flush=True)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random values of a shape."""
    return jax.jit(partial(jax.random.normal, shape=shape, dtype=dtype))(jax.random.key(seed))


def decode(report: Report, options: Options) -> None:
    """decode_attention for every batch."""
    for rows in options.rows:
        decode_of(rows, report, options)


def decode_of(rows: int, report: Report, options: Options) -> None:
    """decode_attention over 64 of 128 slots, against XLA's version and a dense decode by cuDNN."""
    n_slots, n_blocks = 2 * SELECTED, 1024
    lengths = jnp.full(rows, n_blocks * BLOCK - 5, jnp.int32)
    inputs = []
    for index in range(INPUT_SETS):
        key = jax.random.key(index)
        chosen = jax.vmap(lambda k: jax.random.permutation(k, n_slots)[:SELECTED])(
            jax.random.split(key, rows * KV_HEADS)
        ).reshape(rows, KV_HEADS, SELECTED)
        blocks = jnp.sort(
            jax.vmap(lambda k: jax.random.permutation(k, n_blocks)[:SELECTED])(jax.random.split(key, rows * KV_HEADS))
        ).reshape(chosen.shape)
        slots = normal(index, (rows, KV_HEADS, n_slots, 2, BLOCK, HEAD_DIM))
        cis = normal(index, (rows, KV_HEADS, n_blocks, BLOCK), jnp.float32)
        inputs.append((slots, cis, chosen.astype(jnp.int32), blocks.astype(jnp.int32), lengths))
    q = normal(9, (rows, HEADS, HEAD_DIM))
    contenders = {
        name: (lambda q, x, name=name: decode_attention(q, *x, implementation=name), q, inputs)
        for name in ("mosaic_gpu", "xla")
    }
    seconds = seconds_per_call(contenders, repeats=12, unroll=4)
    floor = rows * KV_HEADS * SELECTED * PAGE_BYTES / report.bandwidth
    report.add("decode_attention", f"{rows} rows, C=64", seconds, floor, of_bandwidth=floor / seconds["mosaic_gpu"])
    del inputs, contenders
    for context in options.contexts:
        if rows * context * PAGE_BYTES / BLOCK * KV_HEADS > 20e9:
            continue
        shape = (rows, context, KV_HEADS, HEAD_DIM)
        sets = 2 if rows * context > 2**19 else INPUT_SETS
        dense_inputs = [(normal(2 * i, shape), normal(2 * i + 1, shape)) for i in range(sets)]
        dense = seconds_per_call(
            {
                "cudnn": (
                    lambda q, kv: jax.nn.dot_product_attention(q, *kv, implementation="cudnn"),
                    q[:, None],
                    dense_inputs,
                )
            },
            repeats=8,
            unroll=4,
        )
        floor = rows * context * KV_HEADS * PAGE_BYTES / BLOCK / report.bandwidth
        ratio = dense["cudnn"] / seconds["mosaic_gpu"]
        report.add(
            "dense decode",
            f"{rows} rows, {context} tokens",
            dense,
            floor,
            rows=rows,
            context=context,
            sparse_is_faster_by=ratio,
        )
        del dense_inputs


def scores(report: Report, options: Options) -> None:
    """pooled_scores and select_blocks for every batch and over the longest sequence."""
    for rows in options.rows:
        decode_scores(rows, report)
    sequence_scores(max(options.lengths), report)


def decode_scores(rows: int, report: Report) -> None:
    """One query per row at a context of 64K tokens."""
    context = 65_536
    n_blocks, windows = context // BLOCK, (context - 32) // 16 + 1
    score = partial(pooled_scores, n_blocks=n_blocks, **POOLING)
    choose = partial(select_blocks, block_size=BLOCK, **BUDGET)
    positions = jnp.full((rows, 1), context - 3, jnp.int32)
    rank = normal(1, (rows, 1, KV_HEADS, n_blocks), jnp.float32)
    keys = [normal(i, (rows, KV_HEADS, windows, HEAD_DIM)) for i in range(INPUT_SETS)]
    q = normal(7, (rows, 1, HEADS, HEAD_DIM))
    block_scores = [normal(i + 20, (rows, 1, KV_HEADS, n_blocks), jnp.float32) for i in range(INPUT_SETS)]

    def chain(q: jax.Array, value: jax.Array) -> jax.Array:  # a carry that needs the result and stays as it was
        return q + value.reshape(-1)[0].astype(q.dtype) * 0  # in floating point: an integer 0 would be folded away

    def both(q: jax.Array, k: jax.Array, name: str) -> jax.Array:
        found = score(q, k, positions, implementation=name)
        return chain(q, choose(found, rank, positions, implementation=name))

    contenders: dict[str, Any] = {}
    for name in ("mosaic_gpu", "xla"):
        contenders[f"scores {name}"] = (
            lambda q, k, name=name: chain(q, score(q, k, positions, implementation=name)),
            q,
            keys,
        )
        contenders[f"selection {name}"] = (
            lambda r, s, name=name: chain(r, choose(s, r, positions, implementation=name)),
            rank,
            block_scores,
        )
        contenders[f"both {name}"] = (partial(both, name=name), q, keys)
    contenders["empty chain"] = (lambda q, k: chain(q, k), q, keys)
    seconds = seconds_per_call(contenders, repeats=12, unroll=4)
    floor = rows * KV_HEADS * windows * HEAD_DIM * 2 / report.bandwidth
    report.add("pooled_scores", f"decode, {rows} rows, {context} tokens", seconds, floor)


def sequence_scores(length: int, report: Report) -> None:
    """Every query of a sequence."""
    n_blocks = length // BLOCK
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    keys = normal(3, (1, KV_HEADS, (length - 32) // 16 + 1, HEAD_DIM))
    q = normal(4, (1, length, HEADS, HEAD_DIM))
    rank = normal(5, (1, 1, KV_HEADS, n_blocks), jnp.float32)
    found = pooled_scores(q, keys, positions, n_blocks=n_blocks, **POOLING)
    score = partial(pooled_scores, n_blocks=n_blocks, implementation="mosaic_gpu", **POOLING)
    choose = partial(select_blocks, block_size=BLOCK, implementation="mosaic_gpu", **BUDGET)
    contenders: dict[str, Any] = {
        "scores mosaic_gpu": (lambda q, k: q + (score(q, k, positions)[:, :1, 0, 0] * 0).astype(q.dtype), q, [keys]),
        "selection mosaic_gpu": (
            lambda r, s: r + choose(s, r, positions)[0, 0, 0, 0].astype(r.dtype) * 0,
            rank,
            [found],
        ),
    }
    seconds = seconds_per_call(contenders, repeats=2, rounds=3)
    operations = 2 * length * HEADS * (length / 16) / 2 * HEAD_DIM
    report.add("pooled_scores", f"sequence of {length} tokens", seconds, operations / report.matmul)


def sequence(report: Report, options: Options) -> None:
    """sparse_attention at every length."""
    for length in options.lengths:
        sequence_of(length, report, options)


def sequence_of(length: int, report: Report, options: Options) -> None:
    """sparse_attention, forward and with its gradient, against cuDNN's dense causal attention."""
    ids = drifting_selection(length, KV_HEADS, block_size=BLOCK, changed=options.changed_picks, **BUDGET)
    k, v = normal(1, (1, length, KV_HEADS, HEAD_DIM)), normal(2, (1, length, KV_HEADS, HEAD_DIM))
    cis = normal(3, (1, length, KV_HEADS), jnp.float32)
    q = normal(0, (1, length, HEADS, HEAD_DIM))
    weights = normal(5, q.shape)

    def sparse(q: jax.Array, k: jax.Array, v: jax.Array, cis: jax.Array, ids: jax.Array) -> jax.Array:
        return sparse_attention(q, k, v, cis, ids, block_size=BLOCK, implementation="mosaic_gpu")

    def dense(q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    def train(attend: Any, qkv: Any, x: Any) -> Any:
        cis, ids, weights = x

        def loss(q: jax.Array, k: jax.Array, v: jax.Array, cis: jax.Array) -> jax.Array:
            return (attend(q, k, v, cis, ids).astype(jnp.float32) * weights).sum()

        *grads, dcis = jax.grad(loss, argnums=(0, 1, 2, 3))(*qkv, cis)
        first = dcis.reshape(-1)[0].astype(weights.dtype) * 0
        return tuple(x + dx + first for x, dx in zip(qkv, grads, strict=True))

    forward = {
        "mosaic_gpu": (lambda q, x: q + sparse(q, *x), q, [(k, v, cis, ids)]),
        "cudnn dense": (lambda q, x: q + dense(q, *x), q, [(k, v, cis, ids)]),
    }
    both = {
        name: (partial(train, attend), (q, k, v), [(cis, ids, weights)])
        for name, attend in (("mosaic_gpu", sparse), ("cudnn dense", dense))
    }
    union = union_size(ids, 4)
    # Products of 64 rows, 4 tokens of 16 heads, with the blocks that at least one of the 4 selected.
    product = 2 * length * HEADS * union * BLOCK * HEAD_DIM
    for case, contenders, products in (("forward", forward, 2), ("forward and backward", both, 7)):
        seconds = seconds_per_call(contenders, repeats=1, rounds=3)
        speedup = seconds["cudnn dense"] / seconds["mosaic_gpu"]
        report.add(
            "sparse_attention", f"{case}, {length} tokens", seconds, products * product / report.matmul,
            length=length, pass_=case, faster_than_dense_by=speedup, blocks_for_4_tokens=union,
        )  # fmt: skip


def plot(report: Report, path: Path) -> None:
    """Dense against sparse decode over the context, and the speed-up over dense attention by sequence length."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for index, rows in enumerate(sorted({row["rows"] for row in report.rows if row["kernel"] == "dense decode"})):
        dense = [row for row in report.rows if row["kernel"] == "dense decode" and row["rows"] == rows]
        color = f"C{index}"
        left.plot(
            [r["context"] for r in dense],
            [r["seconds"]["cudnn"] * 1e6 for r in dense],
            "o-",
            color=color,
            label=f"dense, cuDNN, {rows} rows",
        )
        ours = next(
            r for r in report.rows if r["kernel"] == "decode_attention" and r["case"].startswith(f"{rows} rows")
        )
        left.axhline(ours["seconds"]["mosaic_gpu"] * 1e6, color=color, label=f"64 blocks, {rows} rows")
        left.axhline(ours["floor_seconds"] * 1e6, color=color, linestyle=":", label=f"its floor, {rows} rows")
    left.set(
        xscale="log", yscale="log", xlabel="context, tokens", ylabel="microseconds a layer", title="Decode attention"
    )
    left.legend(fontsize=8)
    for case, width in (("forward", -0.2), ("forward and backward", 0.2)):
        chosen = [row for row in report.rows if row.get("pass_") == case]
        right.bar(
            [i + width for i in range(len(chosen))], [r["faster_than_dense_by"] for r in chosen], 0.38, label=case
        )
        right.set_xticks(range(len(chosen)), [f"{r['length'] // 1024}K" for r in chosen])
    right.set(
        xlabel="sequence length", ylabel="times faster than cuDNN dense", title="Sparse attention over a sequence"
    )
    right.legend(fontsize=8)
    figure.suptitle("NOSA-8B shape, bfloat16")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Time what was asked for and write the figures."""
    options = tyro.cli(Options, description=__doc__)
    report = Report(measure_rates().memory, matmul_rate())
    print(f"memory {report.bandwidth / 1e12:.2f} TB/s, matrix products {report.matmul / 1e12:.0f} TFLOP/s", flush=True)
    for name, section in (("decode", decode), ("scores", scores), ("sequence", sequence)):
        if name in options.sections:
            section(report, options)
    options.out.mkdir(parents=True, exist_ok=True)
    result = {
        "environment": environment(),
        "selection": f"synthetic: {options.changed_picks} of the blocks picked by query change from token to token",
        "bytes_per_second": report.bandwidth,
        "operations_per_second": report.matmul,
        "figures": report.rows,
    }
    (options.out / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    if {"decode", "sequence"} <= set(options.sections):
        plot(report, options.out / "kernels.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
