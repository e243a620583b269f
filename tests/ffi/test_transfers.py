"""swap_in and write_pages: bytes, order, aliasing, counts, errors."""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax import ffi
from tests.ffi.oracle import Shape, all_blocks, as_bytes, transfer

SHAPE = Shape()


@functools.partial(jax.jit, static_argnames=("layer", "n_layers"), donate_argnums=1)
def swap_in(handle, slots, load, page_table, layer=0, n_layers=SHAPE.layers):
    return ffi.swap_in(handle, slots, load, page_table, layer=layer, n_layers=n_layers)


@functools.partial(jax.jit, static_argnames=("layer", "n_layers"), donate_argnums=1)
def write_pages(handle, pages, store, page_table, layer=0, n_layers=SHAPE.layers):
    return ffi.write_pages(handle, pages, store, page_table, layer=layer, n_layers=n_layers)


def raises_in_handler(pool: ffi.HostPool, match: str, call) -> None:
    """A handler's error: raised with the result on the CPU, found by `check` on a GPU."""

    def run() -> None:
        jax.block_until_ready(call())
        pool.check()

    with pytest.raises(RuntimeError, match=match):
        run()
    pool.check()  # an error is raised once


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "int8"])
def test_o2_a_round_trip_is_bit_exact_and_pages_lie_where_the_formula_says(device, make_pool, dtype):
    shape = Shape(dtype=dtype)
    pool = make_pool(shape.n_pages, shape.page_bytes)
    table = shape.page_table()
    caches = [shape.random_cache(seed) for seed in range(shape.layers)]
    bits = [as_bytes(cache) for cache in caches]
    for layer, cache in enumerate(caches):
        kept = write_pages(pool.handle, cache, all_blocks(shape, [0, 1, 2, 3]), table, layer=layer)
        assert as_bytes(kept).tobytes() == bits[layer].tobytes(), "the cache comes out as it went in"
    pool.check()
    for layer in range(shape.layers):
        for row, head, block in np.ndindex(shape.rows, shape.heads, 4):
            page = (int(table[row, block]) * shape.layers + layer) * shape.heads + head
            assert pool.read_page(page).tobytes() == bits[layer][row, head, block].tobytes()
        order = [2, 0, 3, 1]
        empty = jnp.zeros(shape.cache, dtype)
        got = as_bytes(swap_in(pool.handle, empty, all_blocks(shape, order), table, layer=layer))
        for slot, block in enumerate(order):
            assert got[:, :, slot].tobytes() == bits[layer][:, :, block].tobytes()
    pool.check()


def test_o2_a_tail_block_written_again_is_the_newer_one(device, make_pool):
    pool = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    table = SHAPE.page_table()
    for seed in range(3):
        cache = SHAPE.random_cache(seed)
        newest = as_bytes(cache)
        write_pages(pool.handle, cache, all_blocks(SHAPE, [4]), table)
    got = swap_in(pool.handle, SHAPE.random_cache(9), transfer({(1, 0): [(4, 3)]}, SHAPE, 2), table)
    assert as_bytes(got)[1, 0, 3].tobytes() == newest[1, 0, 0].tobytes()


def test_only_listed_slots_and_pages_change(device, make_pool):
    pool = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    table = SHAPE.page_table()
    before = as_bytes(SHAPE.random_cache(1))
    got = as_bytes(swap_in(pool.handle, SHAPE.random_cache(1), transfer({(0, 1): [(3, 2)]}, SHAPE, 4), table))
    changed = np.argwhere((got != before).any(axis=(3, 4, 5)))
    assert changed.tolist() == [[0, 1, 2]]
    jax.block_until_ready(
        write_pages(pool.handle, SHAPE.random_cache(1), transfer({(1, 1): [(0, 0)]}, SHAPE, 1), table)
    )
    filled = [page for page in range(pool.n_pages) if pool.read_page(page).any()]
    assert filled == [(int(table[1, 0]) * SHAPE.layers + 0) * SHAPE.heads + 1]


