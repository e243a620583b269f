"""Attention over resident blocks while others arrive: the same bits as with every block on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax import ffi
from nosa_jax.infer import decode
from nosa_jax.offload import residency
from nosa_jax.pallas_kernels.decode_attention import mosaic_gpu
from tests.infer.cases import (
    FOR_KERNELS,
    LENGTHS,
    ONE_LAYER,
    C,
    offloaded,
    random_model,
    random_tokens,
    resident,
    run_steps,
)  # fmt: skip


class Withheld(NamedTuple):
    """In place of `PendingFetch`: the late blocks are kept back until the second half."""

    late: jax.Array
    cache: jax.Array


@pytest.fixture
def late_blocks_are_nan(monkeypatch):
    """Between the halves, slots of late blocks hold NaN, as if nothing had been copied yet."""

    def start(*args, **options):
        fetched, pending = ffi.start_fetch(*args, **options)
        slots = jnp.where(pending.late == 1, fetched.slot_ids, -1)
        waits = (slots[..., None] == jnp.arange(fetched.cache.shape[2])).any(axis=-2)
        hidden = jnp.where(waits[..., None, None, None], jnp.nan, fetched.cache)
        return fetched._replace(cache=hidden), Withheld(pending.late, fetched.cache)

    def finish(cache, pending, *, after=()):
        _, _, filled = jax.lax.optimization_barrier((cache, after, pending.cache))
        return filled

    monkeypatch.setattr(residency, "start_fetch", start)
    monkeypatch.setattr(decode, "finish_fetch", finish)
    return jax.jit(lambda model, state, tokens: decode.step(model, state, tokens), donate_argnums=1)


def same_bits(moved, stayed):
    """The law: logits, selected blocks and counts."""
    assert moved.logits.tobytes() == stayed.logits.tobytes()
    np.testing.assert_array_equal(moved.ids, stayed.ids)
    np.testing.assert_array_equal(moved.hits + moved.misses, stayed.hits)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [C, C + 3])
def test_o1_with_overlap_decode_equals_resident_decode_bit_for_bit(slots):
    """O1: 60 steps of rows of all lengths, two layers."""
    model, prompts = random_model(), [random_tokens(n, seed=n) for n in LENGTHS]
    with offloaded(model, slots=slots, overlap=True) as engine:
        assert engine.layout.overlap
        moved = run_steps(model, engine.prefill(prompts), 60)
        engine.check()
        assert engine._pool.stats().pages_read == moved.misses.sum()
    same_bits(moved, run_steps(model, resident(model).prefill(prompts), 60))
    assert moved.misses.sum() > 100


def test_o1_late_blocks_are_not_read_before_they_are_there(late_blocks_are_nan):
    """O1 where the first half copies nothing, through XLA."""
    model, prompts = random_model(ONE_LAYER), [random_tokens(33), random_tokens(11)]
    options = dict(max_batch=2, max_context=33 + 120)
    with offloaded(model, slots=C + 1, overlap=True, **options) as engine:
        moved = run_steps(model, engine.prefill(prompts), 120, late_blocks_are_nan)
    same_bits(moved, run_steps(model, resident(model, **options).prefill(prompts), 120))
    assert moved.misses.sum() > 60


@pytest.mark.slow
def test_o1_late_blocks_are_not_read_before_they_are_there_by_the_kernels(late_blocks_are_nan, monkeypatch):
    """The same through the interpreted kernels, whose first half computes the parts without late blocks."""
    interpret = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    computed = []

    def attend(*args):
        return mosaic_gpu.decode_attention(*args, interpret=interpret)

    def attend_in_two(*args):
        *args, late, finish = args
        jax.debug.callback(lambda x: computed.append(np.array(x)), late.reshape(late.shape[0], 2, -1).max(axis=-1))
        return mosaic_gpu.decode_attention_in_two(*args, late, finish=finish, interpret=interpret)

    monkeypatch.setattr(decode, "decode_attention", attend)
    monkeypatch.setattr(decode, "decode_attention_in_two", attend_in_two)
    step = jax.jit(lambda model, state, tokens: decode.step(model, state, tokens), donate_argnums=1)
    model, prompts = random_model(FOR_KERNELS), [random_tokens(180), random_tokens(150)]
    options, steps = dict(max_batch=2, max_context=208), 12
    with offloaded(model, slots=C + 1, overlap=True, **options) as engine:
        moved = run_steps(model, engine.prefill(prompts), steps, late_blocks_are_nan)
    jax.effects_barrier()
    same_bits(moved, run_steps(model, resident(model, **options).prefill(prompts), steps, step))
    parts = np.concatenate(computed)
    assert (parts == 0).any(), "no part was computed early; the test shows nothing"
    assert (parts == 1).any(), "no part was computed late; the test shows nothing"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("slots", [C, C + 1])
def test_o1_with_overlap_the_kernels_give_the_bits_of_resident_decode(slots):
    """O1 on a GPU: 50 steps through the kernels, and two engines in turn on one device."""
    model, prompts = random_model(FOR_KERNELS), [random_tokens(180), random_tokens(150)]
    options, steps = dict(max_batch=2, max_context=240), 50
    with (
        offloaded(model, slots=slots, overlap=True, **options) as one,
        offloaded(model, slots=slots, overlap=True, **options) as two,
    ):
        tokens = random_tokens((2, steps), seed=5)
        first, second = one.prefill(prompts), two.prefill(prompts)
        logits = []
        for t in range(steps):
            a, first = decode.decode_step(model, first, tokens[:, t])
            b, second = decode.decode_step(model, second, tokens[:, t])
            logits.append((a, b))
        one.check()
        two.check()
        assert first.stats().total.misses.sum() > 20
    stayed = run_steps(model, resident(model, **options).prefill(prompts), tokens)
    for both, expected in zip(logits, stayed.logits, strict=True):
        for got in both:
            assert np.asarray(got).tobytes() == expected.tobytes()
