"""Requests that come at times of their own."""

import numpy as np
import pytest

from nosa_jax.infer import SamplingParams, scheduler
from nosa_jax.infer.traffic import make_traffic, serve
from tests.infer.cases import SMALL
from tests.infer.scheduling import engine_of

SIZES = {"prompt_tokens": (3, 7), "new_tokens": (1, 4), "vocab_size": 50}


def test_the_same_arguments_make_the_same_requests():
    def shown(seed):
        return [(a.seconds, a.prompt.tolist(), a.new_tokens) for a in make_traffic(20, rate=3.0, seed=seed, **SIZES)]

    assert shown(1) == shown(1)
    assert shown(1) != shown(2)


def test_every_length_between_the_limits_comes_up():
    arrivals = make_traffic(400, rate=None, **SIZES)
    assert {len(a.prompt) for a in arrivals} == set(range(3, 8))
    assert {a.new_tokens for a in arrivals} == set(range(1, 5))
    ids = np.concatenate([a.prompt for a in arrivals])
    assert ids.dtype == np.int32
    assert set(ids.tolist()) == set(range(50))


def test_times_between_requests_are_exponential_with_the_mean_of_the_rate():
    times = np.array([a.seconds for a in make_traffic(4000, rate=8.0, **SIZES)])
    gaps = np.diff(times, prepend=0)
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.1)
    assert {a.seconds for a in make_traffic(5, rate=None, **SIZES)} == {0.0}


def test_another_rate_brings_the_same_requests():
    by_rate = [make_traffic(20, rate=rate, seed=3, **SIZES) for rate in (None, 1.0, 5.0)]
    first, *others = [[(a.prompt.tolist(), a.new_tokens) for a in arrivals] for arrivals in by_rate]
    assert all(other == first for other in others)
    assert by_rate[1][-1].seconds == pytest.approx(5 * by_rate[2][-1].seconds)


def test_prompts_are_stretches_of_the_text_around_its_end():
    text = np.arange(10, dtype=np.int32)
    prompts = [a.prompt for a in make_traffic(200, rate=None, text=text, **SIZES)]
    assert {int(prompt[0]) for prompt in prompts} == set(range(10))
    for prompt in prompts:
        assert (np.diff(prompt) % 10 == 1).all()


def test_a_request_that_fails_is_counted_and_the_others_get_what_they_get_alone(monkeypatch):
    def fail(model, state, row, tokens, start, **options):
        if np.array_equal(tokens, arrivals[1].prompt):
            raise MemoryError("no room")
        return real(model, state, row, tokens, start, **options)

    sizes = {"prompt_tokens": (9, 11), "new_tokens": (3, 5), "vocab_size": SMALL.vocab_size}
    arrivals = make_traffic(5, rate=20.0, **sizes)
    real = scheduler.prefill_row
    with engine_of() as engine:
        params = [SamplingParams(max_new_tokens=a.new_tokens) for a in arrivals]
        alone = [engine.generate([a.prompt], p)[0].tokens for a, p in zip(arrivals, params, strict=True)]
    monkeypatch.setattr(scheduler, "prefill_row", fail)
    with engine_of() as engine:
        served = serve(engine, arrivals)
    assert served.failures == ["MemoryError: no room"]
    assert served.tokens == [alone[0], None, *alone[2:]]
    assert served.seconds >= arrivals[-1].seconds
    m = served.metrics
    assert (m.submitted, m.completed, m.failed) == (5, 4, 1)
    assert served.tokens_per_second == sum(len(t) for t in served.tokens if t) / served.seconds
