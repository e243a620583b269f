"""Engines that are refused, interrupted, dropped, closed, or live beside others."""

import gc
import re
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

from nosa_jax.errors import InputError
from nosa_jax.ffi import HostMemoryError, PoolClosedError
from nosa_jax.infer import Engine, SamplingParams, decode_step
from nosa_jax.offload import OutOfPagesError
from nosa_jax.tokenizer import ByteTokenizer
from tests.infer.cases import (
    FOR_KERNELS,
    ONE_LAYER,
    ROWS,
    SMALL,
    C,
    P,
    offloaded,
    random_model,
    random_tokens,
    run_steps,
)
from tests.infer.devices import on_gpu_too

MODEL = random_model()
PROMPTS = [random_tokens(n, seed=n) for n in (11, 33, 5)]
GREEDY = SamplingParams(max_new_tokens=12)
GROUP = SMALL.num_layers * SMALL.num_kv_heads * 2 * P * SMALL.head_dim * 4  # bytes of one block of one row


def tokens_of(engine, prompts=PROMPTS, params=GREEDY):
    return [r.tokens for r in engine.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected():
    """What an undisturbed engine generates."""
    with offloaded(MODEL) as engine:
        return tokens_of(engine)


def test_o3_a_pool_one_block_too_small_is_refused_before_anything_starts(expected):
    """O3: 33 + 12 tokens need 12 blocks; 11 are there. The message has the bytes, and a shorter prompt then works."""
    with offloaded(MODEL, host_budget=12 * GROUP - 1) as engine:
        assert engine.plan.page_groups == 11
        seen = []
        message = rf"prompt 1 needs 12 blocks.*\({12 * GROUP:,} bytes\).*has 11 \({11 * GROUP:,} bytes"
        with pytest.raises(OutOfPagesError, match=message):
            engine.generate(PROMPTS, GREEDY, on_token=lambda *event: seen.append(event))
        with pytest.raises(OutOfPagesError, match=rf"needs 12 blocks of host memory \({12 * GROUP:,} bytes\)"):
            engine.prefill([PROMPTS[1]], max_new_tokens=12)
        assert not seen
        assert engine.allocator.n_free == 11
        assert tokens_of(engine, PROMPTS[:1]) == expected[:1]


def test_prompts_wait_for_pages_and_take_those_of_a_finished_row_at_once(expected):
    """O5: with pages for two requests only, the third is admitted in the step after the first has ended."""
    needed = [SMALL.num_blocks(len(p) + 12) for p in PROMPTS]
    assert needed == [6, 12, 5]
    params = [SamplingParams(max_new_tokens=n) for n in (2, 12, 12)]
    events = []
    with offloaded(MODEL, host_budget=(SMALL.num_blocks(11 + 2) + needed[1]) * GROUP) as engine:
        results = engine.generate(PROMPTS[:2], params[:2])  # the rows are used once before
        params[0] = SamplingParams(max_new_tokens=2)
        short = PROMPTS[0][:5]
        results = engine.generate(
            [PROMPTS[0], PROMPTS[1], short], [*params[:2], SamplingParams(max_new_tokens=4)],
            on_token=lambda *event: events.append(event[0]),
        )  # fmt: skip
        assert engine.allocator.n_free == engine.plan.page_groups
    assert [r.tokens for r in results[:2]] == [expected[0][:2], expected[1]]
    assert [len(r.tokens) for r in results] == [2, 12, 4]
    assert events[:4] == [0, 1, 0, 1], "prompt 2 finds no pages at first"
    assert events[4] == 2, "prompt 2 starts as soon as prompt 0 has ended"
    assert events.index(2) < len(events) - 1 - events[::-1].index(1)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@on_gpu_too
def test_o5_fifty_engines_used_half_way_and_dropped_leave_nothing():
    """O5: their pools are closed with the last reference, and neither host nor device memory grows."""
    pools, pool_bytes = [], 0

    def use_and_drop():
        nonlocal pool_bytes
        engine = offloaded(MODEL)
        pool_bytes = engine.plan.host_bytes
        state = engine.prefill(PROMPTS[:1])
        _, state = decode_step(MODEL, state, np.zeros(ROWS, np.int32))
        np.asarray(state.lengths)
        pools.append(weakref.ref(engine._pool))

    for _ in range(5):
        use_and_drop()
    gc.collect()
    host, device = resident_bytes(), sum(x.nbytes for x in jax.live_arrays())
    for _ in range(50):
        use_and_drop()
    gc.collect()
    assert all(pool() is None for pool in pools)
    assert sum(x.nbytes for x in jax.live_arrays()) <= device
    assert resident_bytes() - host < 20 * pool_bytes, "the pools of dropped engines are still there"


@on_gpu_too
def test_o5_interrupted_between_two_steps(expected):
    """O5: the engine is usable at once, all pages are free, and its tokens are those of a fresh engine."""
    with offloaded(MODEL) as engine:

        def interrupt(index, token):
            if index == 1 and len(seen) > 6:
                raise KeyboardInterrupt
            seen.append(token)

        seen: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, GREEDY, on_token=interrupt)
        assert engine.allocator.n_free == engine.plan.page_groups
        assert tokens_of(engine) == expected


