"""Requests that join and leave a running batch: every one gets what it would get alone, whatever becomes of the others.

The engine is driven round by round where the order matters, and by waiting for results where it does not.
"""

import threading
import time

import numpy as np
import pytest

from nosa_jax.errors import InputError
from nosa_jax.infer import QueueFullError, RequestStatus, SamplingParams, scheduler
from nosa_jax.offload import OutOfPagesError
from nosa_jax.tokenizer import ByteTokenizer
from tests.infer.cases import ONE_LAYER, ROWS, SMALL, C, P, offloaded, random_model, random_tokens

MODEL = random_model()
NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW)
SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=1.3, top_k=30, top_p=0.97, seed=5)
PROMPTS = [random_tokens(n, seed=n) for n in (11, 33, 3, 36, 2, 35, 9, 12, 34, 1, 10, 33)]
PARAMS = [SAMPLED if i % 3 == 2 else GREEDY for i in range(len(PROMPTS))]
CHUNK = 16  # the longer prompts take three pieces; few padded lengths, few compilations
GROUP = SMALL.num_layers * SMALL.num_kv_heads * 2 * P * SMALL.head_dim * 4


def engine_of(**options):
    return offloaded(MODEL, **(dict(prefill_chunk=CHUNK) | options))


def turn(engine, times=1):
    """So many rounds; the result of the last."""
    more = True
    for _ in range(times):
        more = engine._driver.turn(lambda: True)
    return more


def turn_until(engine, reached):
    for _ in range(200):
        if reached():
            return
        turn(engine)
    raise AssertionError("not reached in 200 rounds")


@pytest.fixture(scope="module")
def solo():
    """What each request gets alone, in an engine that did nothing before."""
    outcomes = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        with engine_of() as engine:
            outcomes.append(engine.submit(prompt, params).result().tokens)
    return outcomes


@pytest.fixture
def engine():
    """An engine that must have all its pages and rows back in the end."""
    with engine_of() as engine:
        yield engine
        assert_all_free(engine)


def assert_all_free(engine):
    now = engine.metrics()
    assert (now.waiting, now.reading, now.decoding) == (0, 0, 0)
    assert now.pages_free == now.pages_total == engine.plan.page_groups
    assert sorted(engine._scheduler._free_rows) == list(range(engine.layout.max_batch))
    if engine._scheduler.state is not None:
        assert not np.asarray(engine._scheduler.state.active).any()


# Joining and leaving.


def test_r1_requests_that_join_at_any_time_get_what_they_get_alone(engine, solo):
    """R1: more requests than rows, one more in every other round, greedy and sampled mixed, prompts in pieces."""
    handles = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        handles.append(engine.submit(prompt, params))
        turn(engine, 2)
    engine.run_until_idle()
    assert [h.result().tokens for h in handles] == solo
    assert {h.status for h in handles} == {RequestStatus.DONE}
    assert {h.result().finish_reason for h in handles} == {"length"}


def test_generate_and_submit_give_the_same(engine, solo):
    together = engine.generate(PROMPTS, PARAMS)
    for i, (result, tokens) in enumerate(zip(together, solo, strict=True)):
        alone = engine.submit(PROMPTS[i], PARAMS[i], stream=i).result()
        assert repr(alone) == repr(result)
        assert (result.tokens == tokens) or PARAMS[i] is SAMPLED, "other streams draw otherwise, greedy ones do not"


def test_reading_a_long_prompt_does_not_stall_running_rows(engine):
    """Between two pieces of the newcomer's prompt every running row gets a token."""
    running = engine.submit(PROMPTS[2], SamplingParams(max_new_tokens=100))
    turn_until(engine, lambda: len(running.tokens) > 3)
    newcomer = engine.submit(random_tokens(5 * CHUNK), GREEDY)
    before = len(running.tokens)
    statuses = []
    while newcomer.status is not RequestStatus.DECODING:
        turn(engine)
        statuses.append(newcomer.status)
    assert statuses == [RequestStatus.READING] * 4 + [RequestStatus.DECODING]
    assert len(running.tokens) - before == 5
    running.cancel()
    newcomer.cancel()
    engine.run_until_idle()


