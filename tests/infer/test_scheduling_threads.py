"""Threads: many that submit, several that wait, one that serves, and how serving ends."""

import math
import threading
import time

import pytest

from nosa_jax.infer import SamplingParams
from nosa_jax.infer import engine as engine_module
from tests.infer.cases import offloaded, random_model
from tests.infer.scheduling import CHUNK, GREEDY, PARAMS, PROMPTS, assert_all_free, either, engine_of


@either
def test_submitting_from_many_threads_while_another_serves(engine, solo):
    outcomes: dict[int, list[int]] = {}

    def client(i):
        handle = engine.submit(PROMPTS[i], PARAMS[i])
        outcomes[i] = list(handle) if i % 2 else handle.result().tokens

    with engine.serving():
        with pytest.raises(RuntimeError, match="being served already"), engine.serving():
            pass
        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        first_two = engine.generate(PROMPTS[:2], GREEDY)
        for thread in threads:
            thread.join()
        left = engine.submit(PROMPTS[3], PARAMS[3])
    assert left.done, "serving ends when everything is done"
    assert left.result().tokens == solo[3]
    assert [outcomes[i] for i in range(len(PROMPTS))] == solo
    assert [r.tokens for r in first_two] == solo[:2]
    assert engine.submit(PROMPTS[0], GREEDY).result().tokens == solo[0], "and without a thread as before"


def test_two_engines_serve_at_once(solo):
    """O6 with threads: two models of one layout, so that the engines share their programs; both are in mid-decode at
    the same time, and each request gets what it gets from its engine alone."""
    other = random_model(seed=7)
    with offloaded(other, prefill_chunk=CHUNK) as alone:
        solo_other = [alone.submit(p, q).result().tokens for p, q in zip(PROMPTS, PARAMS, strict=True)]
    assert all(a != b for a, b in zip(solo, solo_other, strict=True)), "engines that are mistaken for each other"
    both = threading.Barrier(2, timeout=60)
    outcomes: dict[tuple[int, int], list[int]] = {}

    def client(number, engine, i):
        seen: list[int] = []

        def note(token):
            seen.append(token)
            if i == 0 and len(seen) in (2, 6):
                both.wait()  # the other engine's thread is within a round as well

        assert engine.submit(PROMPTS[i], PARAMS[i], on_token=note).result().tokens == seen
        outcomes[number, i] = seen

    with engine_of() as one, offloaded(other, prefill_chunk=CHUNK) as two:
        with one.serving(), two.serving():
            threads = [
                threading.Thread(target=client, args=(number, engine, i))
                for i in range(len(PROMPTS))
                for number, engine in enumerate((one, two))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for engine in (one, two):
            engine.check()
            assert_all_free(engine)
    for number, expected in enumerate((solo, solo_other)):
        assert [outcomes[number, i] for i in range(len(PROMPTS))] == expected


def test_several_threads_that_wait_without_a_server_share_the_work(engine, solo):
    handles = [engine.submit(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]
    outcomes: list[list[int]] = [[] for _ in handles]

    def wait(i):
        outcomes[i] = handles[i].result().tokens

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(len(handles))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == solo


def test_a_callback_that_wants_to_exit_does_not_end_serving(engine, solo):
    def leave(token):
        raise SystemExit(3)

    with engine.serving():
        beside = engine.submit(PROMPTS[0], GREEDY)
        mine = engine.submit(PROMPTS[2], GREEDY, on_token=leave)
        with pytest.raises(SystemExit):
            mine.result()
        assert beside.result().tokens == solo[0]
        assert engine.submit(PROMPTS[1], GREEDY).result().tokens == solo[1]


def test_serving_that_ends_by_an_exception_cancels(engine):
    handles = []

    def serve():
        with engine.serving():
            handles.append(engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=200)))
            next(iter(handles[0]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve()
    (handle,) = handles
    assert handle.result().finish_reason == "cancelled"


def test_closing_cancels_and_wakes_those_who_wait(solo):
    engine = engine_of()
    engine._driver.start()
    handle = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=200))
    first = next(iter(handle))
    results = []
    waiter = threading.Thread(target=lambda: results.append(handle.result()))
    waiter.start()
    engine.close()
    waiter.join()
    assert first == solo[0][0]
    assert results[0].finish_reason == "cancelled"
    with pytest.raises(RuntimeError, match="engine is closed"):
        engine.submit(PROMPTS[0])


def test_waiting_for_the_engine_inside_its_own_callback_is_refused(engine):
    mine = engine.submit(PROMPTS[0], GREEDY, on_token=lambda _: engine.generate(PROMPTS[:1], GREEDY))
    with pytest.raises(RuntimeError, match="callback cannot wait"):
        mine.result()
    engine.run_until_idle()


def test_closing_an_engine_inside_its_own_callback_is_refused_and_closes_nothing(engine, solo):
    mine = engine.submit(PROMPTS[0], GREEDY, on_token=lambda _: engine.close())
    beside = engine.submit(PROMPTS[1], GREEDY)
    with pytest.raises(RuntimeError, match="callback cannot close"):
        mine.result()
    assert beside.result().tokens == solo[1]
    assert engine.submit(PROMPTS[0], GREEDY).result().tokens == solo[0]


def test_what_is_submitted_just_before_the_end_of_serving_is_finished(engine, solo, monkeypatch):
    """Between the last round, which found nothing, and the look at whether serving is to end."""
    idle, submitted = threading.Event(), threading.Event()
    turn_as_it_is = engine._driver.turn

    def slow_turn(wanted, timeout=None):
        more = turn_as_it_is(wanted, timeout)
        if not more and threading.current_thread().name == "nosa-engine":
            idle.set()
            assert submitted.wait(60)
        return more

    monkeypatch.setattr(engine._driver, "turn", slow_turn)
    told: list[int] = []
    with engine.serving():
        assert idle.wait(60)
        handle = engine.submit(PROMPTS[0], GREEDY, on_token=told.append)
        threading.Timer(0.2, submitted.set).start()  # when the block has ended
    assert handle.done
    assert told == solo[0]


def test_warming_up_leaves_requests_alone_that_come_meanwhile(engine, monkeypatch):
    """It needs a row of its own, and says so."""

    def come(plan):
        handles.append(
            engine.submit(PROMPTS[3], SamplingParams(max_new_tokens=30), on_token=lambda _: time.sleep(0.02))
        )
        next(iter(handles[0]))
        return real(plan)

    handles: list = []
    real = engine_module.continuations
    monkeypatch.setattr(engine_module, "continuations", come)
    with engine.serving():
        with pytest.raises(RuntimeError, match="warm_up needs all rows, and requests wait or run"):
            engine.warm_up(sampling=False)
        tokens = handles[0].result().tokens
    monkeypatch.undo()
    assert engine.submit(PROMPTS[3], SamplingParams(max_new_tokens=30)).result().tokens == tokens
    assert engine.metrics().replayed == 0


def test_waiting_without_end_may_be_said_by_infinity(engine, solo):
    assert engine.submit(PROMPTS[0], GREEDY, timeout=math.inf).result(timeout=math.inf).tokens == solo[0]
