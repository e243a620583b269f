"""Where the time of one decode step goes: kernels, gaps between them, and the host's dispatch.

    python benchmarks/decode_profile.py [--layers 8] [--rows 16] [--context 65536] [--out benchmarks/results]

Layers of the 8B shape with random weights, replaying a selection trace with the misses published for NOSA-8B. Steps are
dispatched one by one and run under JAX's profiler, with CUDA graphs as XLA makes them by default and without any (each
kernel is then launched by itself, and listed whatever the profiler shows of graphs). Before that they are timed without
the profiler. Writes decode_profile.json. On a CPU there are no kernels to list; times are still printed.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import timing
import tyro
from device_trace import DeviceEvent, busy_intervals, by_kind, device_events

from nosa_jax import NosaConfig
from nosa_jax.ffi import HostPool
from nosa_jax.infer import FrozenModel
from nosa_jax.infer.environment import environment
from nosa_jax.infer.random_contents import filled_state, random_model
from nosa_jax.infer.systems import SYSTEMS
from nosa_jax.infer.throughput import WARM_UP_STEPS, Program, compile_steps
from nosa_jax.infer.trace import synthetic_trace

PRESETS = {"8b": NosaConfig.nosa_8b, "1b": NosaConfig.nosa_1b, "tiny": NosaConfig.tiny}
GRAPHS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "off": {"xla_gpu_enable_command_buffer": ""},
    "all": timing.GRAPH,
}
GAP_US = 1.0  # shorter pauses between kernels are the device's own


@dataclass(frozen=True)
class Options:
    """Profile decode steps."""

    shape: Literal["8b", "1b", "tiny"] = "8b"
    layers: int = 8
    rows: int = 16
    context: int = 65_536
    system: str = "nosa"
    """As of nosa-bench throughput."""
    locality: Literal["published", "weights"] = "published"
    """What the steps attend to: a synthetic trace with the published misses, or what random weights select."""
    overlap: bool = False
    """Attend to the blocks that are in slots while the others arrive."""
    graphs: tuple[Literal["default", "off", "all"], ...] = ("default", "off")
    """CUDA graphs as XLA makes them; none; and of everything that can be in one."""
    steps: int = 16
    """Steps under the profiler; twice as many are timed before."""
    top: int = 25
    """Kernels to print."""
    host_budget_gib: int = 4
    """For host pages, which rows share where they need more."""
    out: Path = Path("benchmarks/results")


def sequence(events: list[DeviceEvent], steps: int) -> list[dict[str, Any]]:
    """The kernels of one step in their order: where each begins after the first one and how long it takes, in
    microseconds, as medians over the steps; empty where not all steps ran the same number of kernels."""
    if not events or len(events) % steps:
        return []
    of_steps = [events[i : i + len(events) // steps] for i in range(0, len(events), len(events) // steps)]
    return [
        {
            "kernel": same[0].kind,
            "stream": same[0].stream,
            "begins_us": statistics.median(
                event.start - step[0].start for event, step in zip(same, of_steps, strict=True)
            ),
            "us": statistics.median(event.duration for event in same),
        }
        for same in zip(*of_steps, strict=True)
    ]


def summary(events: list[DeviceEvent], steps: int, layers: int, top: int) -> dict[str, Any]:
    """Kernels, busy time and gaps of a step, and the kinds of kernels that take longest, in microseconds."""
    if not events:
        return {}
    intervals = busy_intervals(events)
    gaps = sorted((b[0] - a[1] for a, b in pairwise(intervals)), reverse=True)
    wide = [gap for gap in gaps if gap >= GAP_US]
    return {
        "kernels_per_step": len(events) / steps,
        "streams": sorted({event.stream for event in events}),
        "kernel_us_per_step": sum(event.duration for event in events) / steps,
        "busy_us_per_step": sum(end - start for start, end in intervals) / steps,
        "span_us_per_step": (intervals[-1][1] - intervals[0][0]) / steps,
        "gaps_per_step": len(wide) / steps,
        "gap_us_per_step": sum(wide) / steps,
        "largest_gaps_us": gaps[:5],
        "sequence": sequence(events, steps),
        "kinds": [
            {"kind": kind, "per_step": number / steps, "us_per_step": total / steps,
             "us_per_layer": total / steps / layers, "us_each": total / number}
            for kind, (number, total) in list(by_kind(events).items())[:top]
        ],
    }  # fmt: skip


def profile(
    model: FrozenModel, program: Program, pool: HostPool | None, picks: Any, options: Options
) -> dict[str, Any]:
    """Times of steps dispatched one by one, and what the profiler saw of them."""
    n_steps = WARM_UP_STEPS + 3 * options.steps + 5
    first = filled_state(program.layout, pool, options.context - n_steps - 1)
    leaves, state = jax.tree.leaves(model), jax.tree.leaves(first)
    del first
    for _ in range(WARM_UP_STEPS):
        state = program.run(leaves, state, picks)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(options.steps):
        state = program.run(leaves, state, picks)
    jax.block_until_ready(state)
    chained = (time.perf_counter() - start) / options.steps
    dispatching, alone = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        state = program.run(leaves, state, picks)
        dispatching.append(time.perf_counter() - start)
        jax.block_until_ready(state)
        alone.append(time.perf_counter() - start)

    def run() -> None:
        nonlocal state
        for _ in range(options.steps):
            state = program.run(leaves, state, picks)
        jax.block_until_ready(state)

    events = device_events(run)
    if pool is not None:
        pool.check()
    return {
        "step_ms": chained * 1e3,
        "single_step_ms": statistics.median(alone) * 1e3,
        "host_dispatch_ms": statistics.median(dispatching) * 1e3,
        "compile_seconds": program.seconds,
        **summary(events, options.steps, options.layers, options.top),
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Print one profile."""
    print(
        f"graphs {name}: {found['step_ms']:.3f} ms a step in a row, {found['single_step_ms']:.3f} alone; the host "
        f"dispatches one in {found['host_dispatch_ms']:.3f} ms; compiled in {found['compile_seconds']:.1f} s"
    )
    if "kinds" not in found:
        print(f"the profiler shows no streams of {jax.devices()[0].device_kind}: kernels are listed on a GPU only")
        return
    print(
        f"  {found['kernels_per_step']:.0f} kernels and copies a step, {found['kernel_us_per_step']:,.0f} us of them; "
        f"busy {found['busy_us_per_step']:,.0f} of {found['span_us_per_step']:,.0f} us, "
        f"{found['gaps_per_step']:.0f} gaps of {GAP_US:g} us and more with {found['gap_us_per_step']:,.0f} us"
    )
    print(f"  {'us/step':>9} {'us/layer':>9} {'us each':>8} {'a step':>7}")
    for row in found["kinds"]:
        print(
            f"  {row['us_per_step']:9.1f} {row['us_per_layer']:9.2f} {row['us_each']:8.2f} {row['per_step']:7.1f}  "
            f"{row['kind'][:90]}"
        )