def test_short_prompts_share_a_piece(engine):
    """Several newcomers are read in one round while their padded lengths fill `prefill_chunk`."""
    handles = [engine.submit(random_tokens(n, seed=n), GREEDY) for n in (3, 4, 2, 4, 9, 1)]
    turn(engine)
    assert [h.status for h in handles] == [RequestStatus.DECODING] * 4 + [RequestStatus.READING] * 2
    turn(engine)
    assert {h.status for h in handles} == {RequestStatus.DECODING}
    engine.run_until_idle()


def test_o5_pages_of_a_request_are_reusable_with_its_last_step(solo):
    """O5: with pages for one request only, the next is read in the round after the last step of the one before."""
    order = (1, 8, 1)
    with engine_of(host_budget=GROUP * SMALL.num_blocks(len(PROMPTS[1]) + NEW)) as engine:
        handles = [engine.submit(PROMPTS[i], PARAMS[i]) for i in order]
        rounds = 0
        while turn(engine):
            rounds += 1
        # Each: two rounds for pieces only, then one for each step, of which the first reads the last piece too.
        assert rounds == len(order) * (2 + NEW - 1)
        assert engine.metrics().steps == len(order) * (NEW - 1)
        assert [h.result().tokens for h in handles] == [solo[i] for i in order]
        assert_all_free(engine)


def test_no_step_is_spent_on_rows_that_are_known_to_end(engine):
    """A request of n tokens takes n - 1 steps; an end that only the device can see costs at most one more."""
    tokens = engine.submit(PROMPTS[0], GREEDY).result().tokens
    assert engine.metrics().steps == NEW - 1
    eos = next(i for i, t in enumerate(tokens) if i and t not in tokens[:i])
    ended = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=NEW, eos_ids=(tokens[eos],)))
    assert ended.result().tokens == tokens[: eos + 1]
    assert engine.metrics().steps <= NEW - 1 + eos + 1


