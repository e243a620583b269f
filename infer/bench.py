"""The command `nosa-bench throughput`: decode throughput of the compared systems on one device, beside the floors."""

import dataclasses
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import matplotlib
import tyro
from rich.console import Console
from rich.table import Table

from nosa_jax.config import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.ffi import HostPool
from nosa_jax.infer.frozen import FrozenModel, freeze
from nosa_jax.infer.plan import format_bytes, parse_bytes
from nosa_jax.infer.rates import DeviceRates, measure_rates
from nosa_jax.infer.throughput import SYSTEMS, Measurement, System, beside_weights, measure
from nosa_jax.infer.trace import PUBLISHED_MISSES, SelectionTrace, synthetic_trace
from nosa_jax.model import NosaLM

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PRESETS = ("nosa_8b", "nosa_1b", "tiny")


@dataclass(frozen=True)
class Throughput:
    """Time decode steps of several systems, contexts and batches within a device budget."""

    model: str = "nosa_8b"
    """nosa_8b, nosa_1b or tiny with random weights, or the folder of a checkpoint."""
    layers: int | None = None
    """Only so many layers of a preset."""
    contexts: tuple[int, ...] = (16_384, 65_536)
    """Tokens per row."""
    batches: tuple[int, ...] = (16, 32, 64)
    """Rows. 0 stands for as many as the budget holds."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    device_budget: str | None = None
    """For the cache and a step's workspace, beside the weights, like 24GiB."""
    host_budget: str = "16GiB"
    """For host pages; rows share pages where they need more, which does not change what is moved."""
    locality: str = "published"
    """published: replay a synthetic trace with the misses measured for NOSA-8B. weights: as the weights select.
    Or the file of a recorded trace."""
    steps: int = 32
    """Decode steps of one dispatch."""
    out: Path | None = None
    """Folder for throughput.json and throughput.png."""
    rows_limit: int = field(default=4096, metadata={"help": "Rows tried at most for batch 0."})


def load(options: Throughput) -> tuple[FrozenModel, str]:
    """The model, and in words what its weights are."""
    if options.model not in PRESETS:
        return freeze(NosaLM.from_pretrained(options.model)), f"the weights of {options.model}"
    changes: dict[str, Any] = {} if options.layers is None else {"num_layers": options.layers}
    config: NosaConfig = getattr(NosaConfig, options.model)()
    config = config.replace(param_dtype=config.dtype, **changes)
    # In one program: initialising parameter by parameter would hold float32 copies.
    return jax.jit(lambda: freeze(NosaLM.from_config(config)))(), "random weights"


def largest_batch(system: System, config: NosaConfig, context: int, budget: int, limit: int) -> int:
    """The most rows whose cache and workspace fit into the budget; 0 if not even one does."""
    fits, too_many = 0, limit + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if beside_weights(system.layout(config, middle, context)) <= budget:
            fits = middle
        else:
            too_many = middle
    return fits


def cases(options: Throughput, config: NosaConfig) -> Iterator[tuple[System, int, int]]:
    """(system, context, batch) of everything asked for that the budget holds; says what it leaves out."""
    unknown = set(options.systems) - set(SYSTEMS)
    if unknown:
        raise InputError(f"unknown systems {', '.join(sorted(unknown))}; known: {', '.join(SYSTEMS)}")
    budget = parse_bytes(options.device_budget)
    for context in options.contexts:
        for name in options.systems:
            system, seen = SYSTEMS[name], set()
            for wanted in options.batches:
                batch = wanted
                if wanted == 0:
                    if budget is None:
                        raise InputError("batch 0 (as many rows as fit) needs a --device-budget")
                    batch = largest_batch(system, config, context, budget, options.rows_limit)
                needed = beside_weights(system.layout(config, max(batch, 1), context))
                if batch == 0 or (budget is not None and needed > budget):
                    print(
                        f"{name}, {context} tokens, {max(batch, 1)} rows: needs {format_bytes(needed)} of "
                        f"{options.device_budget}; left out",
                        flush=True,
                    )
                elif batch not in seen:
                    seen.add(batch)
                    yield system, context, batch


def run(options: Throughput) -> tuple[list[Measurement], dict[str, Any]]:
    """All measurements, and what they were made with."""
    model, weights = load(options)
    config = model.config
    rates = measure_rates()
    print(
        f"{options.model}, {weights}, {format_bytes(model.nbytes)}; memory {rates.memory / 1e9:,.0f} GB/s, "
        f"link {rates.link / 1e9:,.1f} GB/s",
        flush=True,
    )
    results: list[Measurement] = []
    pool: HostPool | None = None
    traces: dict[int, SelectionTrace | None] = {}
    for system, context, batch in cases(options, config):
        layout = system.layout(config, batch, context)
        if layout.offload and pool is None:
            group = layout.pages_per_block * layout.page_bytes
            groups = max(1, (parse_bytes(options.host_budget) or group) // group)
            pool = HostPool(groups * layout.pages_per_block, layout.page_bytes)
        if context not in traces:
            traces[context] = trace_for(options, config, context)
        try:
            result = measure(
                model, system, batch=batch, context=context, rates=rates, trace=traces[context], pool=pool,
                steps=options.steps,
            )  # fmt: skip
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"{system.name}, {context} tokens, {batch} rows: out of device memory; left out", flush=True)
            continue
        results.append(result)
        print(describe(result), flush=True)
    if pool is not None:
        pool.close()
    return results, provenance(options, weights, rates)


