"""`nosa-bench throughput`: decode throughput of the compared systems on one device, beside the floors."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from nosa_jax.config import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.ffi import HostPool
from nosa_jax.infer.bench_cases import Case, compiler_options, system_named, target_cases, targets
from nosa_jax.infer.bench_models import load, model_config
from nosa_jax.infer.bench_report import describe, plot
from nosa_jax.infer.bench_traces import Traces
from nosa_jax.infer.environment import environment
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.plan import format_bytes, parse_bytes
from nosa_jax.infer.rates import DeviceRates, measure_rates
from nosa_jax.infer.throughput import SYSTEMS, Measurement, Program, Timing, beside_weights, compile_steps, measure
from nosa_jax.infer.trace import SelectionTrace
from nosa_jax.offload.layout import CacheLayout

CONTENTS = "caches filled with random contents, not by a prefill"


@dataclass(frozen=True)
class ThroughputOptions:
    """Time decode steps of several systems, contexts and batches within a device budget."""

    model: str = "nosa_8b"
    """nosa_8b, nosa_1b or tiny with random weights; a config.json, or a folder with no weights beside it, for random
    weights of that shape; or the folder of a checkpoint."""
    layers: int | None = None
    """Only so many layers of a preset or a config file."""
    suite: Literal["targets"] | None = None
    """targets: the rows of the project's targets, the most important first, and what they show. Overrides the sizes."""
    cases: tuple[str, ...] = ()
    """Rows to measure, in this order: SYSTEM:CONTEXT:ROWS, like nosa:64K:16 or dense:96K:max,budget=24GiB; further
    options are locality=weights|published|MISSES, steps=N (of a dispatch) and overlap=on|off. Overrides the sizes."""
    contexts: tuple[int, ...] = (16_384, 65_536)
    """Tokens per row."""
    batches: tuple[int, ...] = (16, 32, 64)
    """Rows. 0 stands for as many as the budget holds."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """nosa, infllmv2 (picks by score alone) and dma (by the eviction head alone) have 2C slots, with -c exactly C, with
    -resident one for every block; dense attends to every block, all of them on the device."""
    device_budget: str | None = None
    """For the cache and a step's workspace, beside the weights, like 24GiB."""
    host_budget: str = "16GiB"
    """For host pages; rows share pages where they need more, which does not change what is moved."""
    locality: Literal["published", "weights"] = "published"
    """Of systems without a trace. published: NOSA replays a synthetic trace with the misses measured for NOSA-8B, and
    the others select by the weights. weights: all do."""
    trace: tuple[Path, ...] = ()
    """Files of nosa-bench trace to replay, one for each system that selects."""
    steps_per_dispatch: tuple[int, ...] = (8,)
    """Decode steps of one program; each number is a row of its own."""
    overlap: tuple[Literal["off", "on"], ...] = ("off",)
    """Whether attention begins while missing blocks arrive; each is a row of its own."""
    steps: int = 128
    """Steps of a round."""
    rounds: int = 3
    """Rounds, of which the median counts."""
    seconds: float = 3600.0
    """Begin no further row when they are over, or when the next one would likely end after them."""
    compile_together: int = 4
    """Programs that are compiled at the same time, before the first of their rows is measured."""
    xla_options: tuple[str, ...] = ()
    """Compiler options to try, as NAME=VALUE, like xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL."""
    rows_limit: int = 4096
    """Rows tried at most for batch 0."""
    out: Path | None = None
    """Folder for throughput.json, which grows row by row, and throughput.png."""


@dataclass(frozen=True)
class Row:
    """A case with everything that its measurement needs."""

    case: Case
    layout: CacheLayout
    timing: Timing
    trace: SelectionTrace | None


def _timing(options: ThroughputOptions, steps_per_dispatch: int) -> Timing:
    return Timing(options.steps, options.rounds, steps_per_dispatch)


