"""Who is admitted when: a large request is overtaken a bounded number of times, and the queue has a limit."""

import pytest

from nosa_jax.infer import QueueFullError, RequestStatus, SamplingParams
from tests.infer.cases import P, random_tokens
from tests.infer.scheduling import GREEDY, GROUP, PROMPTS, assert_all_free, engine_of, turn, turn_until


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
