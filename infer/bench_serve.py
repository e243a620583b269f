"""`nosa-bench serve`: requests that come and go, through the whole engine, system after system."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich.table import Table

from nosa_jax.errors import InputError
from nosa_jax.ffi import HostMemoryError
from nosa_jax.infer.bench_cases import system_named
from nosa_jax.infer.bench_models import load, model_config
from nosa_jax.infer.bench_output import require_writable, show, writing
from nosa_jax.infer.bench_text import whole_text
from nosa_jax.infer.engine import Engine
from nosa_jax.infer.environment import environment
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.metrics import Times
from nosa_jax.infer.plan import DEFAULT_PREFILL_CHUNK, DoesNotFitError, format_bytes, make_plan, parse_bytes
from nosa_jax.infer.systems import SYSTEMS, System
from nosa_jax.infer.throughput import allocator_bytes
from nosa_jax.infer.traffic import Arrival, Served, make_traffic, serve

REPORT = "serving.json"
_MOST_REQUESTS = 1_000_000
_LONGEST = 86_400  # seconds in which all requests come, on average


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
    -resident one for every block; dense attends to every block, all of them on the device. Where the longest request
    has no more blocks than there are slots, nothing is moved, and the output says so."""
    requests: int = 32
    """How many come."""
    rate: float | None = None
    """Requests a second, at random times (a Poisson process). Default: all come at once."""
    prompt_tokens: tuple[int, int] = (4096, 16_000)
    """Least and most tokens of a prompt; every number between is as likely."""
    new_tokens: tuple[int, int] = (64, 256)
    """Least and most tokens that a request gets."""
    prompt_file: tuple[str, ...] = ()
    """Prompts are stretches of the text of these files instead of random ids."""
    tokenizer: str | None = None
    """For --prompt-file: "bytes", or the path of a tokenizer.json. Default: the model's own."""
    rows: int = 16
    """Requests that are decoded together at most. 0 stands for as many as both budgets hold, and no more than come."""
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

    slots: per row and KV head; None where every block of the longest request has one, and nothing is ever moved.
    planned_bytes: of device memory, weights included. in_use_bytes: what the device's allocator had given out
    afterwards; None where it does not tell. same_tokens: requests that got the tokens of `same_as`, the first system of
    the same attention; None for that one.
    """

    system: str
    rows: int
    slots: int | None
    overlap: bool
    planned_bytes: int
    in_use_bytes: int | None
    warm_up_seconds: float
    served: Served
    same_as: str | None = None
    same_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: without the tokens."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "served"}
        return found | {
            "seconds": self.served.seconds,
            "tokens_per_second": self.served.tokens_per_second,
            "busy": self.served.busy,
            "failures": self.served.failures,
            "metrics": _finite(dataclasses.asdict(self.served.metrics) | {"hit_rate": self.served.metrics.hit_rate}),
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
    if not 1 <= options.requests <= _MOST_REQUESTS:
        raise InputError(f"--requests {options.requests} must lie in 1 .. {_MOST_REQUESTS:,}")
    if options.rate is not None and not options.requests / _LONGEST <= options.rate < float("inf"):
        raise InputError(
            f"--rate {options.rate} must be a number of requests a second at which {options.requests} come within a "
            f"day, at least {options.requests / _LONGEST:.3g}; without it, all come at once"
        )
    if options.seed < 0:
        raise InputError(f"--seed {options.seed} must be at least 0")
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
    for budget in (options.device_budget, options.host_budget):
        parse_bytes(budget)
    if not 1 <= options.steps_per_dispatch <= options.new_tokens[1]:
        raise InputError(
            f"--steps-per-dispatch {options.steps_per_dispatch} must lie in 1 .. {options.new_tokens[1]}, the most "
            "tokens that a request gets"
        )
    return [system_named(name) for name in dict.fromkeys(options.systems)]


def run(options: ServeOptions) -> list[ServedSystem]:
    """Serve with every system that fits; prints each as it is done, and keeps `out` up to date.

    Raises:
      InputError: something asked for makes no sense, or `out` cannot be written; nothing was made then.
      WriteError: `out` can no longer be written.
    """
    systems = check(options)
    config = model_config(options.model, options.layers)
    if options.max_context > config.max_context:
        raise InputError(
            f"--prompt-tokens and --new-tokens let a request have {options.max_context} tokens, and the model has "
            f"{config.max_context} positions; lower one of them"
        )
    text = whole_text(options.prompt_file, options.model, options.tokenizer, config.vocab_size)
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
    asked = dataclasses.asdict(options) | {"out": None if options.out is None else str(options.out)}
    results: list[ServedSystem] = []
    left_out: list[str] = []

    def leave_out(system: System, why: str) -> None:
        left_out.append(f"{system.name}: {why}")
        print(f"\n{left_out[-1]}; left out", flush=True)

    for system in systems:
        try:
            results.append(_serve_with(system, model, arrivals, options, results))
            print(f"\n{describe(results[-1])}\n{results[-1].served.metrics}", flush=True)
        except (DoesNotFitError, HostMemoryError) as error:
            leave_out(system, str(error))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            leave_out(system, "out of device memory; lower --rows, --device-budget or --prompt-tokens")
        if options.out is not None:
            report = {**made_with, "options": asked, "left_out": left_out,
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
    sizes: dict[str, Any] = dict(
        max_context=options.max_context,
        attention=system.attention,
        offload=offload,
        slots=system.layout(model.config, 1, options.max_context).n_slots if offload else None,
        overlap=options.overlap == "on" if offload and options.overlap is not None else None,
        device_budget=None if budget is None else budget + model.nbytes,
        host_budget=options.host_budget if offload else None,
        prefill_chunk=options.prefill_chunk,
    )
    rows = options.rows
    if rows == 0:
        plan = make_plan(model.config, weight_bytes=model.nbytes, max_batch=None, **sizes)
        rows = min(plan.layout.max_batch, len(arrivals))
    with Engine(model, max_batch=rows, steps_per_dispatch=options.steps_per_dispatch, **sizes) as engine:
        layout, planned = engine.layout, engine.plan.device_bytes
        if offload and engine.plan.page_groups < layout.n_blocks:
            raise DoesNotFitError(
                f"--host-budget {options.host_budget} holds {engine.plan.page_groups} blocks, and a request of "
                f"{options.max_context} tokens has {layout.n_blocks}; give at least "
                f"{format_bytes(layout.n_blocks * engine.plan.group_bytes)}, or shorter requests"
            )
        warm_up = engine.warm_up(sampling=False)
        served = serve(engine, arrivals)
        told = allocator_bytes()
    result = ServedSystem(
        system=system.name,
        rows=layout.max_batch,
        slots=layout.n_slots if layout.n_slots < layout.n_blocks else None,
        overlap=layout.overlap,
        planned_bytes=planned,
        in_use_bytes=told["in_use"] if told else None,
        warm_up_seconds=warm_up,
        served=served,
    )
    first = next((r for r in before if SYSTEMS[r.system].attention == system.attention), None)
    if first is None:
        return result
    pairs = zip(served.tokens, first.served.tokens, strict=True)
    same = sum(ours is not None and ours == theirs for ours, theirs in pairs)
    return dataclasses.replace(result, same_as=first.system, same_tokens=same)


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
    slots = "every block in a slot, so none is moved" if result.slots is None else f"{result.slots} slots"
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
            f"{r.served.busy:.0%}",
            ms(m.time_to_first_token, "p50"), ms(m.time_to_first_token, "p99"),
            ms(m.time_per_output_token, "p50"), ms(m.time_per_output_token, "p99"), ms(m.step_seconds, "p50"),
            f"{m.hit_rate:.1%}", f"{m.total.link_gb_per_s:.2f}", str(m.longest_queue), str(len(r.served.failures)),
            "" if r.same_tokens is None else f"{r.same_tokens} of {len(r.served.tokens)}",
        )  # fmt: skip
    return found


def main(options: ServeOptions) -> int:
    """Serve and print; 1 if nothing could be served or a request failed."""
    results = run(options)
    if results:
        print()
        show(table(results))
    for result in results:
        for failure in result.served.failures[:3]:
            print(f"nosa-bench: {result.system}: a request failed with {failure}", file=sys.stderr)
    return 0 if results and not any(result.served.failures for result in results) else 1