def asked_for(options: ThroughputOptions) -> list[Case]:
    """The cases of a suite, of texts, or of all combinations of sizes."""
    for name in ("steps", "rounds", "compile_together"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    for name in ("contexts", "batches", "systems", "steps_per_dispatch", "overlap"):
        if not getattr(options, name):
            raise InputError(f"--{name.replace('_', '-')} is empty; give at least one, or leave it out")
    if any(batch < 0 for batch in options.batches):
        raise InputError(f"--batches {min(options.batches)} must be at least 1, or 0 for as many as fit")
    if any(n < 1 for n in options.steps_per_dispatch):
        raise InputError(f"--steps-per-dispatch {min(options.steps_per_dispatch)} must be at least 1")
    if options.suite:
        return target_cases()
    if options.cases:
        cases = [Case.parse(text) for text in options.cases]
        return [dataclasses.replace(case, budget=case.budget or options.device_budget) for case in cases]
    systems = [system_named(name) for name in options.systems]
    return [
        Case(system, context, batch, options.device_budget)
        for context in options.contexts
        for system in systems
        for batch in options.batches
    ]


def variants(case: Case, options: ThroughputOptions) -> Iterator[tuple[Case, Timing]]:
    """A case with each of the command's overlaps and dispatches that it leaves open."""
    overlaps = [name == "on" for name in options.overlap] if case.overlap is None else [case.overlap]
    own = case.steps_per_dispatch
    for overlap in overlaps:
        for steps in options.steps_per_dispatch if own is None else (own,):
            yield dataclasses.replace(case, overlap=overlap), _timing(options, steps)


def rows_to_measure(options: ThroughputOptions, config: NosaConfig) -> Iterator[Row]:
    """What is asked for and fits, each once; says what it leaves out."""
    cases = asked_for(options)
    each = [_timing(options, n).total_steps for n in {*options.steps_per_dispatch, 1}]
    each += [_timing(options, case.steps_per_dispatch).total_steps for case in cases if case.steps_per_dispatch]
    traces = Traces(options.trace, options.locality, config, min(case.context for case in cases), max(each))
    seen = set()
    for wanted in cases:
        fitting = wanted.fit(config, options.rows_limit)
        if fitting is None:
            needed = beside_weights(wanted.layout(config))
            print(f"{wanted}: needs {format_bytes(needed)}; left out", flush=True)
            continue
        for case, timing in variants(fitting, options):
            if timing.total_steps >= case.context:
                raise InputError(
                    f"{case}: timing takes {timing.total_steps} steps, more than the context has tokens; lower "
                    "--rounds, --steps or --steps-per-dispatch"
                )
            layout = case.layout(config)
            key = (layout, case.system, case.budget, case.locality, timing)
            if key not in seen:
                seen.add(key)
                yield Row(case, layout, timing, traces.get(case, timing))


def run(options: ThroughputOptions) -> tuple[list[Measurement], dict[str, Any]]:
    """All measurements, and what they were made with; what is done is in `out` after every row."""
    started = time.perf_counter()
    config = model_config(options.model, options.layers)
    compiler_options(options.xla_options)
    rows = list(rows_to_measure(options, config))  # everything that can be refused is, before anything is made
    model, weights = load(options.model, config)
    jax.block_until_ready(model.parameters)
    loaded = time.perf_counter() - started
    rates = measure_rates()
    print(
        f"{options.model}, {weights}, {format_bytes(model.nbytes)} in {loaded:.1f} s; {CONTENTS}; memory "
        f"{rates.memory / 1e9:,.0f} GB/s, link {rates.link / 1e9:,.1f} GB/s",
        flush=True,
    )
    made_with: dict[str, Any] = {
        **environment(),
        "weights": weights,
        "contents": CONTENTS,
        "memory_bytes_per_second": rates.memory,
        "link_bytes_per_second": rates.link,
        "options": {name: str(value) for name, value in dataclasses.asdict(options).items()},
        "load_seconds": loaded,
    }
    with contextlib.closing(Session(options, model, rates, made_with, started)) as session:
        for at in range(0, len(rows), options.compile_together):
            session.measure_group(rows[at : at + options.compile_together])
        made_with["seconds"] = time.perf_counter() - started
        session.write()
        if options.out is not None and session.results:
            plot(session.results, options.out / "throughput.png")
        return session.results, made_with


@dataclass
class Session:
    """Measures row after row with one model and one pool, and keeps to the time."""

    options: ThroughputOptions
    model: FrozenModel
    rates: DeviceRates
    made_with: dict[str, Any]
    started: float  # by time.perf_counter
    results: list[Measurement] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    longest: float = 0.0  # seconds of a row, at most so far
    compiling: float = 0.0  # seconds until the programs of a group were there, at most so far
    pool: HostPool | None = None

    def close(self) -> None:
        """Free the host pages."""
        if self.pool is not None:
            self.pool.close()

    def measure_group(self, rows: list[Row]) -> None:
        """Compile the programs of some rows at the same time, then measure one row after the other."""
        if self.results and self._seconds_left() < self.compiling + self.longest:
            for row in rows:
                self._leave_out(row, "no time left")
            return
        start = time.perf_counter()
        picks = {id(row.trace): jnp.asarray(row.trace.picks) for row in rows if row.trace is not None}
        programs = _compile(self.model, rows, picks, compiler_options(self.options.xla_options))
        self.compiling = max(self.compiling, time.perf_counter() - start)
        for row, program in zip(rows, programs, strict=True):
            if self.results and self._seconds_left() < self.longest:
                self._leave_out(row, "no time left")
            elif isinstance(program, Exception):
                self._leave_out(row, f"{type(program).__name__}: {program}")
            else:
                self._measure(row, program, picks.get(id(row.trace)))

    def write(self) -> None:
        """What there is so far, as throughput.json."""
        self.made_with["left_out"] = self.left_out
        if self.options.out is None:
            return
        self.options.out.mkdir(parents=True, exist_ok=True)
        rows = [
            dataclasses.asdict(r)
            | {name: getattr(r, name) for name in ("selection", "tokens_per_second", "of_floor", "device_bytes")}
            for r in self.results
        ]
        reached = [dataclasses.asdict(t) | {"reached": t.reached} for t in targets(self.results)]
        text = json.dumps(self.made_with | {"measurements": rows, "targets": reached}, indent=1)
        (self.options.out / "throughput.json").write_text(text + "\n")

    def _measure(self, row: Row, program: Program, picks: jax.Array | None) -> None:
        start = time.perf_counter()
        try:
            result = measure(
                self.model, row.case.system, program, rates=self.rates, timing=row.timing, trace=row.trace,
                picks=picks, pool=self._pool_for(row.layout), device_budget=row.case.budget,
            )  # fmt: skip
        except jax.errors.JaxRuntimeError as error:
            memory = "RESOURCE_EXHAUSTED" in str(error)
            self._leave_out(row, "out of device memory" if memory else f"{type(error).__name__}: {error}")
            return
        self.longest = max(self.longest, time.perf_counter() - start)
        self.results.append(result)
        print(describe(result), flush=True)
        self.write()

    def _pool_for(self, layout: CacheLayout) -> HostPool | None:
        """One pool serves all rows: a page and the pages of a block are the same in every layout of a model."""
        if layout.offload and self.pool is None:
            nbytes = layout.pages_per_block * layout.page_bytes
            groups = max(1, (parse_bytes(self.options.host_budget) or nbytes) // nbytes)
            self.pool = HostPool(groups * layout.pages_per_block, layout.page_bytes)
        return self.pool if layout.offload else None

    def _seconds_left(self) -> float:
        return self.options.seconds - (time.perf_counter() - self.started)

    def _leave_out(self, row: Row, why: str) -> None:
        self.left_out.append(f"{row.case}: {why}")
        print(f"{self.left_out[-1]}; left out", flush=True)


def _compile(
    model: FrozenModel, group: list[Row], picks: dict[int, jax.Array], xla: dict[str, str | bool] | None
) -> list[Program | Exception]:
    """The programs of several rows at the same time, or why there is none."""

    def one(row: Row) -> Program | Exception:
        try:
            return compile_steps(model, row.layout, row.timing.steps_per_dispatch, picks.get(id(row.trace)), xla)
        except Exception as error:  # one that does not compile must not take the others' results along
            return error

    with ThreadPoolExecutor(len(group)) as workers:
        return list(workers.map(one, group))
