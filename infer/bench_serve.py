"""`nosa-bench serve`: requests that come and go, through the whole engine, system after system."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from nosa_jax.errors import InputError
from nosa_jax.ffi import HostMemoryError
from nosa_jax.infer.bench_cases import system_named
from nosa_jax.infer.bench_models import load, model_config, own_tokenizer
from nosa_jax.infer.bench_output import require_writable, writing
from nosa_jax.infer.bench_text import joined, read_texts
from nosa_jax.infer.engine import Engine, require_steps_per_dispatch
from nosa_jax.infer.environment import environment
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.metrics import Times
from nosa_jax.infer.plan import DEFAULT_PREFILL_CHUNK, DoesNotFitError, format_bytes, parse_bytes
from nosa_jax.infer.systems import SYSTEMS, System
from nosa_jax.infer.throughput import allocator_bytes
from nosa_jax.infer.traffic import Arrival, Served, make_traffic, serve
from nosa_jax.offload import OutOfPagesError

REPORT = "serving.json"


@dataclass(frozen=True)
class ServeOptions:
    """Serve the same requests with several systems, each with an engine of its own, one after the other."""

    model: str = "nosa_8b"
    """nosa_8b, nosa_1b or tiny with random weights; a config.json, or a folder with no weights beside it, for random
    weights of that shape; or the folder of a checkpoint."""
    layers: int | None = None
    """Only so many layers of a preset or a config file."""
    systems: tuple[str, ...] = ("nosa", "dense")
    """nosa, infllmv2 (picks by score alone) and dma (by the eviction head alone) have 2C slots, with -c exactly C, with
    -resident one for every block; dense attends to every block, all of them on the device."""
    requests: int = 64
    """How many come."""
    rate: float | None = None
    """Requests a second, at random times (a Poisson process). Default: all come at once."""
    prompt_tokens: tuple[int, int] = (1024, 4096)
    """Least and most tokens of a prompt; every number between is as likely."""
    new_tokens: tuple[int, int] = (64, 256)
    """Least and most tokens that a request gets."""
    prompt_file: tuple[str, ...] = ()
    """Prompts are stretches of the text of these files instead of random ids."""
    tokenizer: str | None = None
    """For --prompt-file: "bytes", or the path of a tokenizer.json. Default: the model's own."""
    rows: int = 16
    """Requests that are decoded together at most. 0 stands for as many as both budgets hold."""
    device_budget: str | None = None
    """For the cache and a step's workspace, beside the weights, like 24GiB."""
    host_budget: str | None = None
    """For host pages; requests wait for pages where it holds less than all rows. Default: what the rows need."""
    overlap: Literal["off", "on"] | None = None
    """Whether attention begins while missing blocks arrive. Default: on a GPU, where it was measured to pay."""
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    """Tokens of prompts that are read between two decode steps, at most."""
    steps_per_dispatch: int = 1
    """Decode steps of one dispatch, where no request is kept waiting by it."""
    seed: int = 0
    """Of the requests: lengths, contents and times."""
    out: Path | None = None
    """Folder for serving.json, which grows system by system."""

    @property
    def max_context(self) -> int:
        """Tokens of the longest request."""
        return self.prompt_tokens[1] + self.new_tokens[1]


@dataclass(frozen=True)
class ServedSystem:
    """One system and what it made of the requests.

    planned_bytes: of device memory, weights included. in_use_bytes: what the device's allocator had given out
    afterwards; None where it does not tell. same_tokens: requests that got the tokens that the first system of the same
    attention gave them; None for that one.
    """

    system: str
    rows: int
    slots: int | None
    overlap: bool
    planned_bytes: int
    in_use_bytes: int | None
    warm_up_seconds: float
    served: Served
    same_tokens: int | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: without the tokens."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "served"}
        return found | {
            "seconds": self.served.seconds,
            "tokens_per_second": self.served.tokens_per_second,
            "failures": [f"{type(error).__name__}: {error}" for error in self.served.failures],
            "metrics": _finite(dataclasses.asdict(self.served.metrics)),
        }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """The same with None for NaN, which JSON has no word for."""
    return {
        name: _finite(value) if isinstance(value, dict) else None if value != value else value
        for name, value in values.items()
    }


