"""assign_slots against the rule written in plain Python (oracle.assign_head)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nosa_jax import ffi
from tests.ffi.oracle import INT_MAX, assign_head


@functools.partial(jax.jit, static_argnames="n_blocks")
def jitted(wanted, slot_block, last_used, step, fresh_from, n_blocks):
    return ffi.assign_slots(wanted, slot_block, last_used, step, fresh_from, n_blocks=n_blocks)


def compare(wanted, slot_block, last_used, step, fresh_from, n_blocks) -> ffi.Assignment:
    """Run the handler and check every output of every row and head; returns what it gave, as NumPy."""
    wanted, slot_block, last_used, fresh_from = (
        np.asarray(x, np.int32) for x in (wanted, slot_block, last_used, fresh_from)
    )
    got = jax.tree.map(
        np.asarray, jitted(wanted, slot_block, last_used, jnp.int32(step), fresh_from, n_blocks=n_blocks)
    )
    rows, heads, n_wanted = wanted.shape
    for b in range(rows):
        for k in range(heads):
            want = assign_head(
                wanted[b, k].tolist(), slot_block[b, k].tolist(), last_used[b, k].tolist(), step,
                int(fresh_from[b]), n_blocks,
            )  # fmt: skip
            n = len(want.load)
            where = f"row {b}, head {k}"
            assert got.slot_ids[b, k].tolist() == want.slot_ids, where
            assert got.slot_block[b, k].tolist() == want.slot_block, where
            assert got.last_used[b, k].tolist() == want.last_used, where
            assert got.load.count[b, k] == n, where
            assert list(zip(got.load.block[b, k, :n].tolist(), got.load.slot[b, k, :n].tolist(), strict=True)) == (
                want.load
            ), where
            assert got.load.block[b, k, n:].tolist() == got.load.slot[b, k, n:].tolist() == [-1] * (n_wanted - n), where
            assert (got.hits[b, k], got.misses[b, k]) == (want.hits, want.misses), where
    return got


def test_first_step_fills_empty_slots_in_order(device):
    got = compare([[[4, 2, 7]]], [[[-1] * 5]], [[[0] * 5]], 1, [8], 8)
    assert got.slot_ids.tolist() == [[[0, 1, 2]]]
    assert got.load.block.tolist() == [[[4, 2, 7]]]
    assert (got.hits.item(), got.misses.item()) == (0, 3)


def test_padding_is_not_a_block_and_repeats_count_once(device):
    """B3's ids: -1, M and INT_MAX name nothing, in particular not the last block."""
    got = compare([[[-1, 3, 8, 3, INT_MAX, -INT_MAX, 7]]], [[[7] + [-1] * 6]], [[[1] * 7]], 2, [8], 8)
    assert got.slot_ids.tolist() == [[[-1, 1, -1, 1, -1, -1, 0]]]
    assert (got.hits.item(), got.misses.item()) == (1, 1)


def test_wanted_slots_are_never_victims(device):
    """The oldest slot is wanted last in the list, and must survive the misses before it (S == C)."""
    got = compare([[[9, 8, 5]]], [[[5, 6, 7]]], [[[0, 1, 2]]], 3, [10], 10)
    assert got.slot_ids.tolist() == [[[1, 2, 0]]]
    assert got.hits.item() == 1


def test_ties_take_the_lower_slot(device):
    got = compare([[[9, 8]]], [[[1, 2, 3, 4]]], [[[5, 5, 5, 5]]], 6, [10], 10)
    assert got.slot_ids.tolist() == [[[0, 1]]]


def test_fresh_blocks_are_not_loaded_and_not_counted(device):
    got = compare([[[0, 1, 2]], [[0, 1, 2]]], [[[2, -1, -1]]] * 2, [[[0] * 3]] * 2, 1, [1, 3], 3)
    assert got.load.count.tolist() == [[1], [2]]
    assert got.hits.tolist() == [[1], [1]]
    assert got.misses.tolist() == [[1], [2]]


