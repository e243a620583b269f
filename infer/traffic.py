"""Requests that come at times of their own, and what an engine makes of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from nosa_jax.infer.engine import Engine
from nosa_jax.infer.metrics import EngineMetrics
from nosa_jax.infer.sampling import SamplingParams


@dataclass(frozen=True)
class Arrival:
    """A request: its prompt, how many tokens it asks for, and when it comes, in seconds after the first could."""

    seconds: float
    prompt: Int[np.ndarray, " n"]
    new_tokens: int


def make_traffic(
    number: int,
    *,
    rate: float | None,
    prompt_tokens: tuple[int, int],
    new_tokens: tuple[int, int],
    vocab_size: int,
    text: Int[np.ndarray, " n"] | None = None,
    seed: int = 0,
) -> list[Arrival]:
    """Requests in the order of their arrival. The same arguments give the same ones; with another rate, at other times.

    Args:
      number: of requests.
      rate: requests a second; the times between them are exponentially distributed (a Poisson process). None: all come
        at once.
      prompt_tokens, new_tokens: least and most of each; every number between is as likely.
      text: token ids that prompts are stretches of, beginning anywhere and going on at its beginning behind its end;
        None for random ids below `vocab_size`.
    """
    times, rng = (np.random.default_rng([seed, stream]) for stream in range(2))  # any rate has the same requests
    gaps = np.zeros(number) if rate is None else times.exponential(1 / rate, number)
    lengths = rng.integers(*prompt_tokens, number, endpoint=True)
    limits = rng.integers(*new_tokens, number, endpoint=True)
    arrivals = []
    for seconds, length, limit in zip(np.cumsum(gaps).tolist(), lengths, limits.tolist(), strict=True):
        if text is None:
            prompt = rng.integers(vocab_size, size=length, dtype=np.int32)
        else:
            prompt = text[(rng.integers(len(text)) + np.arange(length)) % len(text)]
        arrivals.append(Arrival(seconds, prompt, limit))
    return arrivals


@dataclass(frozen=True)
class Served:
    """What became of some traffic.

    seconds: from the beginning until the last request had ended. tokens: of every request, None where it failed.
    failures: what those failed with, as text, since an exception keeps alive what its frames hold. metrics: of the
    engine.
    """

    seconds: float
    tokens: list[list[int] | None]
    failures: list[str]
    metrics: EngineMetrics

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, times without work included."""
        return self.metrics.generated_tokens / self.seconds

    @property
    def busy(self) -> float:
        """Share of the time that the engine worked: below 1 it waited for requests."""
        return self.metrics.busy_seconds / self.seconds


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> Served:
    """Submit every request at its time, whatever has become of those before it, and wait for all. Greedy.

    A request that fails fails by itself. The engine's metrics should be fresh: see `Engine.warm_up`.
    """
    tokens: list[list[int] | None] = []
    failures: list[str] = []
    with engine.serving():
        start = time.perf_counter()
        handles = []
        for arrival in arrivals:
            time.sleep(max(0.0, arrival.seconds - (time.perf_counter() - start)))
            handles.append(engine.submit(arrival.prompt, SamplingParams(max_new_tokens=arrival.new_tokens)))
        for handle in handles:
            try:
                tokens.append(handle.result().tokens)
            except Exception as error:  # of any kind: the others go on
                tokens.append(None)
                failures.append(f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - start
    return Served(seconds, tokens, failures, engine.metrics())
