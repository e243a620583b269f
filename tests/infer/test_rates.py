"""What floors are made of: the rates of this machine's memories."""

import time

from nosa_jax.infer import rates


def test_rates_are_positive_and_a_cpu_is_not_asked_for_long():
    begun = time.perf_counter()
    found = rates.measure_rates()
    assert found.memory > 1e8
    assert found.link > 1e8
    assert time.perf_counter() - begun < 30


def test_the_best_run_counts_after_the_first_and_all_seconds_are_used(monkeypatch):
    """A device that was idle is slow at first, and a slow moment must not raise a floor."""
    clock, lasts = [0.0], iter([0.125, 9.0, 0.5, 0.75, 0.5, 0.75, 0.5, 0.75, *[1.0] * 4, 0.25, 0.125])

    def run() -> None:
        clock[0] += next(lasts)

    monkeypatch.setattr(rates.time, "perf_counter", lambda: clock[0])
    assert rates._best_seconds(run, 17.0) == 0.25  # of 13 runs, with which 17 seconds are over; the first compiled
    assert list(lasts) == [0.125]


def test_a_few_runs_are_made_whatever_they_take(monkeypatch):
    made = []
    assert rates._best_seconds(lambda: made.append(1), 0.0) >= 0
    assert len(made) == rates._LEAST + 1
