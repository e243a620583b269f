"""A long run of the engine with everything that can happen to requests, on any machine: `python benchmarks/soak.py`.

Thousands of requests of random lengths come from several threads into a small engine whose pages they fight for. Some
are cancelled at a random token, some run out of time, some have a callback that raises; now and then reading a prompt
fails, with or without the state that it was given, and a decode step loses all rows. In the end every request must have
ended once; a completed one must have the tokens of its solo run, any other one a beginning of them; all rows and pages
must be free; nothing may have been compiled; and memory must be flat. Exit status 1 and a list of what was not so.
"""

import argparse
import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from nosa_jax.config import NosaConfig
from nosa_jax.infer import Engine, FrozenModel, QueueFullError, SamplingParams, freeze, scheduler
from nosa_jax.infer.environment import environment
from nosa_jax.model import NosaLM

LONGEST_PROMPT, MOST_TOKENS, CONTEXT = 300, 40, 352
CLIENTS = 24
MIB = 2**20


class InjectedFault(RuntimeError):
    """A failure that this script has made."""


@dataclass(frozen=True)
class Source:
    """A prompt with a way to choose tokens, and all the tokens that it gets alone."""

    prompt: np.ndarray
    temperature: float
    seed: int
    tokens: list[int]


@dataclass
class Faults:
    """Breaks things at random, and counts what it broke."""

    rng: random.Random
    reading: float  # the share of pieces of prompts whose reading fails
    every_steps: int  # a step fails about once in so many
    prompts: int = 0
    steps: int = 0
    on: bool = False

    def install(self, engine: Engine) -> None:
        """Put this between the scheduler and what it dispatches."""
        read, step = scheduler.prefill_row, engine._scheduler._step
        since = 0

        def read_or_fail(model: Any, state: Any, *arguments: Any, **options: Any) -> Any:
            if not self.on or self.rng.random() >= self.reading:
                return read(model, state, *arguments, **options)
            self.prompts += 1
            if self.rng.random() < 0.5:
                read(model, state, *arguments, **options)  # takes the state, and what comes of it is lost
            raise InjectedFault("reading the prompt")

        def step_or_fail(*arguments: Any, **options: Any) -> Any:
            nonlocal since
            output = step(*arguments, **options)
            since += 1
            if self.on and since >= self.every_steps:
                since, self.steps = 0, self.steps + 1
                raise InjectedFault("a step")
            return output

        scheduler.prefill_row = read_or_fail
        engine._scheduler._step = step_or_fail