def test_an_abandoned_state_is_revoked_and_not_read(expected):
    """Promise 3: a state whose pages were given to others fails, with the numbers, instead of reading them."""
    with offloaded(MODEL) as engine:
        state = engine.prefill(PROMPTS)
        assert tokens_of(engine) == expected
        assert_refused(engine, state)
        first = engine.prefill(PROMPTS)
        second = engine.prefill(PROMPTS)
        assert_refused(engine, first)
        # A state of its own: nothing of the calls before is counted in it.
        assert second.stats().steps == 0
        assert not second.stats().total.hits.any()
        by_hand = run_steps(MODEL, second, 11)
        for row, tokens in enumerate(expected):
            # The step after token i gives token i + 1; the prefill gave the first.
            assert by_hand.logits[:, row].argmax(axis=-1).tolist() == tokens[1:]


def step_until_pages_are_used(state):
    for _ in range(2 * P):  # within P steps every row fills a block
        logits, state = decode_step(MODEL, state, np.zeros(ROWS, np.int32))
        logits.block_until_ready()


def step_and_check(engine, state):
    step_until_pages_are_used(state)
    engine.check()


def assert_refused(engine, state):
    """The pool's handle is refused: an exception that holds its numbers, on a GPU from `check`."""
    with pytest.raises((jax.errors.JaxRuntimeError, PoolClosedError), match=r"closed|handle") as caught:
        step_and_check(engine, state)
    assert re.search(r"\d", str(caught.value))


@on_gpu_too
def test_o5_a_closed_engine_says_so():
    engine = offloaded(MODEL)
    state = engine.prefill(PROMPTS)
    pool = engine._pool
    engine.close()
    engine.close()
    for use in (lambda: engine.generate(PROMPTS), lambda: engine.prefill(PROMPTS)):
        with pytest.raises(RuntimeError, match="engine is closed"):
            use()
    assert_refused(engine, state)
    with pytest.raises(PoolClosedError):
        pool.read_page(0)
    with pytest.raises(RuntimeError, match="engine is closed"):
        engine.__enter__()


# Two models of other head dims, block sizes, layers and rows than each other, and what their engines take.
APART = {
    "float32": (
        (SMALL, (11, 33), {}),
        (
            ONE_LAYER.replace(block_size=8, head_dim=16, pool_window=8, pool_stride=4),
            (11, 33),
            dict(max_batch=2, max_context=120),
        ),
    ),
    "16 bits, overlap": (
        (FOR_KERNELS.replace(num_layers=2), (180, 150), dict(max_batch=3, max_context=256, overlap=True)),
        (
            FOR_KERNELS.replace(block_size=32, head_dim=128, pool_window=32, pool_stride=16),
            (300, 280),
            dict(max_batch=2, max_context=384, overlap=True),
        ),
    ),
}