def check(options: ServeOptions) -> list[System]:
    """The systems that are asked for. Raises InputError for options that make no sense."""
    if not options.systems:
        raise InputError("--systems is empty; give at least one, or leave it out")
    if options.requests < 1:
        raise InputError(f"--requests {options.requests} must be at least 1")
    if options.rate is not None and not 0 < options.rate < float("inf"):
        raise InputError(
            f"--rate {options.rate} must be a positive number of requests a second; without, all come at once"
        )
    for name in ("prompt_tokens", "new_tokens"):
        least, most = getattr(options, name)
        if not 1 <= least <= most:
            raise InputError(f"--{name.replace('_', '-')} {least} {most} must be two numbers, 1 <= least <= most")
    if options.prefill_chunk < 1:
        raise InputError(f"--prefill-chunk {options.prefill_chunk} must be at least 1")
    if options.rows < 0:
        raise InputError(f"--rows {options.rows} must be at least 1, or 0 for as many as fit")
    if options.rows == 0 and options.device_budget is None:
        raise InputError("--rows 0 takes as many as fit; give the --device-budget that they are to fit into")
    parse_bytes(options.device_budget), parse_bytes(options.host_budget)
    require_steps_per_dispatch(options.steps_per_dispatch, options.max_context)
    if options.tokenizer is not None and not options.prompt_file:
        raise InputError(f"--tokenizer {options.tokenizer!r} is for the text of --prompt-file; give that too")
    return [system_named(name) for name in dict.fromkeys(options.systems)]


