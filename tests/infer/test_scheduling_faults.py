"""Faults and interruptions: requests that are not to blame are begun again, and no token is told twice."""

import contextlib
import time

import numpy as np
import pytest

from nosa_jax.infer import SamplingParams, scheduler
from nosa_jax.tokenizer import ByteTokenizer
from tests.infer.scheduling import (
    CHUNK,
    GREEDY,
    NEW,
    PARAMS,
    PROMPTS,
    assert_all_free,
    either,
    engine_of,
    turn,
    turn_until,
)


@pytest.mark.parametrize("keep_state", [True, False])
def test_a_prompt_that_cannot_be_read_ends_its_own_request(engine, solo, monkeypatch, keep_state):
    """Whether reading fails before it touched the rows' state or took it along, as running out of memory may do."""

    def fail(model, state, row, tokens, start, **options):
        if start == CHUNK and np.array_equal(tokens, PROMPTS[3][CHUNK : 2 * CHUNK]):
            if not keep_state:
                real(model, state, row, tokens, start, **options)
            raise MemoryError("RESOURCE_EXHAUSTED")
        return real(model, state, row, tokens, start, **options)

    real = scheduler.prefill_row
    monkeypatch.setattr(scheduler, "prefill_row", fail)
    seen: list[tuple[int, int]] = []
    beside = [engine.submit(PROMPTS[i], PARAMS[i], on_token=lambda t, i=i: seen.append((i, t))) for i in (0, 2, 8)]
    turn(engine, 3)
    mine = engine.submit(PROMPTS[3], PARAMS[3])
    engine.run_until_idle()
    with pytest.raises(MemoryError, match="RESOURCE_EXHAUSTED"):
        mine.result()
    assert [h.result().tokens for h in beside] == [solo[i] for i in (0, 2, 8)]
    for i in (0, 2, 8):
        assert [t for j, t in seen if j == i] == solo[i], "no token is told twice"
    now = engine.metrics()
    assert (now.failed, now.completed, now.replayed) == (1, 3, 0 if keep_state else 3)


@either
def test_a_fault_of_a_step_costs_time_and_no_tokens(engine, solo):
    """Everything in flight is computed again, and sampled tokens are the same; a fault that comes back is reported."""
    told: list[list[int]] = [[], [], []]
    handles = [engine.submit(PROMPTS[i], PARAMS[i], on_token=told[i].append) for i in (0, 1, 2)]
    turn_until(engine, lambda: len(handles[2].tokens) > 4)
    real, faults = engine._scheduler._step, 1

    def fault(*arguments, **options):
        nonlocal faults
        output = real(*arguments, **options)  # the old state is gone
        if faults:
            faults -= 1
            raise RuntimeError("the link is down")
        return output

    engine._scheduler._step = fault
    engine.run_until_idle()
    assert [h.result().tokens for h in handles] == told == solo[:3]
    assert engine.metrics().replayed == 3

    faults = 2
    lost = engine.submit(PROMPTS[0], GREEDY)
    engine.run_until_idle()
    with pytest.raises(RuntimeError, match="the link is down"):
        lost.result()
    assert engine.submit(PROMPTS[0], GREEDY).result().tokens == solo[0]


@either
def test_a_cancellation_between_a_fault_and_the_next_round_is_not_lost(engine, solo):
    handles = [engine.submit(PROMPTS[i], PARAMS[i]) for i in (0, 1)]
    turn_until(engine, lambda: len(handles[1].tokens) > 2)
    real = engine._scheduler._step

    def fault(*arguments, **options):
        engine._scheduler._step = real
        handles[0].cancel()
        raise RuntimeError("the link is down")

    engine._scheduler._step = fault
    engine.run_until_idle()
    assert handles[0].result().finish_reason == "cancelled"
    assert handles[0].tokens == solo[0][: len(handles[0].tokens)]
    assert handles[1].result().tokens == solo[1]


def test_requests_fail_where_the_memory_cannot_be_taken_back(solo, monkeypatch):
    """Nobody waits for ever: the second fault is what they fail with."""
    with engine_of() as engine:
        handle = engine.submit(PROMPTS[0], GREEDY)
        turn(engine)

        def fault(*_, **__):
            raise RuntimeError("worse")

        monkeypatch.setattr(engine._scheduler, "_step", fault)
        monkeypatch.setattr(engine._memory, "reset", fault)
        with pytest.raises(RuntimeError, match="worse"):
            handle.result()
        monkeypatch.undo()
        engine._memory.reset()
        assert engine.submit(PROMPTS[0], GREEDY).result().tokens == solo[0]


@either
def test_an_interrupted_round_leaves_everything_to_the_next(engine, solo):
    def interrupt(token):
        if len(handles[0].tokens) == 4 and not interrupted:
            interrupted.append(token)
            raise KeyboardInterrupt

    interrupted: list[int] = []
    handles = [engine.submit(PROMPTS[0], GREEDY, on_token=interrupt), engine.submit(PROMPTS[1], GREEDY)]
    with pytest.raises(KeyboardInterrupt):
        engine.run_until_idle()
    assert not handles[1].done
    assert handles[1].result().tokens == solo[1]
    with pytest.raises(KeyboardInterrupt):
        handles[0].result()


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_who_is_cancelled_or_late_is_told_whatever_happens_to_the_row(engine, solo, monkeypatch, fault, reason):
    """Telling the device of an end may fail or be interrupted: it was a request that nobody knew of any more, then."""

    def break_once(*_):
        monkeypatch.setattr(scheduler, "deactivate", real)
        raise fault("in between")

    real = scheduler.deactivate
    limit = SamplingParams(max_new_tokens=100)
    late = dict(timeout=0.2) if reason == "timeout" else {}
    ended = [engine.submit(PROMPTS[0], limit, **late) for _ in range(2)]
    beside = engine.submit(PROMPTS[1], GREEDY)
    turn_until(engine, lambda: all(handle.tokens for handle in (*ended, beside)))
    monkeypatch.setattr(scheduler, "deactivate", break_once)
    if reason == "timeout":
        time.sleep(0.25)
    else:
        for handle in ended:
            handle.cancel()
    with contextlib.suppress(KeyboardInterrupt):
        turn(engine)
    assert [handle.result(timeout=20).finish_reason for handle in ended] == [reason] * 2
    assert beside.result().tokens == solo[1]
    now = engine.metrics()
    assert (now.cancelled + now.timed_out, now.completed, now.failed, now.replayed) == (2, 1, 0, 1)


@pytest.mark.parametrize("stop", [("never",), ()])
def test_a_tokenizer_that_raises_fails_the_request_and_no_other(solo, stop):
    """Where texts are looked at for stop strings, and at the end."""

    class Broken(ByteTokenizer):
        def decode(self, ids):
            raise ZeroDivisionError("no text")

    with engine_of(tokenizer=Broken()) as engine:
        told: list[int] = []
        mine = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=NEW, stop=stop), on_token=told.append)
        with pytest.raises(ZeroDivisionError, match="no text"):
            mine.result()
        assert told == solo[0][: len(told)]
        assert len(told) == (1 if stop else NEW)
        now = engine.metrics()
        assert (now.failed, now.replayed) == (1, 0)
        assert_all_free(engine)
