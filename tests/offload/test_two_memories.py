"""One computation over two memories: bytes that left the device come back the same, and so does every logit."""

import functools
import gc
import hashlib

import jax
import numpy as np
import pytest

from nosa_jax.infer import Engine, SamplingParams, decode_step, step
from tests.infer.cases import (
    FOR_KERNELS,
    LENGTHS,
    ONE_LAYER,
    SMALL,
    C,
    P,
    cache_leaves,
    offloaded,
    page_of,
    random_model,
    random_tokens,
    resident,
    run_steps,
)  # fmt: skip
from tests.infer.devices import on_gpu_too
from tests.offload.disturbed import Disturbed, poison_empty_slots

MODEL = random_model()


def prompts_for(lengths, seed=0):
    return [random_tokens(n, seed=seed + i) for i, n in enumerate(lengths)]


@on_gpu_too
@pytest.mark.parametrize("batch", [1, 8])
def test_o1_offloaded_and_resident_decode_are_equal_bit_for_bit(batch):
    """O1 and promise 1: 200 greedy steps; logits, tokens and selected blocks; the resident cache never fetches."""
    prompts = prompts_for(LENGTHS[-batch:])
    with offloaded(MODEL) as engine:
        moved = run_steps(MODEL, engine.prefill(prompts), 200)
        stats = moved.state.stats()
    stayed = run_steps(MODEL, resident(MODEL).prefill(prompts), 200)
    np.testing.assert_array_equal(moved.logits[:, :batch], stayed.logits[:, :batch])
    np.testing.assert_array_equal(moved.ids[:, :, :batch], stayed.ids[:, :, :batch])
    assert stayed.misses.sum() == 0
    assert moved.misses.sum() > 20 * batch, "nothing was swapped; the test shows nothing"
    np.testing.assert_array_equal(moved.hits + moved.misses, stayed.hits)
    # The state's own counters are the sums of the steps'.
    np.testing.assert_array_equal(stats.total.misses, moved.misses.sum(axis=0))
    np.testing.assert_array_equal(stats.bytes_total, moved.misses.sum(axis=(0, 2, 3)) * engine.layout.page_bytes)
    np.testing.assert_array_equal(stats.last.hits, moved.hits[-1])
    full = moved.selected == C
    locality = np.where(full, moved.kept / C, np.inf).min(axis=0)
    np.testing.assert_array_equal(stats.min_locality, np.where(np.isinf(locality), np.nan, locality).astype("f4"))
    assert stats.hit_rate == moved.hits.sum() / (moved.hits.sum() + moved.misses.sum())
    assert stats.steps == 200


@on_gpu_too
@pytest.mark.slow
def test_generate_gives_the_same_tokens_from_both_memories():
    params = [SamplingParams(max_new_tokens=60, temperature=t, seed=3) for t in (0.0, 1.0, 1.3)]
    prompts = prompts_for((31, 32, 27))
    with offloaded(MODEL) as moved, resident(MODEL) as stayed:
        results = [engine.generate(prompts, params) for engine in (moved, stayed)]
    assert [r.tokens for r in results[0]] == [r.tokens for r in results[1]]
    assert [r.hits + r.misses for r in results[0]] == [r.hits for r in results[1]]
    assert all(r.misses > 0 for r in results[0])


@pytest.mark.slow
def test_steps_inside_a_loop_of_the_callers_own_jit():
    """`step` in a `fori_loop`: swaps happen once per iteration, in order."""
    prompts = prompts_for(LENGTHS)

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(model, state):
        return jax.lax.fori_loop(0, 40, lambda _, s: step(model, s, s.logits.argmax(axis=-1))[1], state)

    with offloaded(MODEL) as engine:
        by_hand = run_steps(MODEL, engine.prefill(prompts), 40).state.stats()
        state = engine.prefill(prompts)
        before = engine._pool.stats().pages_read
        looped = loop(MODEL, state).stats()
        assert engine._pool.stats().pages_read - before == looped.total.misses.sum() > 0
    jax.tree.map(np.testing.assert_array_equal, looped.total, by_hand.total)
    np.testing.assert_array_equal(looped.min_locality, by_hand.min_locality)