def run(options: ServeOptions) -> list[ServedSystem]:
    """Serve with every system that fits; prints each as it is done, and keeps `out` up to date.

    Raises:
      InputError: something asked for makes no sense, or `out` cannot be written; nothing was made then.
      WriteError: `out` can no longer be written.
    """
    systems = check(options)
    config = model_config(options.model, options.layers)
    for system in systems:
        try:
            system.layout(config, 1, options.max_context)
        except ValueError as error:
            raise InputError(f"{system.name} cannot serve such requests: {error}") from error
    text = None
    if options.prompt_file:
        own = own_tokenizer(options.model)
        text = joined(read_texts(options.prompt_file, options.model, own, options.tokenizer), config.vocab_size)
    if options.out is not None:
        require_writable(options.out, options.out / REPORT)
    arrivals = make_traffic(
        options.requests, rate=options.rate, prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens,
        vocab_size=config.vocab_size, text=text, seed=options.seed,
    )  # fmt: skip
    model, weights = load(options.model, config)
    requests = describe_traffic(options, arrivals)
    print(f"{options.model}, {weights}, which select, {format_bytes(model.nbytes)}; {requests}", flush=True)
    made_with = environment() | {"weights": weights, "requests": requests}
    options_as_text = {name: str(value) for name, value in dataclasses.asdict(options).items()}
    results: list[ServedSystem] = []
    left_out: list[str] = []
    for system in systems:
        try:
            results.append(_serve_with(system, model, arrivals, options, results))
            print(f"\n{describe(results[-1])}\n{results[-1].served.metrics}", flush=True)
        except (DoesNotFitError, HostMemoryError, OutOfPagesError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            why = "out of device memory" if isinstance(error, jax.errors.JaxRuntimeError) else str(error)
            left_out.append(f"{system.name}: {why}")
            print(f"\n{left_out[-1]}; left out", flush=True)
        if options.out is not None:
            report = {**made_with, "options": options_as_text, "left_out": left_out,
                      "systems": [result.to_dict() for result in results]}  # fmt: skip
            with writing(options.out):
                (options.out / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    return results


def _serve_with(
    system: System,
    model: FrozenModel,
    arrivals: list[Arrival],
    options: ServeOptions,
    before: list[ServedSystem],
) -> ServedSystem:
    offload = system.slots_per_selected is not None
    budget = parse_bytes(options.device_budget)
    with Engine(
        model,
        max_batch=options.rows or None,
        max_context=options.max_context,
        attention=system.attention,
        offload=offload,
        slots=system.layout(model.config, 1, options.max_context).n_slots if offload else None,
        overlap=options.overlap == "on" if offload and options.overlap is not None else None,
        device_budget=None if budget is None else budget + model.nbytes,
        host_budget=options.host_budget if offload else None,
        prefill_chunk=options.prefill_chunk,
        steps_per_dispatch=options.steps_per_dispatch,
    ) as engine:
        warm_up = engine.warm_up(sampling=False)
        served = serve(engine, arrivals)
        told = allocator_bytes()
        layout, planned = engine.layout, engine.plan.device_bytes
    first = next((r for r in before if SYSTEMS[r.system].attention == system.attention), None)
    same = None
    if first is not None:
        same = sum(ours == theirs for ours, theirs in zip(served.tokens, first.served.tokens, strict=True))
    return ServedSystem(
        system=system.name,
        rows=layout.max_batch,
        slots=layout.n_slots if offload else None,
        overlap=layout.overlap,
        planned_bytes=planned,
        in_use_bytes=told["in_use"] if told else None,
        warm_up_seconds=warm_up,
        served=served,
        same_tokens=same,
    )


def describe_traffic(options: ServeOptions, arrivals: list[Arrival]) -> str:
    """The requests in words."""
    prompts, limits = (np.array(x) for x in zip(*((len(a.prompt), a.new_tokens) for a in arrivals), strict=True))
    contents = f"stretches of {', '.join(options.prompt_file)}" if options.prompt_file else "random ids"
    times = "all at once" if options.rate is None else f"{options.rate:g} a second within {arrivals[-1].seconds:.1f} s"
    return (
        f"{len(arrivals)} requests, {times}, with prompts of {prompts.min()} to {prompts.max()} tokens ({contents}; "
        f"{prompts.sum():,} in all) and {limits.min()} to {limits.max()} new ones ({limits.sum():,} in all)"
    )


def describe(result: ServedSystem) -> str:
    """A system's memory and speed in words, to be followed by its metrics."""
    slots = "every block in a slot" if result.slots is None else f"{result.slots} slots"
    in_use = "" if result.in_use_bytes is None else f", {format_bytes(result.in_use_bytes)} in use afterwards"
    return (
        f"{result.system}: {result.rows} rows, {slots}{', overlap' if result.overlap else ''}, "
        f"{format_bytes(result.planned_bytes)} planned with the weights{in_use}, warmed up in "
        f"{result.warm_up_seconds:.1f} s; all requests in {result.served.seconds:.2f} s, "
        f"{result.served.tokens_per_second:,.1f} new tokens a second"
    )


def table(results: list[ServedSystem]) -> Table:
    """All systems side by side; times in milliseconds."""
    found = Table(title="serving, times in milliseconds")
    for name in ("system", "rows", "slots", "tokens/s", "busy", "first token\np50", "p99", "next token\np50", "p99",
                 "step\np50", "hits", "GB/s of\nthe link", "most\nwaiting", "failed",
                 "same tokens\nas the first"):  # fmt: skip
        found.add_column(name, justify="right", overflow="fold")

    def ms(times: Times, name: Literal["p50", "p99"]) -> str:
        return f"{1e3 * getattr(times, name):,.1f}"

    for r in results:
        m = r.served.metrics
        found.add_row(
            r.system, str(r.rows), "" if r.slots is None else str(r.slots), f"{r.served.tokens_per_second:,.1f}",
            f"{m.busy_seconds / r.served.seconds:.0%}",
            ms(m.time_to_first_token, "p50"), ms(m.time_to_first_token, "p99"),
            ms(m.time_per_output_token, "p50"), ms(m.time_per_output_token, "p99"), ms(m.step_seconds, "p50"),
            f"{m.hit_rate:.1%}", f"{m.total.link_gb_per_s:.2f}", str(m.longest_queue), str(len(r.served.failures)),
            "" if r.same_tokens is None else f"{r.same_tokens} of {len(r.served.tokens)}",
        )  # fmt: skip
    return found


def main(options: ServeOptions) -> int:
    """Serve and print; 1 if nothing could be served or a request failed."""
    results = run(options)
    print()
    Console(width=None if sys.stdout.isatty() else 172).print(table(results))
    for result in results:
        for failure in result.served.failures[:3]:
            print(f"nosa-bench: {result.system}: a request failed: {failure}", file=sys.stderr)
    return 0 if results and not any(result.served.failures for result in results) else 1