def test_a_row_that_ended_unseen_is_not_decoded_in_the_step_that_is_already_on_its_way(engine):
    tokens = engine.submit(PROMPTS[1], GREEDY).result().tokens
    eos = next(i for i, t in enumerate(tokens) if i > 2 and t not in tokens[:i])
    before = engine._pool.stats().pages_read
    ended = engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=40, eos_ids=(tokens[eos],)), record_steps=True)
    beside = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=40), record_steps=True)
    results = [ended.result(), beside.result()]
    assert results[0].finish_reason == "eos"
    assert len(results[0].steps.hits) == eos
    assert results[0].misses == results[0].steps.misses.sum()
    pieces = sum(engine._pool.stats().pages_read - before for _ in [0]) - sum(r.misses for r in results)
    # What is left was read back while the prompt's later pieces were read: its earlier full blocks, per layer and head.
    earlier = sum(start // P for start in range(CHUNK, len(PROMPTS[1]), CHUNK))
    assert pieces == earlier * SMALL.num_layers * SMALL.num_kv_heads


def test_j2_the_cache_stays_where_it_is_while_requests_come_and_go(engine, solo):
    """J2: joining, reading in pieces, cancelling and leaving update the same buffers in place."""

    def places():
        return [
            getattr(layer, name).unsafe_buffer_pointer()
            for layer in engine._scheduler.state.layers
            for name in ("slots", "pooled_k", "cis")
        ]

    engine.submit(PROMPTS[1], GREEDY).result()
    before = places()
    handles = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    turn(engine, 5)
    assert places() == before
    handles[2].cancel()
    engine.run_until_idle()
    assert places() == before
    assert [h.result().tokens for h in handles[3:]] == solo[3:]


# Order.


def test_small_requests_overtake_a_large_one_a_bounded_number_of_times():
    """No starvation: a request for the whole pool is admitted though small ones come in every round."""
    with engine_of(host_budget=20 * GROUP, max_overtaken=3) as engine:
        small = [engine.submit(random_tokens(3), SamplingParams(max_new_tokens=3)) for _ in range(4)]
        turn(engine)
        large = engine.submit(random_tokens(33), SamplingParams(max_new_tokens=20 * P - 33))
        overtaken = 0
        for _ in range(40):
            late = engine.submit(random_tokens(3), SamplingParams(max_new_tokens=3))
            turn(engine)
            if large.status is not RequestStatus.QUEUED:
                break
            overtaken += late.status is not RequestStatus.QUEUED
            small.append(late)
        assert large.status is not RequestStatus.QUEUED
        assert overtaken == 3
        engine.run_until_idle()
        assert all(h.result().finish_reason == "length" for h in [*small, large])
        assert_all_free(engine)


def test_strict_order_without_overtaking():
    with engine_of(host_budget=20 * GROUP, max_overtaken=0) as engine:
        running = engine.submit(random_tokens(3), SamplingParams(max_new_tokens=8))
        turn(engine)
        large = engine.submit(random_tokens(33), SamplingParams(max_new_tokens=20 * P - 33))
        late = engine.submit(random_tokens(3), SamplingParams(max_new_tokens=3))
        turn_until(engine, lambda: running.done)
        assert late.status is RequestStatus.QUEUED
        turn_until(engine, lambda: large.done)
        assert late.result().finish_reason == "length"


# Ends: cancellation, time limits, failures.


@pytest.mark.parametrize("state", ["queued", "reading", "first token on its way", "decoding", "last token on its way"])
def test_cancellation_in_every_state(engine, solo, state):
    """The request ends with the tokens it had, and its neighbours and successors get what they get alone."""
    beside = [engine.submit(PROMPTS[i], PARAMS[i]) for i in (0, 2)]
    turn(engine)
    mine = engine.submit(PROMPTS[8], PARAMS[8])
    if state == "queued":
        assert mine.cancel()
        assert mine.status is RequestStatus.DONE, "nobody needs to be in a round for it"
    else:
        turn_until(engine, {
            "reading": lambda: mine.status is RequestStatus.READING,
            "first token on its way": lambda: mine.status is RequestStatus.DECODING,
            "decoding": lambda: len(mine.tokens) == 4,
            "last token on its way": lambda: len(mine.tokens) == NEW - 1,
        }[state])  # fmt: skip
        assert mine.cancel()
    had = len(mine.tokens)
    result = mine.result()
    assert (result.finish_reason, result.tokens) == ("cancelled", PARAMS[8] and solo[8][:had])
    assert list(mine) == result.tokens
    assert not mine.cancel(), "it is done already"
    after = engine.submit(PROMPTS[8], PARAMS[8])
    assert [h.result().tokens for h in (*beside, after)] == [solo[0], solo[2], solo[8]]
    assert engine.metrics().cancelled == 1


def test_a_request_ends_when_its_time_is_over(engine, solo):
    """While it waits, and while it decodes; the result holds what came in time."""
    running = engine.submit(
        PROMPTS[0], SamplingParams(max_new_tokens=200), timeout=0.3, on_token=lambda _: time.sleep(0.005)
    )
    first = next(iter(running))
    result = running.result()
    assert result.finish_reason == "timeout"
    assert result.tokens[0] == first == solo[0][0]
    assert 0 < len(result.tokens) < 200
    crowd = [engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=200)) for _ in range(ROWS)]
    turn(engine)
    waiting = engine.submit(PROMPTS[0], timeout=0.01)
    time.sleep(0.02)
    assert waiting.result().tokens == []
    assert waiting.result().finish_reason == "timeout"
    for handle in crowd:
        handle.cancel()
    engine.run_until_idle()
    assert engine.metrics().timed_out == 2
    with pytest.raises(InputError, match="timeout=0 must be"):
        engine.submit(PROMPTS[0], timeout=0)


def test_a_result_may_be_waited_for_in_parts(engine, solo):
    handle = engine.submit(PROMPTS[0])
    with pytest.raises(TimeoutError, match=r"the request is queued and has 0 tokens"):
        handle.result(timeout=0)
    handle.cancel()


def test_a_callback_that_raises_ends_its_own_request(engine, solo):
    def refuse(token):
        seen.append(token)
        if len(seen) == 3:
            raise ValueError("the reader has gone")

    seen: list[int] = []
    beside = engine.submit(PROMPTS[0], GREEDY)
    mine = engine.submit(PROMPTS[1], GREEDY, on_token=refuse)
    engine.run_until_idle()
    assert beside.result().tokens == solo[0]
    with pytest.raises(ValueError, match="the reader has gone"):
        mine.result()
    assert mine.tokens == seen == solo[1][:3]
    with pytest.raises(ValueError, match="the reader has gone"):
        list(mine)
    assert engine.metrics().failed == 1


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


