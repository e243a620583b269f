"""Rates of `swap_in` on a GPU, beside those of cudaMemcpyAsync and of plain JAX, in one run.

    python benchmarks/swap.py --out benchmarks/results

Writes swap.json (every figure, with device, versions and commit) and swap.png. All times are medians of several; a time
per call is the slope between two numbers of calls, so that the dispatch of the step is not in it.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from environment import environment

from nosa_jax import ffi
from nosa_jax.ffi import _cuda
from nosa_jax.ffi.handlers import DEFAULT_CTAS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

REPEATS = 9
GRAPH = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
TARGETS = {2**19: 0.83, 2**21: 0.90, 2**23: 0.92}  # bytes per call from here on: share of the memcpy rate


@dataclass(frozen=True)
class Case:
    """One call: how many bytes, in which pages, by how many thread blocks."""

    call_bytes: int
    page_bytes: int = 32 * 2**10
    n_ctas: int = DEFAULT_CTAS

    @property
    def n_entries(self) -> int:
        return self.call_bytes // self.page_bytes

    @property
    def heads(self) -> tuple[int, int]:
        """Rows and KV heads that the pages are spread over: as in a batch of 16 requests, where there are enough."""
        return max(1, min(16, self.n_entries // 2)), min(2, self.n_entries)

    @property
    def per_head(self) -> int:
        rows, heads = self.heads
        return self.n_entries // (rows * heads)

    def arguments(self, pool: ffi.HostPool) -> tuple[jax.Array, ffi.TransferList, jax.Array]:
        """A cache, a list that fills it, and a page table with pages from all over the pool."""
        rows, heads = self.heads
        shape = (rows, heads, self.per_head)
        ids = jnp.broadcast_to(jnp.arange(self.per_head, dtype=jnp.int32), shape)
        load = ffi.TransferList(ids, ids, jnp.full(shape[:2], self.per_head, jnp.int32))
        places = np.random.default_rng(0).permutation(pool.n_pages // heads)[: rows * self.per_head]
        table = jnp.asarray(places.reshape(rows, self.per_head), jnp.int32)
        return jnp.zeros((*shape, 2, self.page_bytes // 256, 64), jnp.bfloat16), load, table


def median_seconds(call: Callable[[], object]) -> float:
    """Median wall time of a call and of everything it started."""
    jax.block_until_ready(call())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def per_call(step: Callable[..., jax.Array], few: int, many: int, *arguments: object) -> float:
    """Seconds of one more call within a compiled step."""
    return (median_seconds(lambda: step(many, *arguments)) - median_seconds(lambda: step(few, *arguments))) / (
        many - few
    )


def body(handle: jax.Array, cache: jax.Array, load: ffi.TransferList, table: jax.Array, n_ctas: int) -> jax.Array:
    return ffi.swap_in(handle, cache, load, table, layer=0, n_layers=1, n_ctas=n_ctas)


@functools.partial(jax.jit, static_argnames=("calls", "n_ctas"))
def in_loop(calls, handle, cache, load, table, n_ctas):
    return jax.lax.fori_loop(0, calls, lambda _, c: body(handle, c, load, table, n_ctas), cache)


@functools.partial(jax.jit, static_argnames=("calls", "n_ctas"), compiler_options=GRAPH)
def in_graph(calls, handle, cache, load, table, n_ctas):
    for _ in range(calls):
        cache = body(handle, cache, load, table, n_ctas)
    return cache


def naive_seconds(case: Case) -> float:
    """The same pages the plain way: gathered by NumPy, sent by device_put, scattered by a jitted update."""
    cache = jnp.zeros((case.n_entries, case.page_bytes), jnp.uint8)
    host = np.zeros((2 * case.n_entries, case.page_bytes), np.uint8)
    pages = np.random.default_rng(0).permutation(2 * case.n_entries)[: case.n_entries]
    slots = jnp.arange(case.n_entries)
    scatter = jax.jit(lambda cache, pages: cache.at[slots].set(pages))
    return median_seconds(lambda: scatter(cache, jax.device_put(host[pages])))


def measure(case: Case, pool: ffi.HostPool, naive: bool) -> dict[str, float]:
    """All figures of one case: bytes, seconds a call, and rates in GB/s."""
    cache, load, table = case.arguments(pool)
    # Enough calls that a slope's noise, some 0.1 ms of dispatch, is small beside what they take.
    many = min(200, max(12, 2**29 // case.call_bytes))
    few = many // 10
    arguments = (jnp.asarray(pool.handle), cache, load, table)
    empty = (arguments[0], cache, load._replace(count=jnp.zeros_like(load.count)), table)
    seconds = {
        "loop": per_call(lambda n, *a: in_loop(n, *a, n_ctas=case.n_ctas), few, many, *arguments),
        "graph": per_call(lambda n, *a: in_graph(n, *a, n_ctas=case.n_ctas), few, many, *arguments),
        "loop_empty": per_call(lambda n, *a: in_loop(n, *a, n_ctas=case.n_ctas), 100, 1100, *empty),
        "memcpy": statistics.median(
            _cuda.time_memcpy(
                pool_device(pool), pool._native.address, cache.unsafe_buffer_pointer(), case.call_bytes, 10, REPEATS
            )
        )
        / 10,
    }
    if naive:
        seconds["naive"] = naive_seconds(case)
    pool.check()
    rates = {
        f"{name}_gb_per_s": case.call_bytes / value / 1e9 for name, value in seconds.items() if "empty" not in name
    }
    share = rates["graph_gb_per_s"] / rates["memcpy_gb_per_s"]
    return asdict(case) | {f"{name}_seconds": value for name, value in seconds.items()} | rates | {"share": share}


def pool_device(pool: ffi.HostPool) -> int:
    assert pool.pinned
    return jax.local_devices(backend="cuda")[0].local_hardware_id


def measure_nothing_moved(pool: ffi.HostPool) -> dict[str, float]:
    """Seconds a call of assign_slots, of an empty swap, and of one after the other, each alone in a CUDA graph.

    For 64 rows of 2 KV heads with 64 of 128 slots wanted, all of them resident.
    """
    rows, heads, wanted_blocks, slots = 64, 2, 64, 128
    wanted = jnp.broadcast_to(jnp.arange(wanted_blocks, dtype=jnp.int32), (rows, heads, wanted_blocks))
    resident = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (rows, heads, slots))
    table = jnp.zeros((rows, 1024), jnp.int32)
    fresh = jnp.full(rows, 1024, jnp.int32)
    empty = ffi.TransferList(wanted, wanted, jnp.zeros((rows, heads), jnp.int32))
    cache = jnp.zeros((rows, heads, slots, 2, pool.page_bytes // 256, 64), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnames=("calls", "assigns", "swaps"), compiler_options=GRAPH)
    def step(calls, handle, cache, resident, age, now, assigns, swaps):
        load = empty
        for _ in range(calls):
            if assigns:
                got = ffi.assign_slots(wanted, resident, age, now, fresh, n_blocks=1024)
                resident, age, load = got.slot_block, got.last_used, got.load
            if swaps:
                cache = ffi.swap_in(handle, cache, load, table, layer=0, n_layers=1)
        return cache, age

    arguments = (jnp.asarray(pool.handle), cache, resident, jnp.zeros_like(resident), jnp.int32(1))
    return {
        name: per_call(functools.partial(step, assigns=assigns, swaps=swaps), 20, 220, *arguments)
        for name, assigns, swaps in (
            ("assign_slots", True, False),
            ("empty_swap", False, True),
            ("assign_slots_and_empty_swap", True, True),
        )
    }


def plot(results: list[dict], by_ctas: list[dict], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    mib = [result["call_bytes"] / 2**20 for result in results]
    for name, label in (
        ("memcpy", "cudaMemcpyAsync, one piece"),
        ("graph", "swap_in in a CUDA graph"),
        ("loop", "swap_in in a fori_loop"),
        ("naive", "NumPy gather + device_put"),
    ):
        left.plot(mib, [result[f"{name}_gb_per_s"] for result in results], marker="o", label=label)
    left.set_xscale("log", base=2)
    left.set(xlabel="MiB per call", ylabel="GB/s", title="Pages of 32 KiB, host to device")
    left.set_ylim(bottom=0)
    left.legend()
    for call_bytes in sorted({result["call_bytes"] for result in by_ctas}):
        rows = [result for result in by_ctas if result["call_bytes"] == call_bytes]
        right.plot(
            [row["n_ctas"] for row in rows],
            [row["share"] for row in rows],
            marker="o",
            label=f"{call_bytes / 2**20:g} MiB",
        )
    right.set_xscale("log", base=2)
    right.set(xlabel="thread blocks", ylabel="share of the memcpy rate", title="In a CUDA graph")
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

    jnp.zeros(1).block_until_ready()  # the backend's start is not the pool's set-up
    page_bytes = Case(0).page_bytes
    with ffi.HostPool(options.pool_gib * 2**30 // page_bytes, page_bytes) as pool:
        setup = {
            "bytes": pool.nbytes,
            "seconds": pool.setup_seconds,
            "touch_seconds": pool.touch_seconds,
            "pin_seconds": pool.pin_seconds,
            "gb_per_s": pool.nbytes / pool.setup_seconds / 1e9,
        }
        print(pool)
        by_size = []
        for power in range(18, 29):
            by_size.append(measure(Case(2**power), pool, naive=True))
            print(
                "{call_bytes:>10} bytes: graph {graph_gb_per_s:5.1f}, loop {loop_gb_per_s:5.1f}, memcpy "
                "{memcpy_gb_per_s:5.1f}, naive {naive_gb_per_s:5.2f} GB/s; share {share:.3f}; empty call "
                "{loop_empty_seconds:.2e} s".format(**by_size[-1]),
                flush=True,
            )
        by_ctas = [
            measure(Case(size, n_ctas=n_ctas), pool, naive=False)
            for size in (2**19, 2**21, 2**23, 2**25)
            for n_ctas in (4, 8, 16, 32, 64, 132)
        ]
        nothing = measure_nothing_moved(pool)
        for name, seconds in nothing.items():
            print(f"{name}, 64 rows x 2 KV heads: {seconds * 1e6:.2f} us")
    by_page = []
    for size in (8, 16, 64):
        with ffi.HostPool(2**30 // (size * 2**10), size * 2**10) as pool:
            by_page.append(measure(Case(2**23, page_bytes=size * 2**10), pool, naive=False))

    reached = {}
    for result in by_size:
        limits = [share for size, share in TARGETS.items() if result["call_bytes"] >= size]
        if limits:
            reached[str(result["call_bytes"])] = {"share": result["share"], "target": limits[-1]}
    report = {
        "environment": environment() | {"extension": ffi.status()},
        "pool_setup": setup,
        "by_size": by_size,
        "by_thread_blocks": by_ctas,
        "by_page": by_page,
        "nothing_moved_seconds": nothing,
        "targets": reached,
    }
    (options.out / "swap.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(by_size, by_ctas, options.out / "swap.png")
    missed = [size for size, value in reached.items() if value["share"] < value["target"]]
    print("all targets reached" if not missed else f"below target at {', '.join(missed)} bytes per call")


if __name__ == "__main__":
    main()
