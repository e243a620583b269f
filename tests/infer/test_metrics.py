"""What an engine counts: against the counts of the cache itself, and times against the clock."""

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosa_jax.infer import SamplingParams
from nosa_jax.infer.metrics import Histogram
from tests.infer.cases import SMALL, P, offloaded, random_model, random_tokens

PROMPTS = [random_tokens(n, seed=n) for n in (11, 33, 3)]
NEW, CHUNK = 12, 16


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=300))
def test_quantiles_of_a_histogram(values):
    """Each lies between the true one and 9 % more, and none beyond the longest."""
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    times = histogram.times()
    assert times.count == len(values)
    assert times.longest == max(values)
    assert times.mean == pytest.approx(np.mean(values))
    for share, found in ((0.5, times.p50), (0.9, times.p90), (0.99, times.p99)):
        true = float(np.quantile(values, share, method="inverted_cdf"))
        assert true * (1 - 1e-9) <= found <= true * 2 ** (1 / 8) * (1 + 1e-9)


def test_a_histogram_takes_any_duration():
    histogram = Histogram()
    assert math.isnan(histogram.times().p50)
    for value in (0.0, 1e-12, 1e9):
        histogram.add(value)
    assert histogram.times().longest == 1e9


def test_counts_are_those_of_the_cache_and_of_every_step():
    """Totals equal the sums over the recorded steps of all requests, and the bytes those that the pool has read."""
    with offloaded(random_model(), prefill_chunk=CHUNK) as engine:
        before = engine.metrics()
        assert (before.submitted, before.steps, before.last, before.generated_tokens) == (0, 0, None, 0)
        assert math.isnan(before.hit_rate)
        assert math.isnan(before.tokens_per_second)
        start = time.perf_counter()
        results = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW), record_steps=True)
        seconds = time.perf_counter() - start
        now = engine.metrics()
        stats = engine._scheduler.state.stats()
    for name in ("hits", "misses", "selected", "kept"):
        whole = sum(int(getattr(r.steps, name).sum()) for r in results)
        assert getattr(now.total, name) == whole > 0
        assert getattr(now.last, name) == getattr(stats.last, name).sum()
    assert now.total.bytes_fetched == sum(r.bytes_fetched for r in results)
    # Beside the steps' misses, the later pieces of a prompt have read back the full blocks before them.
    earlier = sum(start // P for prompt in PROMPTS for start in range(CHUNK, len(prompt), CHUNK))
    read_back = earlier * SMALL.num_layers * SMALL.num_kv_heads * engine.layout.page_bytes
    assert engine._pool.stats().bytes_read == now.total.bytes_fetched + read_back
    assert now.hit_rate == now.total.hits / (now.total.hits + now.total.misses)
    assert now.min_locality == min(r.min_locality for r in results if not math.isnan(r.min_locality))
    assert 0 < now.total.locality <= 1
    assert (now.submitted, now.completed, now.cancelled, now.failed) == (3, 3, 0, 0)
    assert now.total.rows == 3 * (NEW - 1), "each token but the first is a row of a step"
    assert NEW - 1 <= now.steps < 3 * (NEW - 1)
    assert (now.prompt_tokens, now.generated_tokens) == (sum(map(len, PROMPTS)), 3 * NEW)
    assert (now.waiting, now.reading, now.decoding, now.longest_queue) == (0, 0, 0, 3)
    assert (now.time_to_first_token.count, now.time_per_output_token.count) == (3, 3 * (NEW - 1))
    assert now.step_seconds.count == now.steps
    assert 0 < now.step_seconds.mean * now.steps <= now.busy_seconds <= seconds
    assert now.time_to_first_token.longest <= seconds
    assert now.tokens_per_second == pytest.approx(3 * NEW / now.busy_seconds)
    text = str(now)
    for part in (f"{3 * NEW} generated", f"{now.total.misses} misses", f"{now.total.bytes_fetched:,} bytes", "p99"):
        assert part in text
    assert now.total.link_gb_per_s == pytest.approx(now.total.bytes_fetched / now.total.seconds / 1e9)


def test_counting_waits_for_no_device_and_takes_nothing_from_it(monkeypatch):
    """Metrics are read in mid-decode without touching a device array, and a round reads one small array a step."""
    with offloaded(random_model(), prefill_chunk=CHUNK) as engine:
        handle = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=NEW))
        next(iter(handle))
        read: list[tuple[int, ...]] = []
        real = np.asarray

        def note(x, *arguments, **options):
            if not isinstance(x, np.ndarray | list | tuple | int):
                read.append(x.shape)
            return real(x, *arguments, **options)

        monkeypatch.setattr("nosa_jax.infer.scheduler.np.asarray", note)
        engine.metrics()
        assert read == []
        done = engine.metrics().steps
        while not handle.done:
            engine._driver.turn(lambda: True)
        assert read == [(1, engine.layout.max_batch, 8)] * (engine.metrics().steps - done)
        assert dataclasses.asdict(engine.metrics())["pages_total"] == engine.plan.page_groups
        assert engine.metrics().pages_free == engine.plan.page_groups
        running = engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=NEW))
        next(iter(running))
        held = SMALL.num_blocks(len(PROMPTS[1]) + NEW)
        assert engine.metrics().pages_free == engine.plan.page_groups - held
        running.cancel()
        engine.run_until_idle()