def test_a_fault_of_a_step_costs_time_and_no_tokens(engine, solo):
    """Everything in flight is computed again, and sampled tokens are the same; a fault that comes back is reported."""
    handles = [engine.submit(PROMPTS[i], PARAMS[i]) for i in (0, 1, 2)]
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
    assert [h.result().tokens for h in handles] == solo[:3]
    assert engine.metrics().replayed == 3

    faults = 2
    lost = engine.submit(PROMPTS[0], GREEDY)
    engine.run_until_idle()
    with pytest.raises(RuntimeError, match="the link is down"):
        lost.result()
    assert engine.submit(PROMPTS[0], GREEDY).result().tokens == solo[0]


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


# Refusals.


def test_what_cannot_be_run_is_refused_when_it_is_submitted(engine):
    for prompt, message in [
        ([], "is empty"),
        ([61], "token id 61"),
        ("text", "no tokenizer"),
        ([1] * 300, "300 tokens"),
    ]:
        with pytest.raises(InputError, match=message):
            engine.submit(prompt)
    with pytest.raises(InputError, match="stop strings are text"):
        engine.submit([1], SamplingParams(stop=("x",)))
    with engine_of(host_budget=5 * GROUP) as small, pytest.raises(OutOfPagesError, match="needs 6 blocks"):
        small.submit(random_tokens(5 * P), SamplingParams(max_new_tokens=1))
    with pytest.raises(InputError, match="max_queue=0"):
        engine_of(max_queue=0)
    with pytest.raises(InputError, match="prefill_chunk=0"):
        engine_of(prefill_chunk=0)


def test_the_queue_has_a_limit():
    with engine_of(host_budget=6 * GROUP, max_queue=2) as engine:  # for one at a time
        running = engine.submit(PROMPTS[0], GREEDY)
        turn(engine)
        waiting = [engine.submit(PROMPTS[0], GREEDY) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests wait and max_queue=2"):
            engine.submit(PROMPTS[0], GREEDY)
        assert len(engine.generate(PROMPTS[:1] * 3, GREEDY)) == 3, "a list of prompts waits by itself"
        assert [h.done for h in (running, *waiting)] == [True] * 3
        assert engine.metrics().longest_queue == 5


def test_rows_are_not_taken_from_requests(engine, solo):
    handle = engine.submit(PROMPTS[0], GREEDY)
    for call in (lambda: engine.prefill(PROMPTS[:1]), engine.warm_up):
        with pytest.raises(RuntimeError, match="requests wait or run"):
            call()
    assert handle.result().tokens == solo[0]


def test_no_and_one_token(engine, solo):
    none, one = (engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=n)) for n in (0, 1))
    assert none.done
    assert none.result().tokens == []
    assert list(one) == solo[0][:1]


@pytest.mark.slow
def test_stop_strings_end_a_row_that_the_device_would_go_on_with():
    model = random_model(ONE_LAYER.replace(vocab_size=259))
    with offloaded(model, tokenizer=ByteTokenizer()) as engine:
        free = engine.submit("hello", SamplingParams(max_new_tokens=20, temperature=1.0)).result()
        stop = free.text[8:10]
        at = free.text.index(stop)
        ended = engine.submit("hello", SamplingParams(max_new_tokens=20, temperature=1.0, stop=(stop,)))
        beside = engine.submit("hello", SamplingParams(max_new_tokens=20, temperature=1.0))
        assert (ended.result().finish_reason, ended.result().text) == ("stop", free.text[:at])
        assert ended.result().tokens == free.tokens[: len(ended.tokens)]
        assert beside.result().tokens == free.tokens
        assert_all_free(engine)


# Threads.


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


@pytest.mark.slow
def test_c_plus_one_slots_and_no_offload_give_the_same(solo):
    """O1: the same joins and leaves with other slots, and with every block on the device."""
    for options in (dict(slots=C + 1), dict(offload=False)):
        with engine_of(**options) as engine:
            handles = []
            for prompt, params in zip(PROMPTS, PARAMS, strict=True):
                handles.append(engine.submit(prompt, params))
                turn(engine)
            assert [h.result().tokens for h in handles] == solo
