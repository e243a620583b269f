"""Rates of swaps on a GPU, beside those of cudaMemcpyAsync and of plain JAX, in one run.

    python benchmarks/swap.py --out benchmarks/results

Builds and runs swap_graph.cu (nvcc), which times the kernels and memcpy in CUDA graphs of the same form; then times
the handlers as JAX calls them. Writes swap.json (every figure, with device, versions and commit) and swap.png. All
times are medians of several; a time per call in a loop is the slope between two numbers of calls, so that the dispatch
of the step is not in it.
"""

import argparse
import functools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from nosa_jax import ffi
from nosa_jax.ffi.handlers import DEFAULT_CTAS
from nosa_jax.infer.environment import environment

matplotlib.use("Agg")
import matplotlib.pyplot as plt

REPEATS = 9
PAGE_BYTES = 32 * 2**10
GRAPH = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
TARGETS = {2**19: 0.83, 2**21: 0.90, 2**23: 0.92}  # bytes per call from here on: share of the memcpy rate
LOOP_TARGET_US = 5.0  # what a call in a loop may cost beyond the same call in a graph


def graph_figures(folder: Path) -> dict[str, list[dict[str, float]]]:
    """What swap_graph.cu prints: microseconds per call, in graphs."""
    root = Path(__file__).parent.parent
    program = folder / "swap_graph"
    subprocess.run(
        ["nvcc", "-std=c++17", "-O3", "-arch=native", f"-I{root / 'ffi/csrc'}", "-isystem", jax.ffi.include_dir(),
         str(root / "benchmarks/swap_graph.cu"), "-o", str(program)],
        check=True,
    )  # fmt: skip
    return json.loads(subprocess.run([program, str(REPEATS)], check=True, capture_output=True, text=True).stdout)


