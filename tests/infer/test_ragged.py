"""Ragged batches and stopping: every request of a batch gets what it would get alone (CASES R1 and R2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.infer import Engine, SamplingParams, prefill
from tests.infer.cases import (
    ONE_LAYER,
    ROWS,
    SMALL,
    C,
    P,
    offloaded,
    page_of,
    random_model,
    random_tokens,
    run_steps,
)  # fmt: skip

# The published block and window sizes.
WIDE = ONE_LAYER.replace(block_size=64, pool_window=32, pool_stride=16)
MODEL = random_model()
NEW = 12


def generate(engine, prompts, **params):
    return engine.generate(prompts, SamplingParams(**(dict(max_new_tokens=NEW) | params)))


def assert_same(results, expected):
    """Equal in every field; by their text, since a locality may be NaN."""
    assert [repr(r) for r in results] == [repr(r) for r in expected]


@pytest.fixture(scope="module")
def wide_engine():
    with Engine(random_model(WIDE), max_batch=3, max_context=4097 + NEW, slots=C) as engine:
        yield engine


@pytest.mark.parametrize("lengths", [(1, 64, 4097), (63, 64, 65), (5, 5, 5)], ids=str)
def test_r1_every_row_of_a_batch_equals_its_solo_run(wide_engine, lengths):
    """R1: greedy, float32; also permuted, and in rows that held longer requests before."""
    prompts = [random_tokens(n, seed=i) for i, n in enumerate(lengths)]
    together = generate(wide_engine, prompts)
    assert [len(r.tokens) for r in together] == [NEW] * 3
    for prompt, result in zip(prompts, together, strict=True):
        assert_same(generate(wide_engine, [prompt]), [result])
    for order in ((2, 0, 1), (1, 2, 0)):
        permuted = generate(wide_engine, [prompts[i] for i in order])
        assert_same(permuted, [together[i] for i in order])


class RandomPadding:
    """NumPy as `prefill` uses it, but for the ids around a prompt's: they are random instead of 0."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.made = 0

    def __getattr__(self, name):
        return getattr(np, name)

    def zeros(self, shape, dtype):
        self.made += 1
        return self._rng.integers(1, SMALL.vocab_size, shape).astype(dtype)


