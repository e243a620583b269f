"""assign_slots, and fetch_blocks that contains it, against the rule in Python (oracle.assign_head)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nosa_jax import ffi
from tests.ffi.oracle import INT_MAX, assign_head

PAGE = (2, 3, 2)  # numbers of float32: 48 bytes
OFFSET = 2  # in its block, of the token that is written


@functools.partial(jax.jit, static_argnames="n_blocks")
def jitted_assign(wanted, slot_block, last_used, step, fresh_from, n_blocks):
    return ffi.assign_slots(wanted, slot_block, last_used, step, fresh_from, n_blocks=n_blocks)


@functools.partial(jax.jit, donate_argnames=("cache", "slot_block", "last_used"))
def jitted_fetch(handle, cache, wanted, slot_block, last_used, step, fresh_from, page_table, token):
    return ffi.fetch_blocks(
        handle, cache, wanted, slot_block, last_used, step, fresh_from, page_table, token=token, layer=1, n_layers=2
    )


class Pages:
    """Pages of made-up contents, and a token, for `fetch_blocks`, which goes to layer 1 of 2."""

    def __init__(self, make_pool: Callable[..., ffi.HostPool]) -> None:
        self.make_pool = make_pool
        self.pools: dict[tuple[int, int, int], tuple[ffi.HostPool, np.ndarray]] = {}

    def run(self, wanted, slot_block, last_used, step, fresh_from, n_blocks, load, tails):
        """What the handler gives, after the check of the cache against `load` lists and `tails` slots [(row, head)]."""
        rows, heads, n_slots = slot_block.shape
        key = rows, heads, n_blocks
        if key not in self.pools:
            table = np.random.default_rng(0).permutation(rows * n_blocks).reshape(rows, n_blocks).astype(np.int32)
            self.pools[key] = self.make_pool(rows * n_blocks * heads * 2, 4 * int(np.prod(PAGE))), table
        pool, table = self.pools[key]
        expected = -1 - np.arange(np.prod((rows, heads, n_slots, *PAGE)), dtype=np.float32)
        expected = expected.reshape(rows, heads, n_slots, *PAGE)
        before = jnp.array(expected)
        for (row, head), moves in load.items():
            for block, slot in moves:
                page = np.resize(np.array([row, head, block, step % 100], np.float32), PAGE)
                pool.write_page((int(table[row, block]) * 2 + 1) * heads + head, page)
                expected[row, head, slot] = page
        key, value = 1000 + np.arange(2 * rows * heads * PAGE[2], dtype=np.float32).reshape(2, rows, heads, PAGE[2])
        for row, head in np.ndindex(rows, heads):
            if tails[row, head] >= 0:
                expected[row, head, tails[row, head], 0, OFFSET] = key[row, head]
                expected[row, head, tails[row, head], 1, OFFSET] = value[row, head]
        token = ffi.NewToken(key, value, np.full(rows, 5 * PAGE[1] + OFFSET, np.int32))
        counts = pool.stats()
        tables = (wanted, jnp.array(slot_block), jnp.array(last_used), jnp.int32(step), fresh_from, table)
        got = jax.tree.map(np.asarray, jitted_fetch(pool.handle, before, *tables, token))
        pool.check()
        np.testing.assert_array_equal(got.cache, expected)
        moved = sum(len(moves) for moves in load.values())
        after = pool.stats()
        assert (after.read_calls - counts.read_calls, after.pages_read - counts.pages_read) == (1, moved)
        return got


@pytest.fixture(params=["assign_slots", "fetch_blocks"])
def compare(request, device, make_pool):
    """Runs the handler and checks every output of every row and head; gives what it gave, as NumPy."""
    pages = Pages(make_pool)

    def run(wanted, slot_block, last_used, step, fresh_from, n_blocks):
        wanted, slot_block, last_used, fresh_from = (
            np.asarray(x, np.int32) for x in (wanted, slot_block, last_used, fresh_from)
        )
        rows, heads, n_wanted = wanted.shape
        want = {
            (b, k): assign_head(
                wanted[b, k].tolist(), slot_block[b, k].tolist(), last_used[b, k].tolist(), step,
                int(fresh_from[b]), n_blocks,
            )
            for b in range(rows)
            for k in range(heads)
        }  # fmt: skip
        if request.param == "assign_slots":
            got = jitted_assign(wanted, slot_block, last_used, jnp.int32(step), fresh_from, n_blocks=n_blocks)
            got = jax.tree.map(np.asarray, got)
        else:
            load = {where: head.load for where, head in want.items()}
            tails = np.full((rows, heads), -1)
            for (b, k), head in want.items():
                tails[b, k] = max(
                    (s for w, s in zip(wanted[b, k], head.slot_ids, strict=True) if w == fresh_from[b]), default=-1
                )
            got = pages.run(wanted, slot_block, last_used, step, fresh_from, n_blocks, load, tails)
        for (b, k), head in want.items():
            where, n = f"row {b}, head {k}", len(head.load)
            assert got.slot_ids[b, k].tolist() == head.slot_ids, where
            assert got.slot_block[b, k].tolist() == head.slot_block, where
            assert got.last_used[b, k].tolist() == head.last_used, where
            assert (got.hits[b, k], got.misses[b, k]) == (head.hits, head.misses), where
            if isinstance(got, ffi.Fetched):
                tail = [s for w, s in zip(wanted[b, k], head.slot_ids, strict=True) if w == fresh_from[b]]
                assert got.tail_slot[b, k] == (tail[0] if tail else -1), where
                continue
            assert got.load.count[b, k] == n, where
            moves = zip(got.load.block[b, k, :n].tolist(), got.load.slot[b, k, :n].tolist(), strict=True)
            assert list(moves) == head.load, where
            assert got.load.block[b, k, n:].tolist() == got.load.slot[b, k, n:].tolist() == [-1] * (n_wanted - n), where
        return got

    return run


def test_first_step_fills_empty_slots_in_order(compare):
    got = compare([[[4, 2, 7]]], [[[-1] * 5]], [[[0] * 5]], 1, [8], 8)
    assert got.slot_ids.tolist() == [[[0, 1, 2]]]
    assert got.slot_block.tolist() == [[[4, 2, 7, -1, -1]]]
    assert (got.hits.item(), got.misses.item()) == (0, 3)


def test_padding_is_not_a_block_and_repeats_count_once(compare):
    """B3's ids: -1, M and INT_MAX name nothing, in particular not the last block."""
    got = compare([[[-1, 3, 8, 3, INT_MAX, -INT_MAX, 7]]], [[[7] + [-1] * 6]], [[[1] * 7]], 2, [8], 8)
    assert got.slot_ids.tolist() == [[[-1, 1, -1, 1, -1, -1, 0]]]
    assert (got.hits.item(), got.misses.item()) == (1, 1)


