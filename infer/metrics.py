"""Counters and times of an engine."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_SMALLEST = 1e-6  # seconds; shorter times are counted as this
_STEPS = 8  # buckets per factor of 2: a quantile is right to 9 %
_BUCKETS = 36 * _STEPS  # up to 19 hours
_ENDS = ("completed", "cancelled", "timeout", "error")


@dataclass(frozen=True)
class Times:
    """Durations in seconds. The quantiles are upper bounds that lie within 9 % of the true ones."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    longest: float


class Histogram:
    """Durations in buckets of equal ratio: a fixed number of counters, however many durations there are."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._sum = 0.0
        self._longest = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        place = math.ceil(math.log2(max(seconds, _SMALLEST) / _SMALLEST) * _STEPS)
        self._counts[min(place, _BUCKETS - 1)] += 1
        self._sum += seconds
        self._longest = max(self._longest, seconds)

    def times(self) -> Times:
        """Mean, quantiles and longest; NaN without any."""
        counts = np.cumsum(self._counts)
        total = int(counts[-1])
        if not total:
            return Times(0, *[math.nan] * 5)

        def quantile(share: float) -> float:
            place = int(np.searchsorted(counts, math.ceil(share * total)))
            return min(_SMALLEST * 2 ** (place / _STEPS), self._longest)

        return Times(total, self._sum / total, quantile(0.5), quantile(0.9), quantile(0.99), self._longest)


@dataclass(frozen=True)
class StepMetrics:
    """One decode step, summed over layers, KV heads and rows.

    rows: that were decoded. seconds: from the step before, or from its dispatch where the device was idle; steps that
    were dispatched together share their time evenly.
    """

    rows: int
    seconds: float
    hits: int
    misses: int
    selected: int
    kept: int
    bytes_fetched: int

    @property
    def locality(self) -> float:
        """Share of the selected blocks that the step before had selected too; NaN where nothing was selected."""
        return self.kept / self.selected if self.selected else math.nan

    @property
    def link_gb_per_s(self) -> float:
        """10^9 bytes fetched from the host per second of the step, computation included."""
        return self.bytes_fetched / self.seconds / 1e9 if self.seconds else math.nan


@dataclass(frozen=True)
class EngineMetrics:
    """What an engine has done since it was made or `warm_up` returned, and what it holds now (docs/09). Print it.

    submitted, completed, cancelled, timed_out, failed: requests. replayed: times that a request was begun again
      after a fault that was not its own.
    waiting, reading, decoding: requests that are there now; longest_queue: most that waited at one time.
    pages_free, pages_total: page groups of the host pool, each one block of a row.
    prompt_tokens, generated_tokens: tokens read and generated. busy_seconds: time that the engine worked.
    total, last: all decode steps together, and the latest one (None before the first).
    min_locality: least locality of any layer, KV head and step with a full selection; NaN where there was none.
    time_to_first_token, time_per_output_token, step_seconds: per request from submission, per token after the first,
      per decode step. A token counts as coming with its step, also where its caller gets it with those of later ones.
    """

    submitted: int
    completed: int
    cancelled: int
    timed_out: int
    failed: int
    replayed: int
    waiting: int
    reading: int
    decoding: int
    longest_queue: int
    pages_free: int
    pages_total: int
    prompt_tokens: int
    generated_tokens: int
    busy_seconds: float
    steps: int
    total: StepMetrics
    last: StepMetrics | None
    min_locality: float
    time_to_first_token: Times
    time_per_output_token: Times
    step_seconds: Times

    def __str__(self) -> str:
        def times(name: str, t: Times) -> str:
            columns = (t.mean, t.p50, t.p90, t.p99, t.longest)
            return f"{name:24}{t.count:>8}" + "".join(f"{1e3 * seconds:>11.2f}" for seconds in columns)

        total, last = self.total, self.last
        lines = [
            f"requests     {self.submitted} submitted, {self.completed} completed, {self.cancelled} cancelled, "
            f"{self.timed_out} out of time, {self.failed} failed, {self.replayed} replayed",
            f"now          {self.waiting} waiting (most {self.longest_queue}), {self.reading} reading, {self.decoding} "
            f"decoding; {self.pages_free} of {self.pages_total} pages free",
            f"tokens       {self.prompt_tokens} read, {self.generated_tokens} generated: {self.tokens_per_second:.1f} "
            f"a second of {self.busy_seconds:.2f} s of work",
            f"blocks       {total.hits} hits, {total.misses} misses ({self.hit_rate:.2%} hits), locality "
            f"{total.locality:.4f}, least {self.min_locality:.4f}",
            f"link         {total.bytes_fetched:,} bytes fetched in {self.steps} steps, "
            f"{total.link_gb_per_s:.3f} GB/s while decoding",
        ]
        if last is not None:
            lines.append(
                f"last step    {last.rows} rows, {1e3 * last.seconds:.2f} ms, {last.hits} hits, {last.misses} misses, "
                f"{last.bytes_fetched:,} bytes, locality {last.locality:.4f}"
            )
        lines += [
            f"{'milliseconds':24}{'count':>8}"
            + "".join(f"{name:>11}" for name in ("mean", "p50", "p90", "p99", "longest")),
            times("to first token", self.time_to_first_token),
            times("per output token", self.time_per_output_token),
            times("per step", self.step_seconds),
        ]
        return "\n".join(lines)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of work; NaN before any."""
        return self.generated_tokens / self.busy_seconds if self.busy_seconds else math.nan

    @property
    def hit_rate(self) -> float:
        """Hits over hits and misses of all steps; NaN where nothing was asked for."""
        asked = self.total.hits + self.total.misses
        return self.total.hits / asked if asked else math.nan