def make_model() -> FrozenModel:
    """The tiny shape with random weights, cis of both signs."""
    model = freeze(NosaLM(NosaConfig.tiny(), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def fill(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        is_a = any(str(getattr(key, "key", key)) == "a_k" for key in path)
        return jax.numpy.asarray(rng.normal(size=x.shape), x.dtype) if is_a else x

    return FrozenModel.of(model.graph, jax.tree_util.tree_map_with_path(fill, model.parameters), model.config)


def make_engine(model: FrozenModel) -> Engine:
    """Eight rows, the fewest slots, and pages for a third of what they could ask for."""
    whole = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim * 4 * CONTEXT
    return Engine(
        model, max_batch=8, max_context=CONTEXT, slots=model.config.budget.total, host_budget=8 * whole // 3,
        prefill_chunk=128, max_queue=12, max_overtaken=4,
    )  # fmt: skip


def make_sources(engine: Engine, count: int, rng: random.Random) -> list[Source]:
    """Prompts of one to `LONGEST_PROMPT` tokens, short ones more often, each run alone to its longest end."""
    sources = []
    for seed in range(count):
        length = round(np.exp(rng.uniform(0, np.log(LONGEST_PROMPT))))
        prompt = np.asarray([rng.randrange(engine.layout.config.vocab_size) for _ in range(length)], np.int32)
        temperature = rng.choice([0.0, 1.0])
        params = SamplingParams(max_new_tokens=MOST_TOKENS, temperature=temperature, seed=seed)
        sources.append(Source(prompt, temperature, seed, engine.submit(prompt, params).result().tokens))
        assert len(sources[-1].tokens) == MOST_TOKENS
    return sources


def one_request(engine: Engine, source: Source, rng: random.Random, refusals: Counter[str]) -> tuple[str, str | None]:
    """Submit, let it meet its fate, and compare. Returns how it ended, and what is wrong with that."""
    eos = rng.choice(source.tokens) if rng.random() < 0.3 else None
    params = SamplingParams(
        max_new_tokens=rng.randint(0, MOST_TOKENS), temperature=source.temperature, seed=source.seed,
        eos_ids=() if eos is None else (eos,),
    )  # fmt: skip
    expected = source.tokens[: params.max_new_tokens]
    if eos in expected:
        expected = expected[: expected.index(eos) + 1]
    fate = rng.choices(["none", "cancel", "callback", "timeout"], [80, 10, 5, 5])[0]
    at = rng.randint(0, MOST_TOKENS // 2)
    told: list[int] = []

    def on_token(token: int) -> None:
        told.append(token)
        if fate == "callback" and len(told) > at:
            raise InjectedFault("a callback")

    while True:
        try:
            timeout = 10.0 ** rng.uniform(-3, 0) if fate == "timeout" else None
            handle = engine.submit(source.prompt, params, timeout=timeout, on_token=on_token)
            break
        except QueueFullError:
            refusals["queue full"] += 1
            time.sleep(0.01 * rng.random())
    if fate == "cancel":
        for count, _ in enumerate(handle_tokens(handle)):
            if count >= at:
                break
        handle.cancel()
    try:
        result = handle.result()
        end, tokens = result.finish_reason, result.tokens
    except InjectedFault:
        end, tokens = "failed", handle.tokens
    if told != tokens or list(handle_tokens(handle)) != tokens:
        return end, f"{end}: told {told}, kept {tokens}"
    if end in ("eos", "length"):
        return end, None if tokens == expected else f"{end}: {tokens}, alone {expected}"
    allowed = {"cancel": {"cancelled", "failed"}, "timeout": {"timeout", "failed"}}.get(fate, {"failed"})
    if end not in allowed or tokens != expected[: len(tokens)]:
        return end, f"{fate} ended as {end}: {tokens}, alone {expected}"
    return end, None


def handle_tokens(handle: Any) -> Any:
    """The tokens of a handle, without the error at their end."""
    try:
        yield from handle
    except InjectedFault:
        return


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak(n_requests: int, n_sources: int, seed: int, *, progress: bool) -> dict[str, Any]:
    """Run it; returns figures and, under "wrong", everything that was not as it must be."""
    rng = random.Random(seed)
    compiled: list[float] = []

    def on_compile(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(on_compile)
    wrong: list[str] = []
    ends: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    with make_engine(make_model()) as engine:
        faults = Faults(random.Random(seed + 1), reading=0.01, every_steps=1500)
        warm_up_seconds = engine.warm_up()
        start = time.perf_counter()
        sources = make_sources(engine, n_sources, rng)
        solo_seconds = time.perf_counter() - start
        faults.install(engine)
        lock = threading.Lock()
        begun = 0
        memory: list[tuple[int, int, int]] = []  # requests done, resident bytes, bytes of live arrays

        def client(number: int) -> None:
            nonlocal begun
            own = random.Random(f"{seed} {number}")
            while True:
                with lock:
                    if begun >= n_requests:
                        return
                    begun += 1
                end, problem = one_request(engine, own.choice(sources), own, refusals)
                with lock:
                    ends[end] += 1
                    if problem is not None:
                        wrong.append(problem)
                    done = sum(ends.values())
                    if done % max(1, n_requests // 20) == 0:
                        gc.collect()
                        memory.append((done, resident_bytes(), sum(x.nbytes for x in jax.live_arrays())))
                        if progress:
                            print(f"{done} done, {memory[-1][1] / MIB:.0f} MiB, {dict(ends)}", file=sys.stderr)

        compiled.clear()
        base = engine.metrics()
        faults.on = True
        start = time.perf_counter()
        with engine.serving():
            threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        seconds = time.perf_counter() - start
        now = engine.metrics()
        if compiled:
            wrong.append(f"{len(compiled)} programs were compiled after the warm-up")
        if sum(ends.values()) != n_requests or now.submitted - base.submitted != n_requests:
            wrong.append(f"{n_requests} requests, {now.submitted - base.submitted} submitted, ended: {dict(ends)}")
        counted = (
            now.completed - base.completed, now.cancelled, now.timed_out, now.failed,
        )  # fmt: skip
        if counted != (ends["eos"] + ends["length"], ends["cancelled"], ends["timeout"], ends["failed"]):
            wrong.append(f"the engine counted {counted}, the clients {dict(ends)}")
        if (now.waiting, now.reading, now.decoding) != (0, 0, 0) or now.pages_free != now.pages_total:
            wrong.append(f"not all free in the end: {now}")
        if engine._scheduler.state is not None and np.asarray(engine._scheduler.state.active).any():
            wrong.append("a row is active in the end")
        early, late = memory[len(memory) // 4], memory[-1]
        growth = late[1] - early[1]
        if growth > 24 * MIB:
            wrong.append(f"resident memory grew by {growth / MIB:.1f} MiB from request {early[0]} to {late[0]}")
    if not refusals:
        wrong.append("no request found the queue full: this run shows too little")
    for name in ("cancelled", "timeout", "failed", "eos", "length"):
        if not ends[name]:
            wrong.append(f"no request ended as {name!r}: this run shows too little")
    return {
        "environment": environment(),
        "requests": n_requests,
        "sources": n_sources,
        "seed": seed,
        "ends": dict(ends),
        "refused": dict(refusals),
        "injected": {"prompts": faults.prompts, "steps": faults.steps},
        "replayed": now.replayed,
        "steps": now.steps - base.steps,
        "seconds": seconds,
        "solo_seconds": solo_seconds,
        "warm_up_seconds": warm_up_seconds,
        "generated_tokens": now.generated_tokens - base.generated_tokens,
        "tokens_per_second": now.tokens_per_second,
        "most_waiting": now.longest_queue,
        "memory": [{"done": d, "resident_mib": r / MIB, "live_arrays_mib": a / MIB} for d, r, a in memory],
        "wrong": wrong,
    }


def main() -> int:
    """Returns 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--sources", type=int, default=1000, help="prompts that the requests are drawn from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write the figures to")
    arguments = parser.parse_args()
    figures = soak(arguments.requests, arguments.sources, arguments.seed, progress=True)
    text = json.dumps(figures, indent=2)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text)
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
