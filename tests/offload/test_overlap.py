"""Attention over resident blocks while others arrive: the same bits as with every block on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax import NosaConfig, ffi
from nosa_jax.infer import decode
from nosa_jax.offload import CacheLayout, init_state
from nosa_jax.offload.arrivals import attend_while_fetching
from nosa_jax.offload.residency import bring_in
from nosa_jax.pallas_kernels import decode_attention
from tests.infer.cases import (
    FOR_KERNELS,
    LENGTHS,
    C,
    offloaded,
    random_model,
    random_tokens,
    resident,
    run_steps,
)  # fmt: skip


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


SHAPES = {
    "8B": dict(head_dim=128, block_size=64),
    "pages of 4 KiB": dict(head_dim=64, block_size=16, pool_window=8, pool_stride=4),
    "pages of 64 KiB": dict(head_dim=256, block_size=64),
}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_o1_one_launch_that_copies_and_attends_gives_the_bits_of_one_after_the_other(shape, rows):
    """O1 at full size, slots full of NaN before: everything late, then nothing, one, some, nothing, half."""
    config = NosaConfig.nosa_8b(num_layers=2, **SHAPES[shape])
    n_blocks, wanted, n_slots = 128, 64, 72
    layout = CacheLayout(config, "nosa", rows, n_blocks * config.block_size, True, n_slots, overlap=True)
    rng = np.random.default_rng(0)
    pool = ffi.HostPool(n_blocks * layout.pages_per_block, layout.page_bytes)
    for page in range(pool.n_pages):
        pool.write_page(page, rng.normal(size=layout.page_bytes // 2).astype(jnp.bfloat16))
    handle = jnp.asarray(pool.handle)
    table = jnp.asarray(np.stack([rng.permutation(n_blocks) for _ in range(rows)]), jnp.int32)
    lengths = jnp.asarray(rng.integers(wanted * config.block_size, n_blocks * config.block_size, rows), jnp.int32)
    start = init_state(layout, pool.handle).layers[0]
    start = dataclasses.replace(start, slots=jnp.full_like(start.slots, jnp.nan), cis=jnp.ones_like(start.cis))
    q, k, v = (jnp.asarray(rng.normal(size=(rows, heads, config.head_dim)), jnp.bfloat16) for heads in (32, 2, 2))

    @jax.jit
    def at_once(cache, block_ids, step):
        where = (k, v, lengths, table, handle, step)
        return attend_while_fetching(q, cache, cache.cis, block_ids, *where, layer=1, layout=layout)

    @jax.jit
    def one_by_one(cache, block_ids, step):
        cache, where = bring_in(cache, block_ids, k, v, lengths, table, handle, step, layer=1, layout=layout)
        return decode_attention(q, cache.slots, cache.cis, where.slot_ids, block_ids, lengths + 1), cache, where

    def choose(before, new):
        """As many new blocks among the wanted, with each row's current one, ascending."""
        chosen = np.zeros((rows, 2, wanted), np.int32)
        for b, h in np.ndindex(rows, 2):
            current = int(lengths[b]) // config.block_size
            kept = (
                []
                if before is None
                else list(rng.permutation(before[b, h][before[b, h] < current])[: wanted - 1 - new])
            )
            others = rng.permutation(np.setdiff1d(np.arange(current), kept))[: wanted - 1 - len(kept)]
            chosen[b, h] = np.sort([*kept, *others, current])
        return chosen

    ids, one, other, moved = None, start, start, []
    for step, new in enumerate((wanted, 0, 1, 7, 0, wanted // 2)):
        ids = choose(ids, new)
        heads, one, got = at_once(one, jnp.asarray(ids), jnp.int32(step + 1))
        expected, other, same = one_by_one(other, jnp.asarray(ids), jnp.int32(step + 1))
        assert np.asarray(heads).tobytes() == np.asarray(expected).tobytes(), step
        assert np.asarray(one.slots).tobytes() == np.asarray(other.slots).tobytes(), step
        for name in got._fields:
            np.testing.assert_array_equal(getattr(got, name), getattr(same, name))
        moved.append(int(got.misses.sum()))
    pool.check()
    assert moved[0] > rows * 2 * (wanted - 2)
    assert moved[1] == moved[4] == 0
    assert moved[2] > 0
    pool.close()