@on_gpu_too
@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 32])
def test_o1_repeated_at_other_batch_sizes(batch):
    """O1: 20 repeats of 200 steps at batch 1 and 32 in engines of exactly that size."""
    prompts = prompts_for([LENGTHS[i % len(LENGTHS)] for i in range(batch)])
    stayed = run_steps(MODEL, resident(MODEL, max_batch=batch).prefill(prompts), 200)
    for _ in range(20):
        with offloaded(MODEL, max_batch=batch) as engine:
            moved = run_steps(MODEL, engine.prefill(prompts), 200)
        np.testing.assert_array_equal(moved.logits, stayed.logits)


@on_gpu_too
@pytest.mark.parametrize("slots", [C, pytest.param(C + 2, marks=pytest.mark.slow)])
def test_bfloat16_offloaded_and_resident_decode_are_equal_bit_for_bit(slots):
    model = random_model(ONE_LAYER.replace(dtype="bfloat16"))
    prompts = prompts_for((11, 10))
    options = dict(max_batch=2, max_context=80)
    with offloaded(model, slots=slots, **options) as engine:
        moved = run_steps(model, engine.prefill(prompts), 60)
    stayed = run_steps(model, resident(model, **options).prefill(prompts), 60)
    np.testing.assert_array_equal(moved.logits, stayed.logits)
    np.testing.assert_array_equal(moved.ids, stayed.ids)
    assert moved.misses.sum() > 0


@pytest.mark.parametrize(
    ("overlap", "delay"),
    [
        (False, 0),
        pytest.param(True, 0, marks=pytest.mark.slow),
        pytest.param(False, 128, marks=pytest.mark.slow),
        pytest.param(True, 128, marks=pytest.mark.slow),
    ],
    ids=["", "overlap", "delay", "overlap, delay"],
)
def test_o1_every_freed_slot_poisoned(overlap, delay):
    """O1: 500 steps with C + 1 slots, where a slot is filled with NaN at the moment its block is evicted; the new
    token's keys and values after a delay too."""
    model, prompts = random_model(ONE_LAYER), prompts_for((33, 11))
    options = dict(max_batch=2, max_context=33 + 500)
    with offloaded(model, slots=C + 1, overlap=overlap, **options) as engine, Disturbed(delay) as disturbed:
        moved = run_steps(model, poison_empty_slots(engine.prefill(prompts)), 500, disturbed.step)
    assert disturbed.traced == {"attend_while_fetching" if overlap else "bring_in": ONE_LAYER.num_layers}
    stayed = run_steps(model, resident(model, **options).prefill(prompts), 500)
    np.testing.assert_array_equal(moved.logits, stayed.logits)
    np.testing.assert_array_equal(moved.ids, stayed.ids)
    assert moved.misses.sum() > 100


