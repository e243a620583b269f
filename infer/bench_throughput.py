"""`nosa-bench throughput`: decode throughput of the compared systems on one device, beside the floors."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nosa_jax.config import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.ffi import HostPool
from nosa_jax.infer.bench_cases import Case, compiler_options, system_named, target_cases, targets
from nosa_jax.infer.bench_models import load, model_config
from nosa_jax.infer.bench_options import ThroughputOptions
from nosa_jax.infer.bench_output import require_writable, writing
from nosa_jax.infer.bench_report import describe, plot
from nosa_jax.infer.bench_text import host_bytes, whole_text
from nosa_jax.infer.bench_traces import Traces
from nosa_jax.infer.environment import environment
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.plan import format_bytes, parse_bytes
from nosa_jax.infer.rates import DeviceRates, measure_rates
from nosa_jax.infer.throughput import Measurement, Program, Timing, beside_weights, compile_steps, measure
from nosa_jax.infer.trace import SelectionTrace
from nosa_jax.offload.layout import CacheLayout

CONTENTS = "caches filled with random contents, not by a prefill"
REPORT = "throughput.json"


@dataclass(frozen=True)
class Row:
    """A case with everything that its measurement needs."""

    case: Case
    layout: CacheLayout
    timing: Timing
    trace: SelectionTrace | None

    @property
    def length(self) -> int:
        """Tokens of each row before the first step."""
        return self.layout.max_context - self.timing.total_steps - 1


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
    for name in ("contexts", "steps_per_dispatch"):
        if min(getattr(options, name)) < 1:
            raise InputError(f"--{name.replace('_', '-')} {min(getattr(options, name))} must be at least 1")
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


def contents(options: ThroughputOptions, rows: list[Row], text: np.ndarray | None) -> str:
    """In words, what caches are filled with, and whether there was enough of it."""
    if text is None:
        return CONTENTS
    longest = max((row.layout.max_batch * row.length for row in rows), default=0)
    repeated = f", repeated, since a batch reads up to {longest:,}" if longest > len(text) else ""
    return f"caches filled by a prefill of {', '.join(options.prompt_file)} ({len(text):,} tokens{repeated})"


def rows_to_measure(options: ThroughputOptions, config: NosaConfig) -> Iterator[Row]:
    """What is asked for and fits, each once; says what it leaves out."""
    pages = parse_bytes(options.host_budget)
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
            # Of a text at least one token is read.
            if timing.total_steps + bool(options.prompt_file) >= case.context:
                raise InputError(
                    f"{case}: timing takes {timing.total_steps} steps, more than the context has tokens; take a "
                    "longer one, or lower --rounds, --steps or --steps-per-dispatch"
                )
            layout = case.layout(config)
            key = (layout, case.system, case.budget, case.locality, timing)
            if key not in seen:
                seen.add(key)
                if options.prompt_file and pages is not None and host_bytes(layout) > pages:
                    size = format_bytes(host_bytes(layout))
                    print(f"{case}: its text needs {size} of host pages, see --host-budget; left out", flush=True)
                    continue
                yield Row(case, layout, timing, traces.get(case, timing))


def host_groups(options: ThroughputOptions, rows: list[Row]) -> int:
    """Blocks' worth of host pages in the pool of all rows: as the largest needs, at most what --host-budget holds.

    0 where no row keeps its blocks on the host. The pages of a block are the same in every layout of a model.
    """
    layouts = [row.layout for row in rows if row.layout.offload]
    needed = max((layout.max_batch * layout.n_blocks for layout in layouts), default=0)
    budget = parse_bytes(options.host_budget)
    if not needed or budget is None:
        return needed
    return min(needed, max(1, budget // (layouts[0].pages_per_block * layouts[0].page_bytes)))


def run(options: ThroughputOptions) -> tuple[list[Measurement], dict[str, Any]]:
    """All measurements, and what they were made with; what is done is in `out` after every row.

    Raises:
      InputError: something asked for makes no sense, or `out` cannot be written; nothing was measured then.
      HostMemoryError: the host pages do not fit into free memory.
      WriteError: `out` can no longer be written.
    """
    started = time.perf_counter()
    config = model_config(options.model, options.layers)
    compiler_options(options.xla_options)
    text = whole_text(options.prompt_file, options.model, options.tokenizer, config.vocab_size)
    rows = list(rows_to_measure(options, config))  # everything that can be refused is, before anything is made
    filled = contents(options, rows, text)
    if options.out is not None:
        require_writable(options.out, options.out / REPORT)
    model, weights = load(options.model, config)
    jax.block_until_ready(model.arrays)
    loaded = time.perf_counter() - started
    rates = measure_rates()
    print(
        f"{options.model}, {weights}, {format_bytes(model.nbytes)} in {loaded:.1f} s; {filled}; memory "
        f"{rates.memory / 1e9:,.0f} GB/s, link {rates.link / 1e9:,.1f} GB/s",
        flush=True,
    )
    made_with: dict[str, Any] = {
        **environment(),
        "weights": weights,
        "contents": filled,
        "memory_bytes_per_second": rates.memory,
        "link_bytes_per_second": rates.link,
        "options": {name: str(value) for name, value in dataclasses.asdict(options).items()},
        "load_seconds": loaded,
    }
    groups = host_groups(options, rows)
    with contextlib.closing(Session(options, model, rates, made_with, started, groups, text)) as session:
        for at in range(0, len(rows), options.compile_together):
            session.measure_group(rows[at : at + options.compile_together])
        made_with["seconds"] = time.perf_counter() - started
        session.write()
        if options.out is not None and session.results:
            with writing(options.out):
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
    groups: int  # of the pool: blocks whose pages it holds
    text: np.ndarray | None = None  # to fill caches with; None for random contents
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
        rows = [
            dataclasses.asdict(r)
            | {name: getattr(r, name) for name in ("selection", "tokens_per_second", "of_floor", "device_bytes")}
            for r in self.results
        ]
        reached = [dataclasses.asdict(t) | {"reached": t.reached} for t in targets(self.results)]
        text = json.dumps(self.made_with | {"measurements": rows, "targets": reached}, indent=1)
        with writing(self.options.out):
            (self.options.out / REPORT).write_text(text + "\n")

    def _measure(self, row: Row, program: Program, picks: jax.Array | None) -> None:
        start = time.perf_counter()
        try:
            result = measure(
                self.model, row.case.system, program, rates=self.rates, timing=row.timing, trace=row.trace,
                picks=picks, pool=self._pool_for(row.layout), device_budget=row.case.budget, text=self.text,
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
            self.pool = HostPool(self.groups * layout.pages_per_block, layout.page_bytes)
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