def trace_for(options: Throughput, config: NosaConfig, context: int) -> SelectionTrace | None:
    """The trace to replay at a context, or None."""
    if options.locality == "weights":
        return None
    if options.locality == "published":
        if config.budget.total not in PUBLISHED_MISSES:
            raise InputError(
                f"the published locality is of {min(PUBLISHED_MISSES)} selected blocks and this model selects "
                f"{config.budget.total}; give --locality weights or the file of a trace"
            )
        return synthetic_trace(config, context=context - 8 * options.steps, steps=128)
    return SelectionTrace.load(options.locality)


def describe(result: Measurement) -> str:
    """One line."""
    return (
        f"{result.system:16} {result.context:7} tokens {result.batch:4} rows: {result.step_seconds * 1e3:7.2f} ms a "
        f"step, {result.tokens_per_second:8,.0f} tokens/s, {result.of_floor:5.2f} x floor, {result.misses:5.2f} misses"
    )


def provenance(options: Throughput, weights: str, rates: DeviceRates) -> dict[str, Any]:
    """Device, versions, commit and the options."""
    device = jax.devices()[0]
    root = Path(__file__).resolve().parent
    found = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": device.device_kind if device.platform != "cpu" else f"CPU ({platform.machine()})",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": found.stdout.strip() if found.returncode == 0 else "unknown",
        "weights": weights,
        "memory_bytes_per_second": rates.memory,
        "link_bytes_per_second": rates.link,
        "options": {name: str(value) for name, value in dataclasses.asdict(options).items()},
    }


def table(results: list[Measurement]) -> Table:
    """Everything measured."""
    found = Table(title="decode throughput")
    for name in (
        "context",
        "system",
        "rows",
        "slots",
        "ms/step",
        "tokens/s",
        "x floor",
        "misses",
        "MB fetched",
        "device",
    ):
        found.add_column(name, justify="right")
    for r in results:
        found.add_row(
            f"{r.context:,}", r.system, str(r.batch), str(r.slots), f"{r.step_seconds * 1e3:.2f}",
            f"{r.tokens_per_second:,.0f}", f"{r.of_floor:.2f}", f"{r.misses:.2f}", f"{r.fetched_bytes / 1e6:.1f}",
            format_bytes(r.device_bytes),
        )  # fmt: skip
    return found


def plot(results: list[Measurement], path: Path) -> None:
    """Tokens per second over the batch, one panel per context; dotted: the floors."""
    contexts = sorted({r.context for r in results})
    figure, panels = plt.subplots(1, len(contexts), figsize=(5.2 * len(contexts), 4.2), squeeze=False)
    for panel, context in zip(panels[0], contexts, strict=True):
        for index, name in enumerate(dict.fromkeys(r.system for r in results)):
            own = sorted((r for r in results if r.system == name and r.context == context), key=lambda r: r.batch)
            if own:
                batches = [r.batch for r in own]
                panel.plot(batches, [r.tokens_per_second for r in own], "o-", color=f"C{index}", label=name)
                panel.plot(batches, [r.batch / r.floor_seconds for r in own], ":", color=f"C{index}")
        panel.set(title=f"{context:,} tokens", xlabel="rows", ylabel="tokens/s")
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
    panels[0][0].legend(fontsize=8, title="dotted: floor")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Entry point of `nosa-bench`."""
    arguments = sys.argv[1:]
    if arguments[:1] != ["throughput"]:
        print("usage: nosa-bench throughput [options]; nosa-bench throughput --help lists them", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    options = tyro.cli(Throughput, args=arguments[1:], prog="nosa-bench throughput")
    try:
        results, made_with = run(options)
    except (InputError, MemoryError) as error:
        print(f"nosa-bench: {error}", file=sys.stderr)
        return 2
    Console().print(table(results))
    for origin in dict.fromkeys(r.locality for r in results):
        print(f"selection of {', '.join(dict.fromkeys(r.system for r in results if r.locality == origin))}: {origin}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        rows = [
            {**dataclasses.asdict(r), "tokens_per_second": r.tokens_per_second, "of_floor": r.of_floor} for r in results
        ]
        (options.out / "throughput.json").write_text(json.dumps(made_with | {"measurements": rows}, indent=1) + "\n")
        if results:
            plot(results, options.out / "throughput.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