@on_gpu_too
@pytest.mark.parametrize("shapes", ["float32", pytest.param("16 bits, overlap", marks=pytest.mark.slow)])
def test_o6_engines_of_other_shapes_beside_each_other(shapes):
    """O6: steps of two engines interleaved equal solo runs; one is destroyed, a third is made, the second goes on."""
    (config_a, lengths_a, options_a), (config_b, lengths_b, options_b) = APART[shapes]
    model_a, model_b = random_model(config_a), random_model(config_b, seed=3)
    prompts_a, prompts_b = ([random_tokens(n, seed=n) for n in lengths] for lengths in (lengths_a, lengths_b))
    with offloaded(model_a, **options_a) as a, offloaded(model_b, **options_b) as b:
        tokens_a, tokens_b = (random_tokens((e.layout.max_batch, 60), seed=8 + i) for i, e in enumerate((a, b)))
        solo_a = run_steps(model_a, a.prefill(prompts_a), tokens_a)
        solo_b = run_steps(model_b, b.prefill(prompts_b), tokens_b)

    def in_turn(state_a, state_b, begin_b):
        for t in range(30):
            logits_a, state_a = decode_step(model_a, state_a, tokens_a[:, t])
            logits_b, state_b = decode_step(model_b, state_b, tokens_b[:, begin_b + t])
            np.testing.assert_array_equal(logits_a[:2], solo_a.logits[t, :2])
            np.testing.assert_array_equal(logits_b, solo_b.logits[begin_b + t])
        return state_b

    a, b = offloaded(model_a, **options_a), offloaded(model_b, **options_b)
    state_b = in_turn(a.prefill(prompts_a), b.prefill(prompts_b), 0)
    a.check()
    a.close()
    del a
    third = offloaded(model_a, **options_a)
    in_turn(third.prefill(prompts_a), state_b, 30)
    assert solo_a.misses.sum() > 0
    assert solo_b.misses.sum() > 0
    third.check()
    b.check()
    third.close()
    b.close()


def test_a_pool_beyond_all_memory_is_refused_and_the_process_goes_on(expected):
    """O4 on the CPU: terabytes of pages; the message names bytes needed and available."""
    huge = random_model(ONE_LAYER.replace(max_context=2**22))
    with pytest.raises(HostMemoryError, match=rf"{2**15 * 2**22 * GROUP // 2 // P}.*available"):
        Engine(huge, max_batch=2**15, max_context=2**22, slots=C)
    with offloaded(MODEL) as engine:
        assert tokens_of(engine) == expected


def test_a_refused_prefill_leaves_the_state_before_it_alone():
    with offloaded(MODEL, host_budget=12 * GROUP) as engine:
        state = engine.prefill(PROMPTS[:1], max_new_tokens=12)
        with pytest.raises(OutOfPagesError, match="2 prompts need 14 blocks"):
            engine.prefill([PROMPTS[0], PROMPTS[0]], max_new_tokens=15)
        assert run_steps(MODEL, state, 3).logits.shape[0] == 3
        engine.check()


def test_ids_beyond_the_tokenizer_are_no_text():
    """Vocabularies are padded to round sizes: a model may choose an id that its tokenizer does not have."""
    config = ONE_LAYER.replace(vocab_size=512)
    with offloaded(random_model(config), tokenizer=ByteTokenizer()) as engine:
        results = engine.generate(["ab", "cd"], SamplingParams(max_new_tokens=20, temperature=5.0))
    chosen = [token for r in results for token in r.tokens]
    assert max(chosen) >= 259
    assert all(r.text == ByteTokenizer().decode([t for t in r.tokens if t < 256]) for r in results)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.generate(PROMPTS, []), "3 prompts but 0 sampling parameters"),
        (lambda e: e.generate([random_tokens(200, seed=0)]), "prompt 0 has 200 tokens.*holds [0-9]+ per row"),
        (lambda e: SamplingParams(top_k=2**31), "top_k=2147483648"),
        (lambda e: offloaded(MODEL, device_budget=-5), "-5 bytes"),
    ],
)
def test_misuse_is_refused_with_the_value(call, message):
    with offloaded(MODEL) as engine, pytest.raises(InputError, match=message):
        call(engine)


def test_a_step_wants_one_token_per_row():
    with offloaded(MODEL) as engine:
        state = engine.prefill(PROMPTS)
        with pytest.raises(ValueError, match=rf"\(1,\); each of the {ROWS} rows"):
            decode_step(MODEL, state, np.zeros(1, np.int32))