def test_j1_counts_are_exact(device, make_pool):
    pool = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    table, load = SHAPE.page_table(), all_blocks(SHAPE, [0, 1])
    per_call = 2 * SHAPE.rows * SHAPE.heads
    cache = SHAPE.random_cache(0)

    def counted(function, *args):
        before = pool.stats()
        jax.block_until_ready(jax.jit(function)(*args))
        after = pool.stats()
        calls, pages = after.read_calls - before.read_calls, after.pages_read - before.pages_read
        assert pages == calls * per_call
        assert after.bytes_read - before.bytes_read == pages * SHAPE.page_bytes
        return calls

    def once(slots, layer=0):
        return ffi.swap_in(pool.handle, slots, load, table, layer=layer, n_layers=SHAPE.layers)

    def ignored(slots):
        once(slots)
        return slots + 1

    def twice_the_same(slots):
        return once(slots) + once(slots)

    assert counted(once, cache) == 1
    assert counted(ignored, cache) == 1
    assert counted(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: once(y), x), cache) == 100
    assert counted(lambda x, take: jax.lax.cond(take, once, lambda y: y, x), cache, False) == 0
    assert counted(lambda x, take: jax.lax.cond(take, once, lambda y: y, x), cache, True) == 1
    assert counted(twice_the_same, cache) == 2
    assert pool.stats().write_calls == 0
    write_pages(pool.handle, cache, all_blocks(SHAPE, []), table).block_until_ready()
    assert (pool.stats().write_calls, pool.stats().pages_written) == (1, 0)


def test_j1_vmap_and_grad_say_what_to_do(device, make_pool):
    pool = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    table, load = SHAPE.page_table(), all_blocks(SHAPE, [0])
    cache = SHAPE.random_cache(0)
    for name, function in (("swap_in", ffi.swap_in), ("write_pages", ffi.write_pages)):

        def call(slots, function=function):
            return function(pool.handle, slots, load, table, layer=0, n_layers=2)

        with pytest.raises(NotImplementedError, match=f"{name} cannot be vmapped.*row dimension"):
            jax.vmap(call)(cache[None])
        with pytest.raises(NotImplementedError, match=f"{name} cannot be differentiated"):
            jax.grad(lambda slots, call=call: call(slots).sum())(cache)
    with pytest.raises(NotImplementedError, match="assign_slots cannot be vmapped"):
        jax.vmap(lambda w: ffi.assign_slots(w, w, w, jnp.int32(0), jnp.zeros(1, jnp.int32), n_blocks=4).slot_ids)(
            jnp.zeros((3, 1, 1, 2), jnp.int32)
        )
    assert pool.stats().read_calls == 0


def test_j2_the_cache_stays_where_it_is_and_nothing_is_copied(device, make_pool):
    """Warnings are errors in this suite: an unused donation would fail here."""
    shape = Shape(slots=64, block=16, dim=32)
    pool = make_pool(shape.n_pages, shape.page_bytes)
    table, moves = shape.page_table(), all_blocks(shape, [0, 1, 2])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(caches):
        new = []
        for layer, cache in enumerate(caches):
            cache = ffi.write_pages(pool.handle, cache, moves, table, layer=layer, n_layers=2)
            cache = ffi.swap_in(pool.handle, cache, moves, table, layer=layer, n_layers=2)
            new.append(cache.at[:, :, 0, 0, 0, 0].add(1.0))
        return new

    caches = [jnp.zeros(shape.cache), jnp.ones(shape.cache)]
    layer_bytes = caches[0].nbytes
    analysis = step.lower(caches).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < layer_bytes // 4
    assert analysis.alias_size_in_bytes >= 2 * layer_bytes
    pointers = [cache.unsafe_buffer_pointer() for cache in caches]
    for _ in range(10):
        old, caches = caches, step(caches)
        assert [cache.unsafe_buffer_pointer() for cache in caches] == pointers
    with pytest.raises(RuntimeError, match="deleted"):
        old[0].block_until_ready()
    assert float(caches[0][0, 0, 0, 0, 0, 0]) == 10.0


def test_order_follows_the_data_through_a_loop(device, make_pool):
    """Every turn writes block 0 from slot 0, changes slot 0, and reads the block back over the change."""
    pool = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    table, move, other = SHAPE.page_table(), all_blocks(SHAPE, [0]), transfer({(0, 0): [(0, 1)]}, SHAPE, 1)

    @jax.jit
    def run(handle, cache):
        def turn(i, cache):
            cache = cache.at[:, :, 0].set(i.astype(jnp.float32))
            cache = ffi.write_pages(handle, cache, move, table, layer=0, n_layers=2)
            cache = cache.at[:, :, 0].set(-1.0)
            cache = ffi.swap_in(handle, cache, move, table, layer=0, n_layers=2)
            return ffi.swap_in(handle, cache, other, table, layer=0, n_layers=2)

        return jax.lax.fori_loop(0, 50, turn, cache)

    got = run(pool.handle, jnp.zeros(SHAPE.cache))
    assert (np.asarray(got[:, :, 0]) == 49).all()
    assert (np.asarray(got[0, 0, 1]) == 49).all()


