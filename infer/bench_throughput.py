"""`nosa-bench throughput`: decode throughput of the compared systems on one device, beside the floors."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.ffi import HostPool
from nosa_jax.infer.bench_cases import Case, system_named, target_cases, targets
from nosa_jax.infer.bench_report import describe, plot
from nosa_jax.infer.environment import environment
from nosa_jax.infer.frozen import FrozenModel, freeze
from nosa_jax.infer.plan import format_bytes, parse_bytes
from nosa_jax.infer.random_contents import random_model
from nosa_jax.infer.rates import measure_rates
from nosa_jax.infer.throughput import SYSTEMS, Measurement, Program, Timing, beside_weights, compile_steps, measure
from nosa_jax.infer.trace import PUBLISHED_MISSES, SelectionTrace, synthetic_trace
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.weights import find_model

PRESETS = ("nosa_8b", "nosa_1b", "tiny")
CONTENTS = "caches filled with random contents, not by a prefill"


@dataclass(frozen=True)
class ThroughputOptions:
    """Time decode steps of several systems, contexts and batches within a device budget."""

    model: str = "nosa_8b"
    """nosa_8b, nosa_1b or tiny with random weights, or the folder of a checkpoint."""
    layers: int | None = None
    """Only so many layers of a preset."""
    suite: Literal["targets"] | None = None
    """targets: the rows of the project's targets, the most important first, and what they show. Overrides the sizes."""
    cases: tuple[str, ...] = ()
    """Rows to measure, in this order: SYSTEM:CONTEXT:ROWS, like nosa:64K:16 or dense:96K:max,budget=24GiB; further
    options are locality=weights|published|MISSES and steps=N (of a dispatch). Overrides the sizes."""
    contexts: tuple[int, ...] = (16_384, 65_536)
    """Tokens per row."""
    batches: tuple[int, ...] = (16, 32, 64)
    """Rows. 0 stands for as many as the budget holds."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """nosa and infllmv2 have 2C slots, with -c exactly C; nosa-resident has every block on the device."""
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
    steps: int = 32
    """Steps of a round."""
    rounds: int = 5
    """Rounds, of which the median counts."""
    seconds: float = 3600.0
    """Begin no further row when they are over, or when the next one would likely end after them."""
    compile_together: int = 4
    """Programs that are compiled at the same time, before the first of their rows is measured."""
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


class Traces:
    """The traces to replay, each made or read once."""

    def __init__(self, options: ThroughputOptions, config: NosaConfig, shortest: int) -> None:
        self._options, self._config, self._shortest = options, config, shortest
        self._made: dict[tuple[str, str], SelectionTrace] = {}
        self._recorded: dict[str, SelectionTrace] = {}
        for path in options.trace:
            trace = SelectionTrace.load(path)
            if trace.attention in self._recorded:
                raise InputError(f"--trace: {path} is a second trace of {trace.attention!r}; give one for each system")
            self._recorded[trace.attention] = trace

    def get(self, case: Case, timing: Timing) -> SelectionTrace | None:
        """What a case replays; None where the weights select. Raises InputError where the trace does not fit."""
        attention, config = case.system.attention, self._config
        locality = case.locality or self._options.locality
        if attention == "dense":
            return None
        if case.locality is None and attention in self._recorded:
            trace = self._recorded[attention]
        elif locality == "weights" or (locality == "published" and attention != "nosa"):
            return None
        else:
            trace = self._synthetic(attention, locality)
        first = case.context - timing.total_steps - 1
        trace.require_fit(config, attention, first_length=first, steps=timing.total_steps)
        return trace

    def _synthetic(self, attention: AttentionKind, locality: str) -> SelectionTrace:
        """Made for the shortest context, whose blocks every other has too."""
        total = self._config.budget_for(attention).total
        misses = PUBLISHED_MISSES if locality == "published" else {total: float(locality)}
        if total not in misses:
            raise InputError(
                f"the published locality is of {min(PUBLISHED_MISSES)} selected blocks and this model selects {total}; "
                "give --locality weights, a --trace, or cases with locality=MISSES"
            )
        key = attention, locality
        if key not in self._made:
            most = max(_timing(self._options, n).total_steps for n in self._options.steps_per_dispatch)
            steps = max(most, _timing(self._options, 1).total_steps)
            self._made[key] = synthetic_trace(
                self._config, context=self._shortest - steps - 1, steps=steps, misses=misses, attention=attention
            )
        return self._made[key]


def model_config(options: ThroughputOptions) -> NosaConfig:
    """The config of the model, without its weights."""
    if options.model not in PRESETS:
        if options.layers is not None:
            raise InputError(f"--layers {options.layers} is for {', '.join(PRESETS)}; a checkpoint has its own")
        return find_model(options.model).config
    config: NosaConfig = getattr(NosaConfig, options.model)()
    return config if options.layers is None else config.replace(num_layers=options.layers)


def load(options: ThroughputOptions, config: NosaConfig) -> tuple[FrozenModel, str]:
    """The model, and in words what its weights are."""
    if options.model in PRESETS:
        return random_model(config), "random weights"
    return freeze(find_model(options.model).load()), f"the weights of {options.model}"


def _timing(options: ThroughputOptions, steps_per_dispatch: int) -> Timing:
    return Timing(options.steps, options.rounds, steps_per_dispatch)


def asked_for(options: ThroughputOptions) -> list[Case]:
    """The cases of a suite, of texts, or of all combinations of sizes."""
    for name in ("steps", "rounds", "compile_together"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    if any(n < 1 for n in options.steps_per_dispatch):
        raise InputError(f"--steps-per-dispatch {min(options.steps_per_dispatch)} must be at least 1")
    if options.suite:
        return target_cases()
    if options.cases:
        return [Case.parse(text) for text in options.cases]
    systems = [system_named(name) for name in options.systems]
    return [
        Case(system, context, batch, options.device_budget)
        for context in options.contexts
        for system in systems
        for batch in options.batches
    ]


def rows_to_measure(options: ThroughputOptions, config: NosaConfig) -> Iterator[Row]:
    """What is asked for and fits, each once; says what it leaves out."""
    cases = asked_for(options)
    traces = Traces(options, config, min(case.context for case in cases))
    seen = set()
    for wanted in cases:
        case = wanted.fit(config, options.rows_limit)
        if case is None:
            needed = beside_weights(wanted.system.layout(config, max(wanted.rows, 1), wanted.context))
            print(f"{wanted}: needs {format_bytes(needed)}; left out", flush=True)
            continue
        own = case.steps_per_dispatch
        for steps in options.steps_per_dispatch if own is None else (own,):
            timing = _timing(options, steps)
            if timing.total_steps >= case.context:
                raise InputError(
                    f"{case}: timing takes {timing.total_steps} steps, more than the context has tokens; lower "
                    "--rounds, --steps or --steps-per-dispatch"
                )
            key = (case, steps)
            if key not in seen:
                seen.add(key)
                layout = case.system.layout(config, case.rows, case.context)
                yield Row(case, layout, timing, traces.get(case, timing))


def run(options: ThroughputOptions) -> tuple[list[Measurement], dict[str, Any]]:
    """All measurements, and what they were made with; what is done is in `out` after every row."""
    started = time.perf_counter()
    config = model_config(options)
    rows = list(rows_to_measure(options, config))  # everything that can be refused is, before anything is made
    model, weights = load(options, config)
    jax.block_until_ready(model.parameters)
    loaded = time.perf_counter() - started
    rates = measure_rates()
    made_with = environment() | {
        "weights": weights,
        "contents": CONTENTS,
        "memory_bytes_per_second": rates.memory,
        "link_bytes_per_second": rates.link,
        "options": {name: str(value) for name, value in dataclasses.asdict(options).items()},
        "load_seconds": loaded,
        "left_out": [],
    }
    print(
        f"{options.model}, {weights}, {format_bytes(model.nbytes)} in {loaded:.1f} s; {CONTENTS}; memory "
        f"{rates.memory / 1e9:,.0f} GB/s, link {rates.link / 1e9:,.1f} GB/s",
        flush=True,
    )
    results: list[Measurement] = []
    longest, compiling = 0.0, 0.0  # seconds of a row, and of a group's compilation, at most so far
    with contextlib.ExitStack() as stack:
        pool: HostPool | None = None
        for at in range(0, len(rows), options.compile_together):
            group = rows[at : at + options.compile_together]
            if at and time.perf_counter() - started + compiling + longest > options.seconds:
                made_with["left_out"] += [_out_of_time(row) for row in rows[at:]]
                break
            start = time.perf_counter()
            picks = {id(row.trace): jnp.asarray(row.trace.picks) for row in group if row.trace is not None}
            programs = _compile(model, group, picks)
            compiling = max(compiling, time.perf_counter() - start)
            for row, program in zip(group, programs, strict=True):
                start = time.perf_counter()
                if results and start - started + longest > options.seconds:
                    made_with["left_out"].append(_out_of_time(row))
                    continue
                if isinstance(program, Exception):
                    made_with["left_out"].append(_failed(row, program))
                    continue
                if row.layout.offload and pool is None:
                    pages = row.layout.pages_per_block * row.layout.page_bytes
                    groups = max(1, (parse_bytes(options.host_budget) or pages) // pages)
                    pool = stack.enter_context(HostPool(groups * row.layout.pages_per_block, row.layout.page_bytes))
                try:
                    result = measure(
                        model, row.case.system, program, rates=rates, timing=row.timing, trace=row.trace,
                        picks=picks.get(id(row.trace)), pool=pool, device_budget=row.case.budget,
                    )  # fmt: skip
                except jax.errors.JaxRuntimeError as error:
                    made_with["left_out"].append(_failed(row, error))
                    continue
                longest = max(longest, time.perf_counter() - start)
                results.append(result)
                print(describe(result), flush=True)
                write(options, results, made_with)
    made_with["seconds"] = time.perf_counter() - started
    write(options, results, made_with)
    return results, made_with


def _compile(model: FrozenModel, group: list[Row], picks: dict[int, jax.Array]) -> list[Program | Exception]:
    """The programs of several rows at the same time, or why there is none."""

    def one(row: Row) -> Program | Exception:
        try:
            return compile_steps(model, row.layout, row.timing.steps_per_dispatch, picks.get(id(row.trace)))
        except Exception as error:  # one that does not compile must not take the others' results along
            return error

    with ThreadPoolExecutor(len(group)) as workers:
        return list(workers.map(one, group))


def _out_of_time(row: Row) -> str:
    text = f"{row.case}: no time left"
    print(f"{text}; left out", flush=True)
    return text


def _failed(row: Row, error: Exception) -> str:
    out_of_memory = "RESOURCE_EXHAUSTED" in str(error)
    text = f"{row.case}: " + ("out of device memory" if out_of_memory else f"{type(error).__name__}: {error}")
    print(f"{text}; left out", flush=True)
    return text


def write(options: ThroughputOptions, results: list[Measurement], made_with: dict[str, Any]) -> None:
    """What there is so far, as throughput.json and throughput.png."""
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [
        dataclasses.asdict(r)
        | {"tokens_per_second": r.tokens_per_second, "of_floor": r.of_floor, "device_bytes": r.device_bytes}
        for r in results
    ]
    reached = [dataclasses.asdict(t) | {"reached": t.reached} for t in targets(results)]
    text = json.dumps(made_with | {"measurements": rows, "targets": reached}, indent=1)
    (options.out / "throughput.json").write_text(text + "\n")
    if results:
        plot(results, options.out / "throughput.png")
