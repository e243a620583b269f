"""start_fetch and finish_fetch: what happens between them, and what holds them together."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax import ffi
from tests.ffi.oracle import Shape, as_bytes
from tests.ffi.test_fetch_store import at_slot, empty, everywhere, raises

SHAPE = Shape(slots=4, blocks=9, block=16, dim=32)


def start(handle, cache, wanted, slot_block, page_table, layer=0, last_used=None, step=1):
    """`start_fetch` of blocks that all have pages."""
    fresh_from = jnp.full(cache.shape[0], page_table.shape[1], jnp.int32)
    ages = jnp.zeros(slot_block.shape, jnp.int32) if last_used is None else last_used
    return ffi.start_fetch(
        handle, cache, wanted, slot_block, ages, jnp.int32(step), fresh_from, page_table, layer=layer,
        n_layers=SHAPE.layers,
    )  # fmt: skip


def filled_pool(make_pool, table, shape=SHAPE):
    """A pool whose page of a row, KV head and block of layer 1 holds a number that tells."""
    pool = make_pool(shape.n_pages, shape.page_bytes)
    for row, head, block in np.ndindex(shape.rows, shape.heads, shape.blocks):
        page = np.full(shape.page_bytes // 4, 100 * row + 10 * head + block, np.float32)
        pool.write_page((int(table[row, block]) * shape.layers + 1) * shape.heads + head, page)
    return pool


def test_o1_twenty_steps_with_work_between_the_halves(device, make_pool):
    """The work reads the slots that are not late; after the second half every wanted block is in its slot."""
    table = SHAPE.page_table()
    pool = filled_pool(make_pool, table)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(cache, slot_block, last_used, wanted, now):
        got, pending = start(pool.handle, cache, wanted, slot_block, table, 1, last_used, now)
        early = jnp.take_along_axis(got.cache[..., 0, 0, 0], jnp.maximum(got.slot_ids, 0), axis=2)
        early = jnp.where(pending.late == 0, early, -1.0)
        cache = ffi.finish_fetch(got.cache, pending, after=early)
        after = jnp.take_along_axis(cache[..., 0, 0, 0], jnp.maximum(got.slot_ids, 0), axis=2)
        return got._replace(cache=cache), pending.late, early, after

    rng = np.random.default_rng(0)
    cache, slot_block, last_used = jnp.zeros(SHAPE.cache), empty(SHAPE) + 0, empty(SHAPE) + 1
    place = cache.unsafe_buffer_pointer()
    seen = 0
    for turn in range(20):
        wanted = np.stack([rng.permutation(SHAPE.blocks)[:3] for _ in range(4)]).reshape(2, 2, 3).astype(np.int32)
        got, late, early, after = step(cache, slot_block, last_used, wanted, jnp.int32(turn))
        cache, slot_block, last_used = got.cache, got.slot_block, got.last_used
        right = 100 * np.arange(2)[:, None, None] + 10 * np.arange(2)[:, None] + wanted
        np.testing.assert_array_equal(after, right)
        np.testing.assert_array_equal(early, np.where(np.asarray(late) == 0, right, -1))
        np.testing.assert_array_equal(np.asarray(late).sum(-1), got.misses)
        assert cache.unsafe_buffer_pointer() == place
        seen += int((np.asarray(late) == 0).sum())
    assert seen > 20, "nothing was there early; the test shows nothing"
    pool.check()


def test_j1_counts_and_what_cannot_be_mapped(device, make_pool):
    table = SHAPE.page_table()
    pool = filled_pool(make_pool, table)

    def both(cache):
        got, pending = start(pool.handle, cache, everywhere(SHAPE, [0, 1]), empty(SHAPE), table)
        return ffi.finish_fetch(got.cache, pending)

    before = pool.stats()
    jax.block_until_ready(jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: both(y), x))(jnp.zeros(SHAPE.cache)))
    after = pool.stats()
    assert (after.read_calls - before.read_calls, after.pages_read - before.pages_read) == (10, 80)
    with pytest.raises(NotImplementedError, match="start_fetch cannot be vmapped"):
        jax.vmap(both)(jnp.zeros((1, *SHAPE.cache)))
    with pytest.raises(NotImplementedError, match="cannot be differentiated"):
        jax.grad(lambda cache: both(cache).sum())(jnp.zeros(SHAPE.cache))


def test_j2_nothing_is_copied(device, make_pool):
    """J2: two layers, each with a reader between the halves and one after."""
    shape = Shape(slots=64, block=16, dim=32)
    pool, table = make_pool(shape.n_pages, shape.page_bytes), shape.page_table()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(caches):
        new, total = [], jnp.zeros(())
        for layer, cache in enumerate(caches):
            got, pending = start(pool.handle, cache, everywhere(shape, [0, 1, 2]), empty(shape), table, layer)
            early = jnp.vdot(got.cache[0, 0, 1].reshape(-1), got.cache[0, 0, 2].reshape(-1))
            cache = ffi.finish_fetch(got.cache, pending, after=early)
            total = total + early + jnp.vdot(cache[0, 0, 3].reshape(-1), cache[0, 0, 4].reshape(-1))
            new.append(cache)
        slots, block = [at_slot(shape, 0)] * 2, jnp.zeros(shape.rows, jnp.int32)
        return ffi.store_blocks(pool.handle, new, slots, block, block == 0, table, after=total), total

    caches = [jnp.zeros(shape.cache), jnp.ones(shape.cache)]
    layer_bytes = caches[0].nbytes
    analysis = step.lower(caches).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < layer_bytes // 4
    assert analysis.alias_size_in_bytes >= 2 * layer_bytes
    pointers = [cache.unsafe_buffer_pointer() for cache in caches]
    for _ in range(10):
        caches, _ = step(caches)
        assert [cache.unsafe_buffer_pointer() for cache in caches] == pointers
    pool.check()


def test_errors_name_the_handler(device, make_pool):
    pool, table = make_pool(SHAPE.n_pages, SHAPE.page_bytes), SHAPE.page_table()

    @jax.jit  # each by itself, the two would work on copies of the cache
    def call(handle, page_table):
        got, pending = start(handle, jnp.zeros(SHAPE.cache), everywhere(SHAPE, [2, 0]), empty(SHAPE), page_table)
        return ffi.finish_fetch(got.cache, pending)

    raises(pool, "start_fetch: page table entry 99 of block 2", lambda: call(pool.handle, table.at[1, 2].set(99)))
    stale = pool.handle
    pool.renew()
    raises(pool, "start_fetch: handle .* names no open host pool", lambda: call(stale, table))
    jax.block_until_ready(call(pool.handle, table))
    ffi.settle()
    pool.check()


def test_many_threads_share_a_device(device, make_pool):
    """Each over its own pool and cache, all through one compiled program."""
    table = SHAPE.page_table()
    failures: list[BaseException] = []

    @jax.jit
    def run(handle, cache, wanted):
        got, pending = start(handle, cache, wanted, empty(SHAPE), table, 1)
        return ffi.finish_fetch(got.cache, pending, after=got.cache[0, 0, 0, 0, 0])

    def work(number: int) -> None:
        try:
            with jax.default_device(device):
                pool = filled_pool(ffi.HostPool, table)
                for turn in range(20):
                    blocks = [(number + turn) % 9, (number + turn + 3) % 9]
                    got = np.asarray(run(pool.handle, jnp.zeros(SHAPE.cache), everywhere(SHAPE, blocks)))
                    for slot, block in enumerate(blocks):
                        for row, head in np.ndindex(2, 2):
                            assert (got[row, head, slot] == 100 * row + 10 * head + block).all()
                pool.check()
                pool.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_o1_copies_wait_for_what_came_before_and_late_readers_for_the_copies(device, make_pool):
    """Slots are overwritten after a long chain of products, then fetched into: the copies must come after that. Many
    pages are late; whoever reads them must see them."""
    size = 128 if device.platform == "cpu" else 4096
    shape = Shape(rows=1, heads=1, slots=512, block=64, dim=128, blocks=512, layers=2)
    table = shape.page_table()
    pool = make_pool(shape.n_pages, shape.page_bytes)
    for block in range(shape.blocks):
        pool.write_page(int(table[0, block]) * 2 + 1, np.full(shape.page_bytes // 4, block, np.float32))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, matrix, scale):
        slow = jax.lax.fori_loop(0, 30, lambda _, x: x @ matrix, jnp.eye(size))
        cache = cache + (slow[0, 0] * scale)
        wanted = jnp.arange(512, dtype=jnp.int32)[None, None]
        got, pending = start(pool.handle, cache, wanted, jnp.full((1, 1, 512), -1, jnp.int32), table, 1)
        cache = ffi.finish_fetch(got.cache, pending, after=got.slot_ids)
        return cache, cache[0, 0, :, :, -1, -1]

    cache = jnp.zeros(shape.cache)
    for turn in range(5):
        cache, seen = run(cache, jnp.eye(size), float(turn + 1))
        np.testing.assert_array_equal(seen, np.broadcast_to(np.arange(512)[:, None], (512, 2)))
        assert (np.asarray(cache[0, 0, :, 0, 0, 0]) == np.arange(512)).all()
    pool.check()


# What only a GPU can show.


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["", "FUSION,CUSTOM_CALL"])
def test_j3_the_halves_stay_out_of_graphs(device, make_pool, graphs):
    """J3: with graphs forced, what lies around them is captured and they are not."""
    if device.platform == "cpu":
        pytest.skip("has no graphs")
    table = SHAPE.page_table()
    pool = filled_pool(make_pool, table)
    options = {"xla_gpu_enable_command_buffer": graphs} | ({"xla_gpu_graph_min_graph_size": 1} if graphs else {})

    @functools.partial(jax.jit, compiler_options=options)
    def run(cache, wanted):
        got, pending = start(pool.handle, jnp.sin(cache) * 0, wanted, empty(SHAPE), table, 1)
        between = jnp.cos(got.slot_ids * 1.0)
        return jnp.sqrt(ffi.finish_fetch(got.cache, pending, after=between))

    for turn in range(10):
        got = np.asarray(run(jnp.zeros(SHAPE.cache), everywhere(SHAPE, [turn % 9])))
        for row, head in np.ndindex(2, 2):
            np.testing.assert_allclose(got[row, head, 0] ** 2, 100 * row + 10 * head + turn % 9, rtol=1e-5)
    pool.check()


@pytest.mark.gpu
def test_a_second_half_without_its_first_is_refused(device, make_pool):
    """The cache in the second call is not the one that the first call gave: here, a copy of it."""
    if device.platform == "cpu":
        pytest.skip("nothing is under way there")
    pool, table = make_pool(SHAPE.n_pages, SHAPE.page_bytes), SHAPE.page_table()

    @jax.jit
    def run(cache):
        got, pending = start(pool.handle, cache, everywhere(SHAPE, [0]), empty(SHAPE), table)
        return ffi.finish_fetch(got.cache + 1, pending), ffi.finish_fetch(got.cache, pending)

    with pytest.raises(RuntimeError, match="finish_fetch: nothing was started for this cache"):
        jax.block_until_ready(run(jnp.zeros(SHAPE.cache)))
    ffi.settle()


@pytest.mark.gpu
def test_pools_on_two_devices_at_once():
    """Two devices, two pools, steps in flight on both."""
    if not ffi.has_cuda() or len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    table = SHAPE.page_table()
    devices = jax.devices("cuda")[:2]
    pools = [filled_pool(functools.partial(ffi.HostPool, device=device), table) for device in devices]

    @jax.jit
    def run(handle, cache, wanted):
        got, pending = start(handle, cache, wanted, empty(SHAPE), table, 1)
        return ffi.finish_fetch(got.cache, pending, after=got.slot_ids)

    for turn in range(20):
        results = []
        for number, (device, pool) in enumerate(zip(devices, pools, strict=True)):
            with jax.default_device(device):
                cache = jax.device_put(jnp.zeros(SHAPE.cache), device)
                results.append(run(pool.handle, cache, everywhere(SHAPE, [(turn + number) % 9])))
        for number, (device, got) in enumerate(zip(devices, results, strict=True)):
            assert got.devices() == {device}
            for row, head in np.ndindex(2, 2):
                block = (turn + number) % 9
                assert (as_bytes(got)[row, head, 0].view(np.float32) == 100 * row + 10 * head + block).all()
    for pool in pools:
        pool.check()
        pool.close()
