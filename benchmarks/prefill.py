"""How fast prompts are read, block-sparse beside dense attention, through `Engine.prefill`.

    python benchmarks/prefill.py [--layers 4] [--contexts 32768 65536 131072] [--out benchmarks/results]

Layers of the 8B shape with random weights and random tokens, so that neighbouring tokens share no more blocks than the
locality bound makes them: a trained model's share more, and its attention is faster. Each prompt is read at once and in
the engine's pieces; medians of several. The floor is the multiplications, of the weights and of the attended pairs,
over the rate of a large matrix product measured in the same run. On a GPU the kernels that take longest are listed too.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from device_trace import by_kind, device_events
from timing import matmul_rate

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.infer import Engine, FrozenModel, freeze
from nosa_jax.infer.environment import environment
from nosa_jax.infer.plan import DEFAULT_PREFILL_CHUNK, make_plan
from nosa_jax.infer.prefill import compile_pieces, padded_length, piece_length

AT_ONCE = "at once"


@dataclass(frozen=True)
class Options:
    """Time the reading of prompts."""

    shape: Literal["8b", "1b", "tiny"] = "8b"
    layers: int = 4
    contexts: tuple[int, ...] = (131_072, 32_768, 65_536)
    systems: tuple[Literal["nosa", "dense"], ...] = ("nosa", "dense")
    chunks: tuple[int, ...] = (0, DEFAULT_PREFILL_CHUNK)
    """Tokens that are read at a time; 0 is the whole prompt at once."""
    rounds: int = 3
    top: int = 12
    """Kernels to list."""
    seconds: float = 240.0
    """Begin nothing new after so long."""
    out: Path = Path("benchmarks/results")


def multiplications(config: NosaConfig, attention: str, context: int) -> float:
    """Floating-point operations that reading a prompt cannot do without; one product and sum are two."""
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    projections = config.embed_dim * width * (2 * heads + 2 * kv_heads) + 3 * config.embed_dim * config.ffn_dim
    selected = config.budget.total * config.block_size
    every = np.arange(1, context + 1)
    pairs = float((every if attention == "dense" else np.minimum(every, selected)).sum())
    return config.num_layers * (2.0 * context * projections + 4.0 * pairs * heads * width)


def pieces_of(engine: Engine, n_tokens: int) -> set[tuple[int, int]]:
    """The sizes of the pieces that such a prompt is read in, as `compile_pieces` wants them."""
    chunk, layout = engine.plan.prefill_chunk, engine.layout
    return {
        (piece_length(min(chunk, n_tokens - start), start, chunk, layout), padded_length(start, layout) if start else 0)
        for start in range(0, n_tokens, chunk)
    }


def time_prefill(engine: Engine, prompt: np.ndarray, rounds: int) -> float:
    """Median seconds of reading the prompt, after one that may still compile something."""
    compile_pieces(engine.model, engine.layout, pieces_of(engine, len(prompt)))
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(engine.prefill([prompt], max_new_tokens=1))
        taken.append(time.perf_counter() - start)
    engine.check()
    return statistics.median(taken[1:])


def kernels_of(engine: Engine, prompt: np.ndarray, top: int) -> list[dict[str, Any]]:
    """The kinds of kernels that take longest while the prompt is read once more; empty on a CPU."""
    events = device_events(lambda: jax.block_until_ready(engine.prefill([prompt], max_new_tokens=1)))
    return [
        {"kind": kind, "number": number, "ms": total / 1e3}
        for kind, (number, total) in list(by_kind(events).items())[:top]
    ]


def measure(model: FrozenModel, attention: Literal["nosa", "dense"], context: int, options: Options,
            rate: float) -> dict[str, Any]:  # fmt: skip
    """The figures of one system at one length."""
    config = model.config
    # One position is left for the token that follows, which the largest context has no room beyond.
    prompt = np.random.default_rng(context).integers(0, config.vocab_size, context - 1).astype(np.int32)
    result: dict[str, Any] = {"attention": attention, "context": context}
    for chunk in dict.fromkeys(min(size or context, context) for size in options.chunks):
        with Engine(
            model, max_batch=1, max_context=context, attention=attention, offload=attention != "dense",
            prefill_chunk=chunk,
        ) as engine:  # fmt: skip
            seconds = time_prefill(engine, prompt, options.rounds)
            kernels = kernels_of(engine, prompt, options.top)
        stats = jax.devices()[0].memory_stats() or {}
        result[f"in pieces of {chunk:,}" if chunk < context else AT_ONCE] = {
            "chunk": chunk,
            "seconds": seconds,
            "tokens_per_second": context / seconds,
            "of_floor": seconds / (multiplications(config, attention, context) / rate),
            "peak_bytes_so_far": stats.get("peak_bytes_in_use"),
            "kernels": kernels,
        }
    return result


def show(row: dict[str, Any]) -> None:
    """Print the figures of one system at one length."""
    for name, found in ((name, found) for name, found in row.items() if isinstance(found, dict)):
        print(
            f"{row['attention']}, {row['context']} tokens {name}: {found['seconds']:.3f} s, "
            f"{found['tokens_per_second']:,.0f} tokens/s, {found['of_floor']:.2f} x the floor",
            flush=True,
        )
        for kernel in found["kernels"]:
            print(f"  {kernel['ms']:9.2f} ms {kernel['number']:6d} x  {kernel['kind'][:90]}", flush=True)


def planned_bytes(config: NosaConfig, context: int) -> int:
    """Device bytes beside the weights that the plan asks for to read such a prompt with all layers of the shape."""
    plan = make_plan(config, weight_bytes=0, attention="nosa", max_batch=1, max_context=context,
                     prefill_chunk=context)  # fmt: skip
    return plan.device_bytes


def main() -> int:
    """Measure what there is time for, and write the figures after each."""
    options = tyro.cli(Options, description=__doc__)
    started = time.perf_counter()
    whole = {"8b": NosaConfig.nosa_8b, "1b": NosaConfig.nosa_1b, "tiny": NosaConfig.tiny}[options.shape]
    model = freeze(NosaLM.from_config(whole(num_layers=options.layers, param_dtype="bfloat16")))
    rate = matmul_rate(256 if options.shape == "tiny" else 8192)
    rows: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for context in options.contexts:
        for attention in options.systems:
            if time.perf_counter() - started > options.seconds:
                print(f"left out for want of time: {attention} at {context} tokens")
                continue
            rows.append(measure(model, attention, context, options, rate))
            show(rows[-1])
            report = {
                "environment": environment(),
                "shape": f"{options.shape}, {options.layers} layers, random weights",
                "matmul_rate": rate,
                "planned_bytes_all_layers": {str(n): planned_bytes(whole(), n) for n in options.contexts},
                "rows": rows,
            }
            (options.out / "prefill.json").write_text(json.dumps(report, indent=1) + "\n")
    for context in options.contexts:
        there = [row for row in rows if row["context"] == context and AT_ONCE in row]
        seconds = {row["attention"]: row[AT_ONCE]["seconds"] for row in there}
        if len(seconds) == 2:
            print(f"{context} tokens: block-sparse reads {seconds['dense'] / seconds['nosa']:.2f} x as fast as dense")
    return 0


if __name__ == "__main__":
    sys.exit(main())