def test_nothing_wanted_changes_nothing(device):
    got = compare([[[-1, -1]]], [[[3, 4]]], [[[1, 2]]], 9, [5], 5)
    assert got.slot_block.tolist() == [[[3, 4]]]
    assert got.last_used.tolist() == [[[1, 2]]]


@st.composite
def cases(draw):
    """Tables as they can arise: no block in two slots; empty slots anywhere; equal ages often."""
    n_wanted = draw(st.sampled_from([1, 4, 7]))
    n_slots = n_wanted + draw(st.sampled_from([0, 1, 5]))
    n_blocks = draw(st.sampled_from([1, 3, 9, 40]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = [*range(n_blocks), -1, n_blocks, INT_MAX, -INT_MAX - 1]
    wanted = rng.choice(ids, (2, 2, n_wanted))
    slot_block = np.full((2, 2, n_slots), -1)
    for table in slot_block.reshape(4, n_slots):
        resident = rng.permutation(n_blocks)[: rng.integers(0, n_slots + 1)]
        table[rng.permutation(n_slots)[: len(resident)]] = resident
    last_used = rng.integers(0, draw(st.sampled_from([1, 3, 100])), (2, 2, n_slots))
    fresh_from = rng.integers(0, n_blocks + 1, 2)
    return wanted, slot_block, last_used, 100, fresh_from, n_blocks


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
@example(case=(np.array([[[0]]]), np.array([[[-1]]]), np.array([[[0]]]), 2**31 - 1, np.array([1]), 1))
@example(case=(np.array([[[1]]]), np.array([[[0]]]), np.array([[[-(2**31)]]]), 0, np.array([9]), 9))
def test_any_tables_give_what_the_rule_gives(device, case):
    compare(*case)


@pytest.mark.parametrize("extra", [0, 1, 64])
def test_a_long_run_at_full_size_follows_the_rule(device, extra):
    """64 wanted blocks that drift over 1000: the tables of each step are the input of the next."""
    rng = np.random.default_rng(extra)
    n_wanted, n_blocks = 64, 1000
    n_slots = n_wanted + extra
    slot_block = np.full((2, 2, n_slots), -1, np.int32)
    last_used = np.zeros((2, 2, n_slots), np.int32)
    wanted = np.stack([rng.permutation(n_blocks)[:n_wanted] for _ in range(4)]).reshape(2, 2, n_wanted)
    for step in range(1, 30):
        for row in wanted.reshape(4, n_wanted):
            row[rng.integers(0, n_wanted, 5)] = rng.choice([*range(n_blocks), -1, n_blocks], 5)
        got = compare(wanted, slot_block, last_used, step, [n_blocks, 900], n_blocks)
        slot_block, last_used = got.slot_block, got.last_used
        for table in slot_block.reshape(4, n_slots):
            resident = table[table >= 0]
            assert len(set(resident.tolist())) == len(resident), "no block may be in two slots"


def test_too_few_slots_are_refused(device):
    table = jnp.zeros((1, 1, 3), jnp.int32)
    with pytest.raises(ValueError, match="3 slots cannot hold 4 wanted blocks"):
        ffi.assign_slots(
            jnp.zeros((1, 1, 4), jnp.int32), table, table, jnp.int32(0), jnp.zeros(1, jnp.int32), n_blocks=4
        )


def test_tables_are_updated_in_place_when_donated(device):
    step = jax.jit(
        lambda table, age, wanted: ffi.assign_slots(
            wanted, table, age, jnp.int32(1), jnp.full(1, 9, jnp.int32), n_blocks=9
        ),
        donate_argnums=(0, 1),
    )
    table, age = jnp.full((1, 1, 4), -1, jnp.int32), jnp.zeros((1, 1, 4), jnp.int32)
    pointers = table.unsafe_buffer_pointer(), age.unsafe_buffer_pointer()
    got = step(table, age, jnp.array([[[3, 5]]], jnp.int32))
    assert (got.slot_block.unsafe_buffer_pointer(), got.last_used.unsafe_buffer_pointer()) == pointers
