"""Requests that join and leave a running batch: every one gets what it would get alone.

The engine is driven round by round where the order matters, and by waiting for results where it does not.
"""

import pytest

from nosa_jax.infer import RequestStatus, SamplingParams
from tests.infer.cases import SMALL, C, P, random_tokens
from tests.infer.scheduling import (
    AT_ONCE,
    CHUNK,
    GREEDY,
    GROUP,
    NEW,
    PARAMS,
    PROMPTS,
    SAMPLED,
    assert_all_free,
    either,
    engine_of,
    turn,
    turn_until,
)


@either
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


@either
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


@either
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


@pytest.mark.slow
def test_c_plus_one_slots_and_no_offload_give_the_same(solo):
    """O1: the same joins and leaves with other slots, with every block on the device, with several steps at once."""
    for options in (
        dict(slots=C + 1),
        dict(offload=False),
        dict(slots=C + 1, steps_per_dispatch=AT_ONCE),
        dict(offload=False, steps_per_dispatch=7),
    ):
        with engine_of(**options) as engine:
            handles = []
            for prompt, params in zip(PROMPTS, PARAMS, strict=True):
                handles.append(engine.submit(prompt, params))
                turn(engine)
            assert [h.result().tokens for h in handles] == solo