def test_o6_two_pools_interleaved_through_one_compiled_step(device, make_pool):
    """The handle is data: no second compilation, no mix-up, also after one pool is replaced."""
    shapes = Shape(), Shape(block=2, dim=4, dtype="bfloat16")
    pools = [make_pool(shape.n_pages, shape.page_bytes) for shape in shapes]
    same = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    table = SHAPE.page_table()
    for seed in range(5):
        for shape, pool in zip(shapes, pools, strict=True):
            cache = shape.random_cache(seed)
            expected = as_bytes(cache)
            write_pages(pool.handle, cache, all_blocks(shape, [1]), table)
            got = swap_in(pool.handle, jnp.zeros(shape.cache, shape.dtype), all_blocks(shape, [1]), table)
            assert as_bytes(got)[:, :, 0].tobytes() == expected[:, :, 0].tobytes()
    compiled = swap_in._cache_size()
    assert not as_bytes(swap_in(same.handle, jnp.ones(SHAPE.cache), all_blocks(SHAPE, [1]), table))[:, :, 0].any()
    pools[0].close()
    third = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    assert not as_bytes(swap_in(third.handle, jnp.ones(SHAPE.cache), all_blocks(SHAPE, [1]), table))[:, :, 0].any()
    assert swap_in._cache_size() == compiled


@pytest.mark.parametrize(
    ("moves", "table", "match"),
    [
        ({(1, 0): [(0, 0), (5, 0)]}, {}, r"block 5 \(row 1, KV head 0\) is outside the 5 blocks"),
        ({(0, 0): [(-1, 0)]}, {}, r"block -1 \(row 0, KV head 0\)"),
        ({(0, 1): [(0, 4)]}, {}, r"slot 4 \(row 0, KV head 1\) is outside the 4 slots"),
        ({(0, 1): [(0, -1)]}, {}, r"slot -1"),
        ({(1, 1): [(2, 0)]}, {(1, 2): 10}, r"page table entry 10 of block 2 \(row 1, KV head 1\) is page 41, outside"),
        ({(1, 1): [(2, 0)]}, {(1, 2): -1}, r"page table entry -1 of block 2"),
        ({(1, 1): [(2, 0)]}, {(1, 2): 2**31 - 1}, r"page table entry 2147483647 of block 2.*page 8589934589"),
    ],
)
@pytest.mark.parametrize("name", ["swap_in", "write_pages"])
def test_numbers_out_of_range_are_errors_and_the_pool_stays_usable(device, make_pool, name, moves, table, match):
    pool = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    pages = SHAPE.page_table()
    for where, entry in table.items():
        pages = pages.at[where].set(entry)
    call = {"swap_in": swap_in, "write_pages": write_pages}[name]
    raises_in_handler(
        pool,
        f"{name}: {match}",
        lambda: call(pool.handle, SHAPE.random_cache(0), transfer(moves, SHAPE, 3), pages),
    )
    if not pool.pinned:  # on the CPU everything is checked before anything is moved
        assert not any(pool.read_page(page).any() for page in range(pool.n_pages))
    good = SHAPE.page_table()
    cache = SHAPE.random_cache(0)
    expected = as_bytes(cache)
    write_pages(pool.handle, cache, all_blocks(SHAPE, [2]), good)
    got = swap_in(pool.handle, jnp.zeros(SHAPE.cache), all_blocks(SHAPE, [2]), good)
    assert as_bytes(got)[:, :, 0].tobytes() == expected[:, :, 0].tobytes()
    pool.check()


@pytest.mark.parametrize("count", [-1, 3, 2**31 - 1])
def test_a_count_beyond_the_list_is_an_error(device, make_pool, count):
    pool = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    load = all_blocks(SHAPE, [0, 1])
    load = load._replace(count=load.count.at[1, 1].set(count))
    raises_in_handler(
        pool, rf"count {count} \(row 1, KV head 1\) is outside the list's 2 entries",
        lambda: swap_in(pool.handle, SHAPE.random_cache(0), load, SHAPE.page_table()),
    )  # fmt: skip


def test_use_after_close_and_wrong_handles_are_errors(device, make_pool):
    closed, pool = make_pool(SHAPE.n_pages, SHAPE.page_bytes), make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    load, table = all_blocks(SHAPE, [0]), SHAPE.page_table()
    closed.close()
    later = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    assert later.handle[0] == closed.handle[0], "the place is taken again, under another generation"
    for handle in (
        closed.handle,
        np.array([-1, 1], np.int32),
        np.array([10**6, 1], np.int32),
        pool.handle + np.array([0, 7], np.int32),
    ):
        handle = np.asarray(handle, np.int32)
        raises_in_handler(
            closed if handle[0] == closed.handle[0] else pool, rf"handle \({handle[0]}, {handle[1]}\)",
            lambda handle=handle: swap_in(handle, SHAPE.random_cache(0), load, table),
        )  # fmt: skip
    jax.block_until_ready(swap_in(later.handle, SHAPE.random_cache(0), load, table))
    later.check()