class Hashes:
    """A hash of every part of every block, by (layer, row, head, block, part); a block must keep the one it had."""

    def __init__(self):
        self.known: dict = {}
        self.in_slots: set = set()  # full blocks, at the last look
        self.evicted: set = set()  # full blocks that were in a slot once and are not now
        self.fetched = 0

    def check(self, state, pool, rows):
        layout = state.layout
        size, r = layout.config.block_size, layout.config.block_size // layout.config.pool_stride
        lengths = np.asarray(state.lengths)
        now = set()
        for index, layer in enumerate(state.layers):
            slots, table, cis, pooled_k, block_rank = (
                np.asarray(x) for x in (layer.slots, layer.slot_block, layer.cis, layer.pooled_k, layer.block_rank)
            )
            for row, head in np.ndindex(rows, layout.config.num_kv_heads):
                place = (index, row, head)
                held = [b for b in table[row, head].tolist() if b >= 0]
                assert len(set(held)) == len(held), "a block lies in two slots"
                for slot, block in enumerate(table[row, head].tolist()):
                    filled = min(size, lengths[row] - block * size)
                    if block < 0 or filled <= 0:
                        continue
                    # Token by token: what is in the tail block stays while it grows.
                    for t in range(filled):
                        self.same((*place, block, "K", t), slots[row, head, slot, 0, t])
                        self.same((*place, block, "V", t), slots[row, head, slot, 1, t])
                    if filled == size:
                        now.add((*place, block))
                        page = pool.read_page(page_of(layout, state, index, row, head, block))
                        assert page.tobytes() == slots[row, head, slot].tobytes(), "the host page differs"
                for block in range(lengths[row] // size):
                    self.same((*place, block, "cis"), cis[row, head, block])
                last_window = (lengths[row] - layout.config.pool_window) // layout.config.pool_stride
                for block in range(max(0, last_window // r)):
                    self.same((*place, block, "pooled keys"), pooled_k[row, head, block * r : (block + 1) * r])
                    self.same((*place, block, "pooled cis"), block_rank[row, head, block])
        self.fetched += len(now & self.evicted)
        self.evicted = (self.evicted | self.in_slots) - now
        self.in_slots = now

    def same(self, key, value):
        digest = hashlib.sha1(np.ascontiguousarray(value).tobytes()).digest()
        assert self.known.setdefault(key, digest) == digest, f"changed: {key}"


@on_gpu_too
@pytest.mark.parametrize(
    ("config", "lengths", "options"),
    [
        (SMALL, (11, 10), {}),
        (ONE_LAYER.replace(dtype="bfloat16"), (11, 10), dict(max_batch=2, max_context=80)),
        pytest.param(FOR_KERNELS, (180, 170), dict(max_batch=2, max_context=240, overlap=True), marks=pytest.mark.slow),
    ],
    ids=["float32", "bfloat16", "bfloat16, overlap"],
)
def test_o2_blocks_come_back_bit_exact(config, lengths, options):
    """O2: K, V, pooled keys and cis of every block, before eviction and after it came back; host pages and the
    partly filled tail blocks too, after a prefill in pieces that end within blocks."""
    model, rows = random_model(config, scale=2.0), 2
    hashes = Hashes()
    with offloaded(model, **options) as engine:
        state = engine.prefill(prompts_for(lengths), chunk=7 * config.block_size // P)
        hashes.check(state, engine._pool, rows)
        tokens = random_tokens((60, engine.layout.max_batch), seed=9)
        for chosen in tokens:
            _, state = decode_step(model, state, chosen)
            hashes.check(state, engine._pool, rows)
        engine.check()
    assert hashes.fetched > 20, "too few blocks came back; the test shows nothing"


def test_page_tables_of_rows_are_disjoint_and_cover_their_capacity():
    with offloaded(MODEL) as engine:
        state = engine.prefill(prompts_for((33, 11, 5)), max_new_tokens=9)
        table = np.asarray(state.page_table)
    used = table[table >= 0]
    assert len(set(used.tolist())) == len(used)
    np.testing.assert_array_equal((table >= 0).sum(axis=1)[:4], [SMALL.num_blocks(n + 9) for n in (33, 11, 5)] + [0])


def test_memory_is_flat_over_a_long_run():
    """Promise 4: the bytes of the state, the live arrays and the open pages do not change from step to step."""
    with offloaded(MODEL) as engine:
        state = engine.prefill(prompts_for((33, 11, 5)))
        state = run_steps(MODEL, state, 3).state
        bytes_before = cache_leaves(state)
        gc.collect()
        live = sum(x.nbytes for x in jax.live_arrays())
        state = run_steps(MODEL, state, 150).state
        assert cache_leaves(state) == bytes_before == engine.layout.device_bytes()
        gc.collect()
        assert sum(x.nbytes for x in jax.live_arrays()) == live


def test_a_slot_count_below_the_selection_is_refused():
    with pytest.raises(ValueError, match=rf"slots={C - 1} cannot hold the {C} blocks"):
        Engine(MODEL, max_batch=1, max_context=64, slots=C - 1)
