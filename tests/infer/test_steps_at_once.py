"""Several decode steps in one dispatch: tokens and counts are those of one at a time, and no row goes beyond its end.

`test_scheduling_*.py` run cases of theirs with several steps at once too (`either`).
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.errors import InputError
from nosa_jax.infer import RequestStatus, SamplingParams
from nosa_jax.infer.compiling import jit_in_place
from nosa_jax.infer.delivery import Delivery
from nosa_jax.infer.in_flight import InFlight, steps_now
from nosa_jax.infer.jobs import make_job
from nosa_jax.infer.requests import Request
from nosa_jax.infer.row_steps import steps_function
from nosa_jax.infer.sampling import empty_sampling, set_row
from nosa_jax.offload import CacheLayout, init_state
from nosa_jax.tokenizer import ByteTokenizer
from tests.infer.cases import ONE_LAYER, ROWS, SMALL, C, P, random_model, random_tokens
from tests.infer.scheduling import (
    AT_ONCE,
    CHUNK,
    GREEDY,
    GROUP,
    NEW,
    PARAMS,
    PROMPTS,
    assert_all_free,
    engine_of,
    turn,
    turn_until,
)  # fmt: skip

# New tokens around the steps of a dispatch and twice of them.
LIMITS = (1, 2, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE, 2 * AT_ONCE + 1)


def outcomes(at_once, requests, **options):
    """Results as texts (a locality may be NaN), counts of the engine and of its pool."""
    with engine_of(steps_per_dispatch=at_once, tokenizer=ByteTokenizer()) as engine:
        handles = []
        for prompt, params in requests:
            handles.append(engine.submit(prompt, params, **options))
            turn(engine)
        engine.run_until_idle()
        assert_all_free(engine)
        now, pool = engine.metrics(), engine._pool.stats()
    counts = [getattr(now.total, name) for name in ("rows", "hits", "misses", "selected", "kept", "bytes_fetched")]
    counts += [now.generated_tokens, now.time_per_output_token.count, now.min_locality]
    counts += [pool.pages_read, pool.pages_written]
    return [repr(h.result()) for h in handles], counts


def test_a_program_of_several_steps_gives_the_bits_of_as_many_programs_of_one():
    """Every array of the state, the logits among them, the reports and the sampling, while rows end within."""

    def after(at_once):
        with engine_of() as engine:
            state = engine.prefill([PROMPTS[i] for i in (1, 0, 8, 2)], max_new_tokens=9)
            sampling = empty_sampling(ROWS)
            for row, limit in enumerate((9, 9, 3, 6)):
                params = SamplingParams(max_new_tokens=limit, temperature=0.9 * (row % 2), seed=row)
                sampling = set_row(sampling, row, params, 0)
            tokens, reports = state.logits.argmax(axis=-1).astype(jnp.int32), []
            for _ in range(8 // at_once):
                output = engine._scheduler._step(
                    engine.model, state, tokens, sampling, steps=at_once, greedy=False, record=False
                )
                reports.append(output.report)
                tokens, state, sampling = output.tokens, output.state, output.sampling
            state = state.replace(handle=jnp.zeros(2, jnp.int32))  # of another pool
            return jax.tree.map(np.asarray, (jnp.concatenate(reports), tokens, jax.tree.leaves(state), sampling))

    one, several = after(1), after(AT_ONCE)
    np.testing.assert_array_equal(one[0][:, :4, 3] > 0, np.arange(8)[:, None] < np.array([8, 8, 3, 6]))
    jax.tree.map(np.testing.assert_array_equal, several, one)


@pytest.mark.parametrize("record_steps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_b6_results_and_counts_are_those_of_one_step_at_a_time(record_steps):
    """Limits around the steps of a dispatch, contexts that cross the budget in mid-dispatch (B6), greedy and sampled
    rows beside each other, also the counts of every step: all equal, and so are the pages that the pool has moved."""
    lengths = (11, 1, P - 1, C * P - 5, P, 33, C * P - 2, 3)
    requests = [
        (random_tokens(n, seed=n), SamplingParams(max_new_tokens=limit, temperature=1.1 * (i % 3 == 0), seed=i))
        for i, (n, limit) in enumerate(zip(lengths, (33, *LIMITS), strict=True))  # a sampled one is there to the end
    ]
    one, several = (outcomes(n, requests, record_steps=record_steps) for n in (1, AT_ONCE))
    assert several == one
    assert one[1][2] > 0, "nothing was fetched"


def job_of(limit):
    """A request for so many tokens, with nobody behind it."""
    request = Request(0, np.zeros(3, np.int32), SamplingParams(max_new_tokens=limit))
    return make_job(request, 0, None, wait=lambda *_: None, cancel=lambda _: None)


def ending_everywhere():
    """One greedy prompt, ended at each place of two dispatches: by an id that the device knows, and by a string."""
    with engine_of() as engine:
        tokens = engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=3 * AT_ONCE)).result().tokens
    places = [i for i, token in enumerate(tokens) if token not in tokens[:i]]
    assert set(range(1, AT_ONCE + 1)) <= {(i - 1) % AT_ONCE + 1 for i in places}, "take a prompt with a varied text"
    ends = [dict(eos_ids=(tokens[i],)) for i in places] + [dict(stop=(chr(tokens[i]),)) for i in places]
    return tokens, places, [(PROMPTS[1], SamplingParams(max_new_tokens=3 * AT_ONCE, **end)) for end in ends]


def test_r2_ends_at_every_step_of_a_dispatch():
    """R2: what comes after an end is never handed out and, where the device knows the end, never computed."""
    tokens, places, requests = ending_everywhere()
    (ends, counts), (ends_one, counts_one) = outcomes(AT_ONCE, requests), outcomes(1, requests)
    assert ends == ends_one
    for place, by_id, by_string in zip(places, ends[: len(places)], ends[len(places) :], strict=True):
        assert f"tokens={tokens[: place + 1]}" in by_id
        assert "finish_reason='eos'" in by_id
        assert f"tokens={tokens[: place + 1]}" in by_string
        assert "finish_reason='stop'" in by_string
    # Ends by an id alone: not one row, block or page more than with a step at a time.
    only_ids = requests[: len(places)]
    assert outcomes(AT_ONCE, only_ids)[1] == outcomes(1, only_ids)[1]
    assert counts[0] > counts_one[0], "rows that only the host can end go on to the end of their dispatches"


def test_no_row_goes_beyond_what_it_has_reserved():
    """With exactly the pages that all rows reserve, after every dispatch: no length above the row's capacity, no count
    above its limit; in the end every row holds its prompt and its new tokens but the last."""
    prompts = [random_tokens(n, seed=n) for n in (P - 1, P, 11, 33, 2 * P, 1, 9)]
    needed = sum(SMALL.num_blocks(len(p) + n) for p, n in zip(prompts, LIMITS, strict=True))
    with engine_of(host_budget=needed * GROUP, steps_per_dispatch=AT_ONCE) as engine:
        real, steps = engine._scheduler._step, []

        def watched(*arguments, **options):
            steps.append(options["steps"])
            output = real(*arguments, **options)
            assert (np.asarray(output.state.lengths) <= np.asarray(output.state.capacity)).all()
            assert (np.asarray(output.sampling.generated) <= np.asarray(output.sampling.limit)).all()
            return output

        engine._scheduler._step = watched
        handles = [
            engine.submit(p, SamplingParams(max_new_tokens=n, temperature=float(n % 2), stop=()))
            for p, n in zip(prompts, LIMITS, strict=True)
        ]
        engine.run_until_idle()
        assert [len(h.result().tokens) for h in handles] == list(LIMITS)
        expected = [len(p) + n - 1 for p, n in zip(prompts, LIMITS, strict=True)]
        np.testing.assert_array_equal(engine._scheduler.state.lengths[: len(prompts)], expected)
        assert set(steps) == {1, AT_ONCE}
        assert_all_free(engine)


@pytest.mark.parametrize(
    ("left", "reading", "waiting", "expected"),
    [
        ([4], False, False, 4),
        ([3], False, False, 1),  # the fourth step would be nobody's
        ([1, 9], False, False, 4),  # one ends within, another needs them all
        ([1, 9], False, True, 1),  # its row may go to whoever waits
        ([4, 9], False, True, 4),
        ([1, *[9] * 7], False, True, 4),  # three of 32 row-steps are nobody's
        ([1, 2, *[9] * 6], False, True, 1),  # five of them
        ([3] * 9, False, True, 1),
        ([9, 9], True, False, 1),  # the next piece of a prompt comes after the steps
    ],
)
def test_how_many_steps_are_dispatched(left, reading, waiting, expected):
    jobs = [job_of(n) for n in left]
    assert steps_now(jobs, at_once=4, reading=reading, waiting=waiting) == expected
    assert steps_now(jobs, at_once=1, reading=reading, waiting=waiting) == 1


def test_a_newcomer_waits_for_single_steps_only():
    """While its prompt is read in pieces steps come one at a time, and they come together again once it is read."""
    with engine_of(steps_per_dispatch=AT_ONCE) as engine:
        real, steps = engine._scheduler._step, []

        def watched(*arguments, **options):
            steps.append(options["steps"])
            return real(*arguments, **options)

        engine._scheduler._step = watched
        running = engine.submit(PROMPTS[2], SamplingParams(max_new_tokens=100))
        turn_until(engine, lambda: len(running.tokens) > 3)
        steps.clear()
        newcomer = engine.submit(random_tokens(5 * CHUNK), GREEDY)
        while newcomer.status is not RequestStatus.DECODING:
            turn(engine)
        assert steps == [1] * 4 + [AT_ONCE]
        turn(engine)
        assert newcomer.tokens, "its first token does not wait for the steps dispatched behind it"
        running.cancel()
        newcomer.cancel()
        engine.run_until_idle()


def test_o5_waiting_requests_get_a_row_in_the_round_of_the_last_step():
    """O5: with pages for one request, no step is spent on nobody and the next is read as soon as with single steps."""
    with engine_of(host_budget=GROUP * SMALL.num_blocks(33 + NEW), steps_per_dispatch=AT_ONCE) as engine:
        handles = [engine.submit(PROMPTS[1], GREEDY) for _ in range(3)]
        rounds = 1
        while turn(engine):
            rounds += 1
        dispatches = (NEW - 1) // AT_ONCE + (NEW - 1) % AT_ONCE
        assert rounds == 3 * (2 + dispatches) + 1
        assert engine.metrics().steps == 3 * (NEW - 1)
        assert len({tuple(h.result().tokens) for h in handles}) == 1


def test_an_interruption_between_two_tokens_of_a_dispatch_loses_no_request(solo):
    """A signal comes up anywhere. Requests whose last tokens were being handed out are begun again like the others, and
    nobody is told a token twice."""
    for at in (2, 8, NEW + 9, 3 * NEW - 2):
        with engine_of(steps_per_dispatch=AT_ONCE) as engine:
            real, calls = engine._scheduler.delivery.token, 0

            def interrupted(*arguments, real=real, at=at):
                nonlocal calls
                calls += 1
                if calls == at:
                    raise KeyboardInterrupt
                return real(*arguments)

            engine._scheduler.delivery.token = interrupted
            told: dict[int, list[int]] = {i: [] for i in (0, 1, 2)}
            handles = [engine.submit(PROMPTS[i], PARAMS[i], on_token=told[i].append) for i in told]
            with pytest.raises(KeyboardInterrupt):
                engine.run_until_idle()
            engine.run_until_idle()
            assert [h.result().tokens for h in handles] == list(told.values()) == solo[:3]
            assert_all_free(engine)


def test_steps_of_a_dispatch_share_its_time():
    """Four steps that took four seconds: four steps of a second, tokens a second apart, rows as they were decoded."""
    layout = CacheLayout(SMALL, "nosa", 2, 64, True, C)
    delivery = Delivery(layout, None)

    long, short = job_of(9), job_of(3)
    for each in (long, short):
        each.submitted = 8.0
        assert list(delivery.hand_out(InFlight([(0, each)], jnp.zeros(()), 9.0), np.asarray(7), 9.0, 10.0)) == []
    report = np.zeros((4, 2, 8), np.int32)
    report[:, 0] = [1, 2, 0, 8, 6, 0, 0, 0]  # token, hits, misses, selected, kept, ...
    report[0, 1] = [1, 1, 3, 4, 2, 0, 0, 0]
    report[1, 1] = [-1 - 5, 1, 3, 4, 2, 0, 0, 0]  # its third token is its last
    report[2:, 1, 0] = 60  # nobody's
    ended = list(delivery.hand_out(InFlight([(0, long), (1, short)], jnp.zeros(()), 9.5), report, 10.0, 14.0))
    assert ended == [(short, "known")]
    assert short.handle.tokens == [7, 1, 5]
    assert long.handle.tokens == [7, 1, 1, 1, 1]
    now = delivery.recorder.metrics(waiting=0, reading=0, decoding=1, pages_free=0, pages_total=0)
    assert (now.steps, now.step_seconds.count, now.step_seconds.mean, now.step_seconds.longest) == (4, 4, 1.0, 1.0)
    assert (now.total.rows, now.total.seconds, now.total.hits, now.total.misses) == (6, 4.0, 10, 6)
    assert (now.last.rows, now.last.hits, now.last.misses, now.last.seconds) == (1, 2, 0, 1.0)
    assert (now.time_per_output_token.count, now.time_per_output_token.longest) == (6, 1.0)
    assert (now.time_to_first_token.count, now.time_to_first_token.longest) == (2, 2.0)
    assert now.generated_tokens == 8


@pytest.mark.parametrize("steps", [1, 8])
def test_j2_a_dispatch_copies_no_cache_and_moves_nothing(steps):
    """J2: state, tokens and sampling are aliased, each leaf with itself, and temporaries are smaller than half of one
    layer's slots."""
    config = ONE_LAYER.replace(block_size=16, head_dim=32, max_context=2**15)
    layout = CacheLayout(config, "nosa", 2, 2**14, True, 512)
    model = random_model(config)
    donated, given = jax.tree.flatten((init_state(layout), jnp.zeros(2, jnp.int32), empty_sampling(2)))

    def advance(model, donated):
        run = steps_function(2).__wrapped__
        return jax.tree.leaves(run(model, *given.unflatten(donated), steps=steps, greedy=True, record=False))

    compiled = jit_in_place(advance, donate_argnums=1).lower(model, donated).compile()
    memory = compiled.memory_analysis()
    slots = 2 * config.num_kv_heads * layout.n_slots * layout.page_bytes
    print(f"temporaries {memory.temp_size_in_bytes:,} B, one layer's slots {slots:,} B")
    assert memory.temp_size_in_bytes < slots / 2
    assert memory.alias_size_in_bytes >= layout.device_bytes()
    aliased = re.findall(r"\{(\d+)\}: \((\d+), \{\}", compiled.as_text().splitlines()[0])
    assert [(int(result), int(argument)) for result, argument in aliased] == [
        (i, len(jax.tree.leaves(model)) + i) for i in range(len(donated))
    ]


@pytest.mark.parametrize("wrong", [0, -1, 300])
def test_a_number_of_steps_that_no_request_takes_is_refused(wrong):
    with pytest.raises(
        InputError, match=rf"steps_per_dispatch={wrong} must be a whole number from 1 to max_context=233.*1 hands out"
    ):
        engine_of(steps_per_dispatch=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [2, 3, 8, 64])
def test_any_number_of_steps_gives_what_one_gives(at_once, solo):
    """More requests than rows, with ends of every kind; also more steps at once than any request takes."""
    with engine_of(steps_per_dispatch=at_once) as engine:
        handles = []
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            handles.append(engine.submit(prompt, params))
            turn(engine)
        engine.run_until_idle()
        assert [h.result().tokens for h in handles] == solo
    _, _, requests = ending_everywhere()
    assert outcomes(at_once, requests)[0] == outcomes(1, requests)[0]
    assert len(requests) > ROWS