def test_a_renewed_pool_refuses_its_earlier_handles_and_keeps_pages_and_counts(device, make_pool):
    pool, table = make_pool(SHAPE.n_pages, SHAPE.page_bytes), SHAPE.page_table()
    cache = SHAPE.random_cache(3)
    bits = as_bytes(cache).copy()
    handles = [pool.handle]
    jax.block_until_ready(write_pages(handles[0], cache, all_blocks(SHAPE, [1]), table))
    for _ in range(2):
        pool.renew()
        for old in handles:
            raises_in_handler(
                pool, rf"handle \({old[0]}, {old[1]}\) names no open host pool: it is closed or renewed",
                lambda old=old: swap_in(old, SHAPE.random_cache(0), all_blocks(SHAPE, [1]), table),
            )  # fmt: skip
        got = swap_in(pool.handle, jnp.zeros(SHAPE.cache), all_blocks(SHAPE, [1]), table)
        assert as_bytes(got)[:, :, 0].tobytes() == bits[:, :, 0].tobytes()
        pool.check()
        handles.append(pool.handle)
    assert (pool.stats().write_calls, pool.stats().read_calls, pool.stats().pages_read) == (1, 2, 8)


def test_renewing_waits_for_what_was_started_with_the_old_handle(device, make_pool):
    """Steps that are still queued finish under the old handle, before `renew` returns: nothing changes afterwards."""
    pool, table = make_pool(SHAPE.n_pages, SHAPE.page_bytes), SHAPE.page_table()

    @jax.jit
    def many(handle, cache):
        def write(_, cache):
            return ffi.write_pages(handle, cache + 1, all_blocks(SHAPE, [0]), table, layer=0, n_layers=SHAPE.layers)

        return jax.lax.fori_loop(0, 2000, write, cache)

    page = int(table[0, 0]) * SHAPE.layers * SHAPE.heads
    jax.block_until_ready(many(pool.handle, jnp.zeros(SHAPE.cache)))
    out = many(pool.handle, jnp.zeros(SHAPE.cache))
    pool.renew()
    first = pool.read_page(page).copy()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # on the CPU the rest of the loop may be refused
        jax.block_until_ready(out)
    if pool.pinned:
        pool.check()
        assert (first.view(np.float32) == 2000).all()
    assert pool.read_page(page).tobytes() == first.tobytes()


def test_a_page_of_another_size_is_an_error(device, make_pool):
    pool = make_pool(SHAPE.n_pages, SHAPE.page_bytes // 2)
    raises_in_handler(
        pool, r"a slot of the cache has 256 bytes, a page of the host pool 128",
        lambda: swap_in(pool.handle, SHAPE.random_cache(0), all_blocks(SHAPE, [0]), SHAPE.page_table()),
    )  # fmt: skip


def test_a_layer_outside_the_model_is_refused_while_tracing(device, make_pool):
    pool = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    with pytest.raises(ValueError, match="layer=2 is outside the 2 layers"):
        swap_in(pool.handle, SHAPE.random_cache(0), all_blocks(SHAPE, [0]), SHAPE.page_table(), layer=2)


def test_handlers_on_many_threads_and_pools_closed_meanwhile(device, make_pool):
    """Each thread swaps over its own pool, and over one that is closed under it: an error or a result, no crash."""
    table, load = SHAPE.page_table(), all_blocks(SHAPE, [0, 1, 2])
    doomed = make_pool(SHAPE.n_pages, SHAPE.page_bytes)
    failures: list[BaseException] = []
    swap_in(doomed.handle, SHAPE.random_cache(0), load, table)

    def work(number: int) -> None:
        try:
            pool = ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes)
            with jax.default_device(device):
                for turn in range(20):
                    cache = SHAPE.random_cache(100 * number + turn)
                    expected = as_bytes(cache)
                    write_pages(pool.handle, cache, load, table)
                    got = as_bytes(swap_in(pool.handle, jnp.zeros(SHAPE.cache), load, table))
                    assert got[:, :, :3].tobytes() == expected[:, :, :3].tobytes()
                    if number == 0 and turn == 10:
                        doomed.close()
                    with contextlib.suppress(jax.errors.JaxRuntimeError):
                        jax.block_until_ready(swap_in(doomed.handle, jnp.zeros(SHAPE.cache), load, table))
            assert pool.stats().read_calls == 20
            pool.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