def read_and_step(prompts, chunk):
    """All arrays of a state after prompts were read, their full blocks' host pages, and the logits of 12 steps."""
    with offloaded(MODEL) as engine:
        state = engine.prefill(prompts, chunk=chunk)
        arrays = [np.asarray(x) for x in jax.tree.leaves(state.replace(handle=jnp.zeros_like(state.handle)))]
        places = [
            (layer, row, head, block)
            for layer, head in np.ndindex(SMALL.num_layers, SMALL.num_kv_heads)
            for row, prompt in enumerate(prompts)
            for block in range(len(prompt) // P)
        ]
        pages = [engine._pool.read_page(page_of(engine.layout, state, *place)) for place in places]
        return [*arrays, *pages, run_steps(MODEL, state, 12).logits]


@pytest.mark.parametrize("chunk", [16, pytest.param(2048, marks=pytest.mark.slow)])
def test_r1_what_prompts_are_padded_with_never_matters(monkeypatch, chunk):
    """R1: random ids instead of 0 behind each piece of each prompt; bits of the whole state, of the host's pages, of
    what the steps compute, and what the scheduler makes of it."""
    prompts = [random_tokens(n, seed=n) for n in (1, P - 1, P, P + 1, 11, 33, 3)]
    plain = read_and_step(prompts, chunk)
    with offloaded(MODEL, prefill_chunk=chunk) as engine:
        tokens = generate(engine, prompts)
    for seed in (0, 1):
        padding = RandomPadding(seed)
        with monkeypatch.context() as patch:
            patch.setattr(prefill, "np", padding)
            other = read_and_step(prompts, chunk)
            made = padding.made
            with offloaded(MODEL, prefill_chunk=chunk) as engine:
                assert_same(generate(engine, prompts), tokens)
        assert made == sum(-(-len(prompt) // chunk) for prompt in prompts)
        assert padding.made == 2 * made
        for mine, expected in zip(other, plain, strict=True):
            assert mine.tobytes() == expected.tobytes()


def test_r1_more_prompts_than_rows_are_worth_the_same():
    """Requests that wait for a row get the tokens, hits and misses of a batch that held all of them."""
    prompts = [random_tokens(n, seed=n) for n in (1, P, 11, 33, 31, 3, 5, 27, 32, 11, 3, 33)]
    with offloaded(MODEL) as engine:
        waiting = generate(engine, prompts)
        alone = [generate(engine, [prompt])[0] for prompt in prompts]
    assert [r.tokens for r in waiting] == [r.tokens for r in alone]
    assert [r.prompt_length for r in waiting] == [len(p) for p in prompts]
    assert len(prompts) > ROWS


@pytest.mark.slow
def test_r1_other_batch_sizes_give_the_same_tokens():
    prompts = [random_tokens(n, seed=n) for n in (1, P, 11, 33, 31)]
    outcomes = []
    for batch in (1, 2, 5):
        with offloaded(MODEL, max_batch=batch) as engine:
            outcomes.append([r.tokens for r in generate(engine, prompts, max_new_tokens=60)])
    assert outcomes[0] == outcomes[1] == outcomes[2]


# What the model says to these prompts freely, and tokens of it that come up late for the first time.
PROMPTS = [random_tokens(n, seed=100 + n) for n in (11, 5, 33)]


@pytest.fixture(scope="module")
def engine():
    with offloaded(MODEL) as engine:
        yield engine


@pytest.fixture(scope="module")
def free(engine):
    return [r.tokens for r in generate(engine, PROMPTS)]


def test_r2_end_of_sequence_at_the_first_and_third_token_and_never(engine, free):
    first, third = free[0][0], free[1][2]
    assert third not in free[1][:2], "pick a prompt whose third token is new"
    unused = next(t for t in range(SMALL.vocab_size) if t not in free[2])
    params = [SamplingParams(max_new_tokens=NEW, eos_ids=(eos,)) for eos in (first, third, unused)]
    results = engine.generate(PROMPTS, params, record_steps=True)
    assert [r.tokens for r in results] == [free[0][:1], free[1][:3], free[2]]
    assert [r.finish_reason for r in results] == ["eos", "eos", "length"]
    # The first token comes with the prefill, each other one with a step.
    assert [r.steps.hits.shape for r in results] == [(n, SMALL.num_layers, SMALL.num_kv_heads) for n in (0, 2, NEW - 1)]
    assert engine.allocator.n_free == engine.plan.page_groups


def test_r2_a_finished_row_costs_nothing_more(engine, free):
    """The pool's own count of pages read grows by the misses of the steps that each row needed, and the loop ends
    with the last row."""
    solo = [generate(engine, [p], max_new_tokens=n)[0] for p, n in zip(PROMPTS, (3, 1, NEW), strict=True)]
    before, step = engine._pool.stats(), int(engine._scheduler.state.step)
    params = [SamplingParams(max_new_tokens=n) for n in (3, 1, NEW)]
    results = engine.generate(PROMPTS, params)
    after = engine._pool.stats()
    assert_same(results, solo)
    assert after.pages_read - before.pages_read == sum(r.misses for r in results)
    assert after.bytes_read - before.bytes_read == sum(r.bytes_fetched for r in results)
    assert int(engine._scheduler.state.step) - step == NEW - 1
    assert not np.asarray(engine._scheduler.state.active).any()


def test_r2_several_ids_end_a_sequence(engine, free):
    params = SamplingParams(max_new_tokens=NEW, eos_ids=(free[0][4], free[0][2], free[1][3]))
    for tokens, result in zip(free[:2], engine.generate(PROMPTS[:2], params), strict=True):
        end = next(i for i, t in enumerate(tokens) if t in params.eos_ids)
        assert (result.tokens, result.finish_reason) == (tokens[: end + 1], "eos")


def test_r2_an_end_of_sequence_id_in_the_prompt_or_as_padding_ends_nothing(engine, free):
    """Prompts are padded with id 0 inside; 0 ends a request only when it is generated."""
    prompt = np.concatenate([[0, 0], PROMPTS[0][2:]])
    plain = generate(engine, [prompt])[0].tokens
    stopped = generate(engine, [prompt], eos_ids=(0,))[0].tokens
    assert stopped == (plain[: plain.index(0) + 1] if 0 in plain else plain)
    unused = next(t for t in range(SMALL.vocab_size) if t not in free[0])
    prompt = np.concatenate([PROMPTS[0][:-2], [unused, PROMPTS[0][-1]]])
    plain = generate(engine, [prompt])[0].tokens
    stopped = generate(engine, [prompt], eos_ids=(unused,))[0].tokens
    assert stopped == (plain[: plain.index(unused) + 1] if unused in plain else plain)


def test_r2_no_and_one_new_token(engine, free):
    results = engine.generate(PROMPTS, [SamplingParams(max_new_tokens=n) for n in (0, 1, 2)], record_steps=True)
    assert [r.tokens for r in results] == [[], free[1][:1], free[2][:2]]
    assert [r.finish_reason for r in results] == ["length"] * 3
    assert [len(r.steps.hits) for r in results] == [0, 0, 1]
    assert results[0].hits == results[0].misses == 0
    assert np.isnan(results[0].hit_rate)
    assert generate(engine, PROMPTS[:1], max_new_tokens=0)[0].tokens == []
    assert engine.generate([]) == []


def test_tokens_are_reported_as_they_come(engine, free):
    seen = []
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=3), on_token=lambda *event: seen.append(event))
    assert seen[:3] == [(i, free[i][0]) for i in range(3)], "first tokens come with the prefills"
    assert sorted(seen) == sorted((i, t) for i in range(3) for t in free[i][:3])


def test_a_row_without_room_freezes_and_the_others_go_on():
    """By hand: a row stops at its capacity, keeps its logits and costs no more; its neighbour is undisturbed."""
    tokens = random_tokens((ROWS, 10), seed=5)
    with offloaded(MODEL) as engine:
        short = run_steps(MODEL, engine.prefill([PROMPTS[0], PROMPTS[1]], max_new_tokens=3), tokens)
        room = run_steps(MODEL, engine.prefill([PROMPTS[0], PROMPTS[1], PROMPTS[2]]), tokens)
        np.testing.assert_array_equal(short.state.lengths[:3], [14, 8, 0])
        np.testing.assert_array_equal(room.state.lengths[:3], [21, 15, 43])
    np.testing.assert_array_equal(short.logits[:3, :2], room.logits[:3, :2])
    np.testing.assert_array_equal(short.logits[3:, :2], np.broadcast_to(room.logits[2, :2], (7, 2, SMALL.vocab_size)))
    for name in ("hits", "misses", "selected", "kept"):
        assert not getattr(short, name)[3:].any()
        assert not getattr(short, name)[:, :, 2:].any(), "rows that were never filled take no part"
    assert room.misses[:, :, 2].any()