@dataclass
class Recorder:
    """Adds up what the scheduler reports. Only host numbers: nothing here waits for the device."""

    page_bytes: int
    submitted: int = 0
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ENDS, 0))
    replayed: int = 0
    longest_queue: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    busy_seconds: float = 0.0
    steps: int = 0
    sums: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # hits, misses, selected, kept
    row_steps: int = 0
    decode_seconds: float = 0.0
    last: StepMetrics | None = None
    min_locality: float = math.inf
    first: Histogram = field(default_factory=Histogram)
    later: Histogram = field(default_factory=Histogram)
    step_times: Histogram = field(default_factory=Histogram)
    lock: threading.Lock = field(default_factory=threading.Lock)  # requests may end in any thread

    def step(self, rows: int, seconds: float, sums: Sequence[int]) -> None:
        """Count a decode step with its hits, misses, selected and kept blocks."""
        hits, misses, selected, kept = sums
        self.steps += 1
        self.row_steps += rows
        self.decode_seconds += seconds
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)]
        self.last = StepMetrics(rows, seconds, hits, misses, selected, kept, misses * self.page_bytes)
        self.step_times.add(seconds)

    def end(self, reason: str, least_locality: float) -> None:
        """Count a request that ended; a least locality of NaN counts for nothing."""
        with self.lock:
            self.ended[reason if reason in self.ended else "completed"] += 1
            self.min_locality = min(self.min_locality, least_locality)  # in this order NaN loses

    def metrics(self, **now: int) -> EngineMetrics:
        """A snapshot; `now` holds what the recorder does not know."""
        hits, misses, selected, kept = self.sums
        return EngineMetrics(
            submitted=self.submitted,
            completed=self.ended["completed"],
            cancelled=self.ended["cancelled"],
            timed_out=self.ended["timeout"],
            failed=self.ended["error"],
            replayed=self.replayed,
            longest_queue=self.longest_queue,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            busy_seconds=self.busy_seconds,
            steps=self.steps,
            total=StepMetrics(
                self.row_steps, self.decode_seconds, hits, misses, selected, kept, misses * self.page_bytes
            ),
            last=self.last,
            min_locality=self.min_locality if math.isfinite(self.min_locality) else math.nan,
            time_to_first_token=self.first.times(),
            time_per_output_token=self.later.times(),
            step_seconds=self.step_times.times(),
            **now,
        )