def main() -> int:
    """Profile and write decode_profile.json."""
    options = tyro.cli(Options, description=__doc__)
    if options.system not in SYSTEMS:
        print(f"decode_profile: --system {options.system!r} is none of {', '.join(SYSTEMS)}", file=sys.stderr)
        return 2
    config = PRESETS[options.shape](num_layers=options.layers)
    system, n_steps = SYSTEMS[options.system], WARM_UP_STEPS + 3 * options.steps + 5
    layout = system.layout(config, options.rows, options.context, overlap=options.overlap)
    trace = None
    if options.locality == "published" and system.attention == "nosa":
        trace = synthetic_trace(config, context=options.context - n_steps - 1, steps=n_steps)
    picks = None if trace is None else jnp.asarray(trace.picks)
    model = random_model(config)
    pool = None
    if layout.offload:
        group = layout.pages_per_block * layout.page_bytes
        groups = max(1, min(options.rows * layout.n_blocks, options.host_budget_gib * 2**30 // group))
        pool = HostPool(groups * layout.pages_per_block, layout.page_bytes)
    report: dict[str, Any] = {
        "environment": environment(),
        "shape": f"{options.shape} width, {options.layers} layers, random weights and cache",
        "system": options.system,
        "rows": options.rows,
        "context": options.context,
        "overlap": layout.overlap,
        "selection": "as it comes from the weights" if trace is None else trace.origin,
        "graphs": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.graphs:
        wanted = GRAPHS[name] if jax.default_backend() == "gpu" else None
        program = compile_steps(model, layout, 1, picks, compiler_options=wanted)
        report["graphs"][name] = profile(model, program, pool, picks, options)
        show(name, report["graphs"][name])
        (options.out / "decode_profile.json").write_text(json.dumps(report, indent=1) + "\n")
    if pool is not None:
        pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