def test_wanted_slots_are_never_victims(compare):
    """The oldest slot is wanted last in the list, and must survive the misses before it (S == C)."""
    got = compare([[[9, 8, 5]]], [[[5, 6, 7]]], [[[0, 1, 2]]], 3, [10], 10)
    assert got.slot_ids.tolist() == [[[1, 2, 0]]]
    assert got.hits.item() == 1


def test_ties_take_the_lower_slot(compare):
    got = compare([[[9, 8]]], [[[1, 2, 3, 4]]], [[[5, 5, 5, 5]]], 6, [10], 10)
    assert got.slot_ids.tolist() == [[[0, 1]]]


def test_fresh_blocks_are_not_loaded_and_not_counted(compare):
    got = compare([[[0, 1, 2]], [[0, 1, 2]]], [[[2, -1, -1]]] * 2, [[[0] * 3]] * 2, 1, [1, 3], 3)
    assert got.hits.tolist() == [[1], [1]]
    assert got.misses.tolist() == [[1], [2]]


def test_nothing_wanted_changes_nothing(compare):
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
def test_any_tables_give_what_the_rule_gives(compare, case):
    compare(*case)


@pytest.mark.parametrize("extra", [0, 1, 64])
def test_a_long_run_at_full_size_follows_the_rule(compare, extra):
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


@pytest.mark.parametrize(
    ("n_wanted", "n_slots", "n_blocks"),
    [(130, 200, 300), (300, 700, 900), (300, 1100, 1300), (4096, 4096, 5000), (3, 5, 70_000)],
)
def test_large_tables_follow_the_rule(compare, n_wanted, n_slots, n_blocks):
    """Sizes for which the GPU takes other ways: more slots than threads, too many to take singly, too large a map."""
    rng = np.random.default_rng(n_slots)
    slot_block = np.full((1, 2, n_slots), -1, np.int32)
    wanted = np.empty((1, 2, n_wanted), np.int32)
    for k in range(2):
        blocks = rng.permutation(n_blocks)[: n_slots - 3 + n_wanted // 2]
        slot_block[0, k, rng.permutation(n_slots)[: n_slots - 3]] = blocks[: n_slots - 3]
        wanted[0, k] = blocks[-n_wanted:]
    compare(wanted, slot_block, rng.integers(0, 20, slot_block.shape), 50, [blocks[-1]], n_blocks)


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (11, 3), (65, 5)])
def test_any_number_of_rows_and_heads_follows_the_rule(compare, rows, heads):
    """Fewer pairs of a row and a head than thread blocks, and more than all their warps."""
    rng = np.random.default_rng(rows)
    order = rng.permuted(np.broadcast_to(np.arange(12), (rows, heads, 12)), axis=-1)
    compare(order[..., 3:7], order[..., :6], rng.integers(0, 5, (rows, heads, 6)), 9, rng.integers(0, 13, rows), 12)


def test_too_few_slots_are_refused(device):
    table = jnp.zeros((1, 1, 3), jnp.int32)
    with pytest.raises(ValueError, match="3 slots cannot hold 4 wanted blocks"):
        ffi.assign_slots(
            jnp.zeros((1, 1, 4), jnp.int32), table, table, jnp.int32(0), jnp.zeros(1, jnp.int32), n_blocks=4
        )


def test_more_slots_than_the_kernels_hold_are_refused(make_pool):
    table = jnp.zeros((1, 1, 4097), jnp.int32)
    wanted, step, row = jnp.zeros((1, 1, 4), jnp.int32), jnp.int32(0), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="assign_slots: 4097 slots are more than the 4096"):
        ffi.assign_slots(wanted, table, table, step, row, n_blocks=4)
    handle, cache, pages = make_pool(1, 8).handle, jnp.zeros((1, 1, 4097, 2, 1, 1)), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="fetch_blocks: 4097 slots are more than the 4096"):
        ffi.fetch_blocks(handle, cache, wanted, table, table, step, row, pages, layer=0, n_layers=1)


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