@dataclass(frozen=True)
class Case:
    """One call of so many bytes, its pages spread over the rows and KV heads of a batch of 16 if there are enough."""

    call_bytes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, KV heads and pages of each."""
        pages = self.call_bytes // PAGE_BYTES
        rows = max(1, min(16, pages // 2))
        return rows, 2, pages // rows // 2

    def arguments(self, pool: ffi.HostPool) -> tuple[jax.Array, ffi.TransferList, jax.Array]:
        """A cache, a list that fills it, and a page table with pages from all over the pool."""
        rows, heads, n = self.shape
        ids = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), self.shape)
        load = ffi.TransferList(ids, ids, jnp.full((rows, heads), n, jnp.int32))
        places = np.random.default_rng(0).permutation(pool.n_pages // heads)[: rows * n]
        table = jnp.asarray(places.reshape(rows, n), jnp.int32)
        return jnp.zeros((*self.shape, 2, PAGE_BYTES // 256, 64), jnp.bfloat16), load, table


def median_seconds(call: Callable[[], object]) -> float:
    """Median wall time of a call and of everything it started."""
    jax.block_until_ready(call())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def per_call(step: Callable[..., Any], few: int, many: int, *arguments: object) -> float:
    """Seconds of one more call within a compiled step."""
    return (median_seconds(lambda: step(many, *arguments)) - median_seconds(lambda: step(few, *arguments))) / (
        many - few
    )


@functools.partial(jax.jit, static_argnames="calls")
def in_loop(calls, handle, cache, load, table):
    """`calls` swaps in a `fori_loop`."""

    def body(_, cache):
        return ffi.swap_in(handle, cache, load, table, layer=0, n_layers=1, keep_if_unused=False)

    return jax.lax.fori_loop(0, calls, body, cache)


def naive_seconds(case: Case) -> float:
    """The same pages the plain way: gathered by NumPy, sent by device_put, scattered by a jitted update."""
    n = case.call_bytes // PAGE_BYTES
    cache = jnp.zeros((n, PAGE_BYTES), jnp.uint8)
    host = np.zeros((2 * n, PAGE_BYTES), np.uint8)
    pages = np.random.default_rng(0).permutation(2 * n)[:n]
    slots = jnp.arange(n)
    scatter = jax.jit(lambda cache, pages: cache.at[slots].set(pages))
    return median_seconds(lambda: scatter(cache, jax.device_put(host[pages])))


def add_jax_figures(row: dict[str, float], pool: ffi.HostPool) -> None:
    """To one size of `graph_figures`: the same in a jitted loop, and the plain way; rates in GB/s and shares."""
    case = Case(int(row["call_bytes"]))
    many = min(1000, max(40, 2**30 // case.call_bytes))  # a slope's noise, some 0.1 ms of dispatch, must be small
    arguments = case.arguments(pool)
    row["loop_us"] = per_call(in_loop, many // 10, many, jnp.asarray(pool.handle), *arguments) * 1e6
    row["naive_us"] = naive_seconds(case) * 1e6
    pool.check()
    for name in ("memcpy", "swap_in", "fetch_blocks", "loop", "naive"):
        row[f"{name}_gb_per_s"] = case.call_bytes / row[f"{name}_us"] / 1e3
    row["share"] = row["memcpy_us"] / row["swap_in_us"]
    row["fetch_share"] = row["memcpy_us"] / row["fetch_blocks_us"]
    row["loop_extra_us"] = row["loop_us"] - row["swap_in_us"]


def nothing_moves_in_jax(pool: ffi.HostPool) -> dict[str, float]:
    """Microseconds of calls that move nothing, one after the other in a CUDA graph that XLA makes.

    For 16 rows of 2 KV heads with 64 of 128 slots wanted, all of them resident.
    """
    rows, heads, wanted_blocks, slots = 16, 2, 64, 128
    wanted = jnp.broadcast_to(jnp.arange(wanted_blocks, dtype=jnp.int32), (rows, heads, wanted_blocks))
    resident = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (rows, heads, slots))
    table = jnp.zeros((rows, 1024), jnp.int32)
    fresh = jnp.full(rows, 1024, jnp.int32)
    cache = jnp.zeros((rows, heads, slots, 2, PAGE_BYTES // 256, 64), jnp.bfloat16)
    where = {"layer": 0, "n_layers": 1, "keep_if_unused": False}

    @functools.partial(jax.jit, static_argnames=("calls", "kind"), compiler_options=GRAPH)
    def step(calls, handle, cache, resident, age, now, kind):
        load = ffi.TransferList(wanted, wanted, jnp.zeros((rows, heads), jnp.int32))
        for _ in range(calls):
            if kind == "fetch_blocks":
                got = ffi.fetch_blocks(handle, cache, wanted, resident, age, now, fresh, table, **where)
                cache, resident, age = got.cache, got.slot_block, got.last_used
            if "assign_slots" in kind:
                assigned = ffi.assign_slots(wanted, resident, age, now, fresh, n_blocks=1024)
                resident, age, load = assigned.slot_block, assigned.last_used, assigned.load
            if "swap_in" in kind:
                cache = ffi.swap_in(handle, cache, load, table, **where)
        return cache, age

    arguments = (jnp.asarray(pool.handle), cache, resident, jnp.zeros_like(resident), jnp.int32(1))
    return {
        kind: per_call(functools.partial(step, kind=kind), 20, 220, *arguments) * 1e6
        for kind in ("assign_slots", "swap_in", "assign_slots and swap_in", "fetch_blocks")
    }


def pool_setup(gib: int) -> dict[str, Any]:
    """Set-up of two pools, one after the other.

    On a virtual machine whose memory grows as it is used, the first is as slow as the host is in handing memory out;
    the second shows what the pool's own work takes.
    """
    found: dict[str, Any] = {"bytes": gib * 2**30}
    for name in ("first", "second"):
        with ffi.HostPool(gib * 2**30 // PAGE_BYTES, PAGE_BYTES) as pool:
            found[name] = {
                "touch_seconds": pool.touch_seconds,
                "pin_seconds": pool.pin_seconds,
                "gb_per_s": pool.nbytes / pool.setup_seconds / 1e9,
            }
            print(pool)
    return found


def plot(results: list[dict[str, float]], by_ctas: list[dict[str, float]], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    mib = [result["call_bytes"] / 2**20 for result in results]
    for name, label in (
        ("memcpy", "cudaMemcpyAsync in a CUDA graph, one piece"),
        ("swap_in", "swap_in in a CUDA graph"),
        ("fetch_blocks", "fetch_blocks in a CUDA graph, all missing"),
        ("loop", "swap_in in a jitted fori_loop"),
        ("naive", "NumPy gather + device_put"),
    ):
        left.plot(mib, [result[f"{name}_gb_per_s"] for result in results], marker="o", label=label)
    left.set_xscale("log", base=2)
    left.set(xlabel="MiB per call", ylabel="GB/s", title="Pages of 32 KiB, host to device")
    left.set_ylim(bottom=0)
    left.legend()
    for row in by_ctas:
        n_ctas = sorted(int(name.split("_")[2]) for name in row if name.startswith("swap_in_"))
        right.plot(
            n_ctas,
            [row["memcpy_us"] / row[f"swap_in_{n}_us"] for n in n_ctas],
            marker="o",
            label=f"{row['call_bytes'] / 2**20:g} MiB",
        )
    right.axvline(DEFAULT_CTAS, color="grey", linewidth=0.8)
    right.set_xscale("log", base=2)
    right.set(xlabel="thread blocks", ylabel="share of the memcpy rate", title="swap_in in a CUDA graph")
    right.set_ylim(0, 1.05)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--pool-gib", type=int, default=16)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory() as folder:
        figures = graph_figures(Path(folder))
    jnp.zeros(1).block_until_ready()  # the backend's start is not the pool's set-up
    setup = pool_setup(options.pool_gib)
    with ffi.HostPool(4 * 2**30 // PAGE_BYTES, PAGE_BYTES) as pool:
        for row in figures["by_size"]:
            add_jax_figures(row, pool)
            print(
                "{call_bytes:>10} bytes: memcpy {memcpy_us:8.2f} us, swap_in {swap_in_us:8.2f} (share {share:.3f}), "
                "fetch_blocks {fetch_blocks_us:8.2f} ({fetch_share:.3f}), loop +{loop_extra_us:.2f} us, naive "
                "{naive_us:8.1f}".format(**row),
                flush=True,
            )
        still = nothing_moves_in_jax(pool)
    for name, value in still.items():
        print(f"{name}, nothing moves, 16 rows x 2 KV heads, in XLA's graph: {value:.2f} us")
    for row in figures["nothing_moves"]:
        print("nothing moves, in a graph:", row)

    reached = {}
    for row in figures["by_size"]:
        if limits := [share for size, share in TARGETS.items() if row["call_bytes"] >= size]:
            reached[str(row["call_bytes"])] = {"share": row["share"], "target": limits[-1]}
    report = {
        "environment": environment() | {"extension": ffi.status()},
        "pool_setup": setup,
        **figures,
        "nothing_moves_in_jax_us": still,
        "targets": reached,
        "loop_target_us": LOOP_TARGET_US,
    }
    (options.out / "swap.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(figures["by_size"], figures["by_thread_blocks"], options.out / "swap.png")
    missed = [size for size, value in reached.items() if value["share"] < value["target"]]
    slow = [row["call_bytes"] for row in figures["by_size"] if row["loop_extra_us"] > LOOP_TARGET_US]
    print(f"share below target at {missed or 'no'} bytes per call; loop above {LOOP_TARGET_US} us at {slow or 'no'}")


if __name__ == "__main__":
    main()
