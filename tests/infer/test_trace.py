"""Traces of selections: what they promise about misses, and that a replayed step attends to them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.errors import InputError
from nosa_jax.infer import Engine, freeze, step
from nosa_jax.infer.trace import PUBLISHED_MISSES, SelectionTrace, replayed_ids, synthetic_trace

SMALL = NosaConfig.tiny(num_layers=2)


def small_trace(**changes) -> SelectionTrace:
    total = SMALL.budget.total
    misses = {total: 2.0, total + 8: 0.5}
    return synthetic_trace(SMALL, context=1024, steps=40, streams=6, misses=misses, **changes)


def test_a_synthetic_trace_misses_as_often_as_published():
    """By replaying it through tables of 64, 80, 96 and 128 slots."""
    trace = synthetic_trace(NosaConfig.nosa_8b(), context=65_536, steps=128)
    for slots, wanted in PUBLISHED_MISSES.items():
        assert trace.misses(slots, forced=18) == pytest.approx(wanted, abs=0.08)
        assert f"with {slots} slots" in trace.origin


def test_a_synthetic_trace_of_as_few_blocks_as_can_be():
    """It is made where its blocks just suffice, also with many misses; where they do not, and for misses that no step
    can have, it is refused."""
    config = NosaConfig.nosa_8b()
    least = (46 + 64 + 15 + 18 - 1) * 64
    trace = synthetic_trace(config, context=least, steps=40, streams=8)
    assert 3 < trace.misses(64, forced=18) < 4.2
    narrow = synthetic_trace(config, context=8192, steps=30, streams=8, misses={64: 14.0, 66: 1.0})
    assert narrow.misses(64, forced=18) > 1
    with pytest.raises(InputError, match=rf"a context of {least - 64} tokens .* take at least {least} tokens"):
        synthetic_trace(config, context=least - 64, steps=4, streams=2)
    with pytest.raises(InputError, match=r"100.0 misses with 64 slots: .* at most the 15 blocks"):
        synthetic_trace(config, context=65_536, steps=4, misses={64: 100.0})


def test_misses_follow_the_least_recently_used_rule():
    """Two picks of three blocks in turn: with two slots every change misses, with three none does."""
    picks = np.array([[[0, 1]], [[1, 2]], [[0, 2]]] * 8)
    trace = SelectionTrace(picks, 0, 3, "by hand")
    assert trace.misses(2, forced=0) == 1.0
    assert trace.misses(3, forced=0) == 0.0
    assert trace.misses(4, forced=1) == 0.0
    assert trace.misses(9, forced=0) == 0.0, "more slots than blocks"
    with pytest.raises(InputError, match="1 slots cannot hold 0 forced blocks and 2 picks"):
        trace.misses(1, forced=0)


def test_a_trace_survives_its_file(tmp_path):
    trace = small_trace()
    trace.save(tmp_path / "trace.npz")
    again = SelectionTrace.load(tmp_path / "trace.npz")
    np.testing.assert_array_equal(again.picks, trace.picks)
    assert (again.sink, again.n_candidates, again.origin) == (trace.sink, trace.n_candidates, trace.origin)
    np.savez(tmp_path / "other.npz", picks=trace.picks)
    with pytest.raises(InputError, match=r"other\.npz is no selection trace: it lacks n_candidates, origin, sink"):
        SelectionTrace.load(tmp_path / "other.npz")


def test_picks_outside_the_candidates_are_refused():
    with pytest.raises(InputError, match=r"picks blocks 3 \.\. 9; candidates are 1 \.\. 8"):
        SelectionTrace(np.array([[[3, 9]]]), 1, 8, "by hand")


@pytest.mark.parametrize("length", [1024, 1039, 1040, 1100])
def test_replayed_ids_are_a_selection(length):
    """Ascending, without duplicates, with all forced blocks, and C of them, at every later position too."""
    budget, trace = SMALL.budget, small_trace()
    lengths = jnp.asarray([length, length + 16], jnp.int32)
    of_layers = np.asarray(replayed_ids(jnp.asarray(trace.picks[3]), lengths, SMALL))
    assert len(of_layers) == SMALL.num_layers
    for ids in of_layers:
        assert ids.shape == (2, SMALL.num_kv_heads, budget.total)
        assert (np.diff(ids, axis=-1) > 0).all()
        current = np.asarray(lengths)[:, None] // SMALL.block_size
        np.testing.assert_array_equal(ids[..., -1], np.broadcast_to(current, ids.shape[:2]))
        np.testing.assert_array_equal(ids[0, 0, : budget.sink], np.arange(budget.sink))
        np.testing.assert_array_equal(np.diff(ids[..., -budget.local :], axis=-1), 1)


def test_a_replayed_step_fetches_what_the_trace_misses():
    """With exactly C slots the engine's counters see the trace's own misses."""
    trace = small_trace()
    model = freeze(NosaLM.from_config(SMALL))
    prompt = np.arange(1030) % 250
    with Engine(model, max_batch=1, max_context=1280, slots=SMALL.budget.total) as engine:
        state = engine.prefill([prompt])
        run = jax.jit(partial(step), donate_argnums=1)
        for index in range(len(trace.picks)):
            _, state = run(model, state, jnp.zeros(1, jnp.int32), picks=jnp.asarray(trace.picks[index]))
            if index == len(trace.picks) // 2 - 1:
                before = state.stats().total.misses.sum()
        counted = (state.stats().total.misses.sum() - before) / (len(trace.picks) - len(trace.picks) // 2)
        selected = np.asarray(state.layers[1].selected)
    np.testing.assert_array_equal(selected, replayed_ids(jnp.asarray(trace.picks[-1]), state.lengths - 1, SMALL)[1])
    forced = SMALL.budget.sink + SMALL.budget.local
    per_list = counted / SMALL.num_layers / SMALL.num_kv_heads
    assert per_list == pytest.approx(trace.misses(SMALL.budget.total, forced), rel=0.35)
