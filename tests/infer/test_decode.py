"""Decoding token by token equals one forward pass and prefill in pieces: logits and selected blocks."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.infer import decode_step
from nosa_jax.offload import init_state
from nosa_jax.selection import pooled_keys
from tests.infer.cases import (
    CONTEXT,
    LENGTHS,
    ONE_LAYER,
    ROWS,
    SMALL,
    C,
    P,
    continuation,
    forward,
    offloaded,
    random_model,
    random_tokens,
    resident,
    run_steps,
    selected_ids,
)  # fmt: skip
from tests.oracle import decoder
from tests.oracle.compare import assert_close
from tests.oracle.weights import model_with, random_weights

STEPS = 200
MODEL = random_model()
TOKENS = random_tokens((ROWS, CONTEXT))


def prompts_of(tokens, lengths=LENGTHS):
    return [row[:n] for row, n in zip(tokens, lengths, strict=True)]


def statistics_of(cache, row, n_tokens):
    """The defined part of what a layer keeps about the tokens of a row beside their keys and values."""
    found = {name: np.array(getattr(cache, name)[row]) for name in ("pooled_k", "block_rank", "key_sums", "rank_sums")}
    found["pooled_k"] = found["pooled_k"][:, : SMALL.num_windows(n_tokens)]
    return found | {"cis": np.array(cache.cis[row]).reshape(SMALL.num_kv_heads, -1)[:, :n_tokens]}


@pytest.fixture(scope="module")
def whole():
    """Logits and ids of all positions in one forward pass."""
    return forward(MODEL, TOKENS)


@pytest.fixture(scope="module")
def decoded():
    """Prefill logits, and the trace of 200 teacher-forced steps of rows that start at all `LENGTHS`."""
    with offloaded(MODEL) as engine:
        state = engine.prefill(prompts_of(TOKENS))
        first = np.asarray(state.logits), selected_ids(state)
        return first, run_steps(MODEL, state, continuation(TOKENS, LENGTHS, STEPS))


def test_b7_decode_of_200_tokens_equals_one_forward(whole, decoded):
    """B7: from lengths 1, P-1, P, P+1, 3P-1, C*P-1, C*P, C*P+1 (and C*P-5), logits and selected ids of every step."""
    logits, ids = whole
    first, trace = decoded
    for row, n in enumerate(LENGTHS):
        assert_close(first[0][row], logits[row, n - 1], 2e-5)
        np.testing.assert_array_equal(first[1][:, row], ids[:, row, n - 1])
        assert_close(trace.logits[:, row], logits[row, n : n + STEPS], 2e-5)
        np.testing.assert_array_equal(trace.ids[:, :, row], np.moveaxis(ids[:, row, n : n + STEPS], 1, 0))
    np.testing.assert_array_equal(trace.state.lengths, np.array(LENGTHS) + STEPS)


@pytest.mark.parametrize("start", [C * P - 5, P - 1])
def test_b6_logits_while_the_context_crosses_the_budget_equal_a_fresh_forward(decoded, start):
    """B6: every step against the float64 decoder over a sequence of exactly that length."""
    row = LENGTHS.index(start)
    weights = random_weights(SMALL, 1)
    for step in range(10):
        expected, traces = decoder.forward(SMALL, weights, TOKENS[row : row + 1, : start + step + 1])
        assert_close(decoded[1].logits[step, row], expected[0, -1], 2e-5)
        for layer, trace in enumerate(traces):
            np.testing.assert_array_equal(decoded[1].ids[step, layer, row], trace.ids[0, -1])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(7, None), (1, 64, 100)], ids=str)
def test_b7_prefill_in_pieces_of_any_size(whole, sizes):
    """B7: pieces of 1, 7, 64, 100 tokens and all at once leave the same cache, from which decoding goes on alike."""
    logits, ids = whole
    prompt, n = TOKENS[0, :110], 110
    for chunk in sizes:
        with offloaded(MODEL) as engine:
            state = engine.prefill([prompt], chunk=chunk)
            np.testing.assert_array_equal(selected_ids(state)[:, 0], ids[:, 0, n - 1])
            assert_close(state.logits[0], logits[0, n - 1], 2e-5)
            if chunk == sizes[0]:
                first = [statistics_of(layer, 0, n) for layer in state.layers]
            for layer, expected in zip(state.layers, first, strict=True):
                for name, value in statistics_of(layer, 0, n).items():
                    assert_close(value, expected[name], 1e-5)
            trace = run_steps(MODEL, state, np.tile(TOKENS[0, n : n + 2 * P + 1], (ROWS, 1)))
            assert_close(trace.logits[:, 0], logits[0, n : n + 2 * P + 1], 2e-5)
            np.testing.assert_array_equal(
                trace.ids[:, :, 0], np.moveaxis(ids[:, 0, n : n + 2 * P + 1], 1, 0), err_msg=f"{chunk=}"
            )


@pytest.mark.slow
def test_b7_prefill_in_pieces_of_a_resident_cache(whole):
    logits, ids = whole
    for chunk in (1, 7, 64, 100, None):
        state = resident(MODEL).prefill([TOKENS[0, :110]], chunk=chunk)
        trace = run_steps(MODEL, state, np.tile(TOKENS[0, 110:120], (ROWS, 1)))
        assert_close(trace.logits[:, 0], logits[0, 110:120], 2e-5)
        np.testing.assert_array_equal(trace.ids[:, :, 0], np.moveaxis(ids[:, 0, 110:120], 1, 0))


def test_b7_windows_completed_in_decode_equal_those_of_prefill(decoded):
    """The cache after 200 steps from 33 tokens against a prefill of all 233, and against pooling the keys at once."""
    row = ROWS - 1
    grown = decoded[1].state
    n = int(grown.lengths[row])
    with offloaded(MODEL) as engine:
        read = engine.prefill([TOKENS[row, :n]])
    for mine, other in zip(grown.layers, read.layers, strict=True):
        expected = statistics_of(other, 0, n)
        for name, value in statistics_of(mine, row, n).items():
            assert_close(value, expected[name], 1e-5)
    weights = random_weights(SMALL, 1)
    _, traces = decoder.forward(SMALL, weights, TOKENS[row : row + 1, :n])
    for mine, trace in zip(grown.layers, traces, strict=True):
        pooled = pooled_keys(jnp.asarray(trace.k, jnp.float32), SMALL)
        assert_close(statistics_of(mine, row, n)["pooled_k"], pooled[0], 1e-5)


@pytest.mark.parametrize("attention", ["dense", "infllmv2", pytest.param("dma", marks=pytest.mark.slow)])
def test_compared_systems_decode_like_their_forward(attention):
    config = ONE_LAYER.replace(attention=attention)
    model = random_model(config)
    tokens, lengths, steps = random_tokens((2, 80)), (3 * P - 1, 3 * P - 2), 60
    build = resident if attention == "dense" else offloaded
    engine = build(model, max_batch=2, max_context=80, **({} if attention == "dense" else {"slots": C}))
    trace = run_steps(model, engine.prefill(prompts_of(tokens, lengths)), continuation(tokens, lengths, steps))
    logits, ids = forward(model, tokens)
    for row, n in enumerate(lengths):
        assert_close(trace.logits[:, row], logits[row, n : n + steps], 2e-5)
        if ids is not None:
            np.testing.assert_array_equal(trace.ids[:, :, row], np.moveaxis(ids[:, row, n : n + steps], 1, 0))
    if attention == "dma":
        assert trace.misses.sum() == 0, "a selection without query picks never fetches"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        dict(eviction="dma"),
        dict(eviction="none"),
        dict(num_heads=6, num_kv_heads=2, head_dim=6, tie_embeddings=True),
        dict(num_heads=3, num_kv_heads=1, pool_window=8, pool_stride=2, local_blocks=3),
        dict(block_size=6, pool_window=3, pool_stride=3),
    ],
    ids=str,
)
def test_other_shapes_decode_like_their_forward(change):
    config = ONE_LAYER.replace(**change)
    model = random_model(config)
    tokens, lengths = random_tokens((2, 120)), (11, 50)
    with offloaded(model, max_batch=2, max_context=120, slots=config.budget.total) as engine:
        trace = run_steps(model, engine.prefill(prompts_of(tokens, lengths)), continuation(tokens, lengths, 60))
    logits, ids = forward(model, tokens)
    for row, n in enumerate(lengths):
        assert_close(trace.logits[:, row], logits[row, n : n + 60], 2e-5)
        np.testing.assert_array_equal(trace.ids[:, :, row], np.moveaxis(ids[:, row, n : n + 60], 1, 0))


def test_bfloat16_decode_stays_near_its_forward():
    """In bfloat16 the sums of one pass and of single steps round differently; most selected blocks stay the same."""
    config = ONE_LAYER.replace(dtype="bfloat16")
    model = random_model(config)
    tokens, lengths, steps = random_tokens((2, 80)), (3 * P - 1, 3 * P - 2), 60
    with offloaded(model, max_batch=2, max_context=80) as engine:
        trace = run_steps(model, engine.prefill(prompts_of(tokens, lengths)), continuation(tokens, lengths, steps))
    logits, ids = forward(model, tokens)
    exact, _ = forward(random_model(ONE_LAYER), tokens)
    for row, n in enumerate(lengths):
        part = slice(n, n + steps)
        rounding = np.abs(logits[row, part] - exact[row, part]).mean()
        assert np.abs(trace.logits[:, row] - logits[row, part]).mean() < rounding
        assert np.abs(trace.logits[:, row] - exact[row, part]).mean() < 2 * rounding
        same = (trace.ids[:, :, row] == np.moveaxis(ids[:, row, part], 1, 0)).mean()
        assert same > 0.95, f"only {same:.1%} of the selected ids agree"


def test_a_model_and_its_frozen_form_give_the_same_step():
    model = model_with(SMALL, random_weights(SMALL, 1))
    outcomes = []
    for form in (model, MODEL):
        with offloaded(form) as engine:
            logits, _ = decode_step(form, engine.prefill([TOKENS[0, :5]]), np.zeros(ROWS, np.int32))
            outcomes.append(np.asarray(logits[0]))
    np.testing.assert_array_equal(*outcomes)


def test_undefined_parts_of_the_cache_never_matter():
    """A cache that was full of NaN before its rows were read decodes to the same bits as a zeroed one."""
    traces = []
    for poison in (False, True):
        with offloaded(MODEL) as engine:
            state = init_state(engine.layout, engine._pool.handle)
            if poison:
                layers = [
                    dataclasses.replace(
                        layer, **{name: np.nan + getattr(layer, name) for name in
                                  ("slots", "cis", "pooled_k", "block_rank", "key_sums", "rank_sums")}
                    )
                    for layer in state.layers
                ]  # fmt: skip
                state = state.replace(layers=tuple(layers))
            engine._memory.new_state = lambda state=state: state
            lengths = LENGTHS[:5]
            state = engine.prefill(prompts_of(TOKENS[:5], lengths))
            tokens = np.where(np.arange(ROWS)[:, None] < 5, TOKENS[:, 100:140], -(2**31))
            traces.append(run_steps(MODEL, state, tokens))
    clean, poisoned = traces
    np.testing.assert_array_equal(poisoned.logits[:, :5], clean.logits[:, :5])
    for name in ("ids", "hits", "misses"):
        np.testing.assert_array_equal(getattr(poisoned, name)[:, :, :5], getattr(clean, name)[:, :, :5])
    assert np.isfinite(traces[1].logits[:, :5]).all()
