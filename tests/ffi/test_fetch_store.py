"""What fetch_blocks and store_blocks do beyond their pieces: errors, counts, order, places."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax import ffi
from tests.ffi.oracle import Shape, as_bytes

SHAPE = Shape()


def fetch(handle, cache, wanted, slot_block, page_table, layer=0, fresh_from=None, **options):
    """`fetch_blocks` with equal ages."""
    fresh_from = jnp.full(cache.shape[0], 99, jnp.int32) if fresh_from is None else fresh_from
    ages = jnp.zeros(slot_block.shape, jnp.int32)
    return ffi.fetch_blocks(
        handle, cache, wanted, slot_block, ages, jnp.int32(1), fresh_from, page_table, layer=layer,
        n_layers=SHAPE.layers, **options,
    )  # fmt: skip


def everywhere(shape: Shape, blocks: list[int]) -> jax.Array:
    """The same block ids for every row and KV head."""
    return jnp.broadcast_to(jnp.asarray(blocks, jnp.int32), (shape.rows, shape.heads, len(blocks)))


def at_slot(shape: Shape, slot: int) -> jax.Array:
    return jnp.full((shape.rows, shape.heads), slot, jnp.int32)


def empty(shape: Shape) -> jax.Array:
    return everywhere(shape, [-1] * shape.slots)


def listed(pool, cache, wanted, table):
    """The cache after `list_blocks`."""
    fresh_from = jnp.full(cache.shape[0], 99, jnp.int32)
    tables = (empty(SHAPE), empty(SHAPE), jnp.int32(1), fresh_from, table)
    return ffi.list_blocks(pool.handle, cache, wanted, *tables, layer=0, n_layers=SHAPE.layers, pieces=1)[0].cache


def store_all(pool, caches, table, block, slot, full=None):
    """The block of every row, from one slot, for all layers."""
    rows = caches[0].shape[0]
    full = jnp.ones(rows, bool) if full is None else jnp.asarray(full)
    slots = [jnp.full(cache.shape[:2], slot, jnp.int32) for cache in caches]
    block = jnp.full(rows, block, jnp.int32)
    return ffi.store_blocks(pool.handle, caches, slots, block, full, table, after=caches[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize(("block", "dim"), [(4, 8), (3, 5), (1, 2)])
def test_o2_a_round_trip_is_bit_exact_and_pages_lie_where_the_formula_says(device, make_pool, dtype, block, dim):
    """O2: full rows only, every layer and head, pages that 16, 4 or 1 divide."""
    shape = Shape(rows=3, block=block, dim=dim, dtype=dtype)
    pool = make_pool(shape.n_pages, shape.page_bytes)
    table, full = shape.page_table(), [True, False, True]
    caches = [shape.random_cache(seed) for seed in range(shape.layers)]
    bits = [as_bytes(cache) for cache in caches]
    kept = store_all(pool, caches, table, 3, 2, full)
    pool.check()
    assert [as_bytes(cache).tobytes() for cache in kept] == [cache.tobytes() for cache in bits]
    filled = {}
    for layer, row, head in np.ndindex(shape.layers, shape.rows, shape.heads):
        if full[row]:
            page = (int(table[row, 3]) * shape.layers + layer) * shape.heads + head
            filled[page] = bits[layer][row, head, 2].tobytes()
    for page in range(pool.n_pages):
        assert pool.read_page(page).tobytes() == filled.get(page, bytes(shape.page_bytes))
    wanted = jnp.where(jnp.asarray(full)[:, None, None], everywhere(shape, [3]), -1)
    for layer in range(shape.layers):
        got = fetch(pool.handle, jnp.zeros(shape.cache, dtype), wanted, empty(shape), table, layer)
        pool.check()
        for row, head in np.ndindex(shape.rows, shape.heads):
            expected = bits[layer][row, head, 2] if full[row] else np.zeros_like(bits[layer][row, head, 2])
            assert as_bytes(got.cache)[row, head, 0].tobytes() == expected.tobytes()
        assert got.misses.tolist() == [[int(f)] * shape.heads for f in full]
    assert pool.stats() == ffi.PoolStats(
        pages_read=8, pages_written=8, bytes_read=8 * shape.page_bytes, bytes_written=8 * shape.page_bytes,
        read_calls=2, write_calls=1,
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "layers"), [(1, 1), (70, 3), (2, 150)])
def test_any_number_of_rows_and_layers_is_stored(device, make_pool, rows, layers):
    """More rows than a warp has lanes, more layers than one launch takes."""
    shape = Shape(rows=rows, layers=layers, slots=2, blocks=3)
    pool = make_pool(shape.n_pages, shape.page_bytes)
    table = shape.page_table()
    full = np.random.default_rng(0).integers(0, 2, rows).astype(bool) | (rows == 1)
    cache = shape.random_cache(1)
    bits = as_bytes(cache)
    jax.block_until_ready(store_all(pool, [cache] * layers, table, 1, 1, full))
    pool.check()
    assert (pool.stats().pages_written, pool.stats().write_calls) == (full.sum() * layers * shape.heads, 1)
    for row in np.flatnonzero(full)[[0, -1]]:
        page = (int(table[row, 1]) * layers + layers - 1) * shape.heads + 1
        assert pool.read_page(page).tobytes() == as_bytes(cache)[row, 1, 1].tobytes() == bits[row, 1, 1].tobytes()


def test_order_follows_the_data_through_a_loop(device, make_pool):
    """Every turn stores block 0 from slot 0, overwrites the slot, and fetches the block into it again."""
    pool, table = make_pool(SHAPE.n_pages, SHAPE.page_bytes), SHAPE.page_table()

    @jax.jit
    def run(caches):
        def turn(i, caches):
            caches = [cache.at[:, :, 0].set(i.astype(jnp.float32) + 100 * n) for n, cache in enumerate(caches)]
            caches = store_all(pool, caches, table, 0, 0)
            caches = [cache.at[:, :, 0].set(-1.0) for cache in caches]
            return [
                fetch(pool.handle, cache, everywhere(SHAPE, [0]), empty(SHAPE), table, layer=n).cache
                for n, cache in enumerate(caches)
            ]

        return jax.lax.fori_loop(0, 50, turn, caches)

    for n, cache in enumerate(run([jnp.zeros(SHAPE.cache), jnp.zeros(SHAPE.cache)])):
        assert (np.asarray(cache[:, :, 0]) == 49 + 100 * n).all()


def test_j1_counts_are_exact_and_vmap_and_grad_say_what_to_do(device, make_pool):
    pool, table = make_pool(SHAPE.n_pages, SHAPE.page_bytes), SHAPE.page_table()
    cache, wanted = SHAPE.random_cache(0), everywhere(SHAPE, [0, 1])

    def once(cache):
        return fetch(pool.handle, cache, wanted, empty(SHAPE), table).cache

    def ignored(cache):
        once(cache)
        store_all(pool, [cache], table, 0, 0, [False, False])
        return cache + 1

    def calls(function, *args):
        before = pool.stats()
        jax.block_until_ready(jax.jit(function)(*args))
        after = pool.stats()
        assert after.pages_read - before.pages_read == 8 * (after.read_calls - before.read_calls)
        return after.read_calls - before.read_calls, after.write_calls - before.write_calls

    assert calls(once, cache) == (1, 0)
    assert calls(ignored, cache) == (1, 1)
    assert calls(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: once(y), x), cache) == (100, 0)
    assert calls(lambda x: once(x) + once(x), cache) == (2, 0)
    assert pool.stats().pages_written == 0
    with pytest.raises(NotImplementedError, match="fetch_blocks cannot be vmapped"):
        jax.vmap(once)(cache[None])
    with pytest.raises(NotImplementedError, match="list_blocks cannot be vmapped"):
        jax.vmap(lambda cache: listed(pool, cache, wanted, table))(cache[None])
    with pytest.raises(NotImplementedError, match="list_blocks cannot be differentiated"):
        jax.grad(lambda cache: listed(pool, cache, wanted, table).sum())(cache)
    with pytest.raises(NotImplementedError, match="store_blocks cannot be differentiated"):
        jax.grad(lambda cache: store_all(pool, [cache], table, 0, 0)[0].sum())(cache)


def test_j2_the_caches_stay_where_they_are_and_nothing_is_copied(device, make_pool):
    """J2: all layers through one store; `after` keeps the last reader before it."""
    shape = Shape(slots=64, block=16, dim=32)
    pool, table = make_pool(shape.n_pages, shape.page_bytes), shape.page_table()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(caches, tables):
        new, held, total = [], [], jnp.zeros(())
        for layer, (cache, slot_block) in enumerate(zip(caches, tables, strict=True)):
            ones = jnp.ones((shape.rows, shape.heads, shape.dim))
            fresh_from = jnp.zeros(shape.rows, jnp.int32)
            token = ffi.NewToken(ones, ones, fresh_from)
            wanted = everywhere(shape, [0, 1, 2])
            got = fetch(pool.handle, cache, wanted, slot_block, table, layer, fresh_from, token=token)
            total = total + jnp.vdot(got.cache[0, 0, 1].reshape(-1), got.cache[0, 0, 2].reshape(-1))
            new.append(got.cache)
            held.append(got.slot_block)
        slots = [at_slot(shape, 0)] * 2
        block = jnp.zeros(shape.rows, jnp.int32)
        new = ffi.store_blocks(pool.handle, new, slots, block, block == 0, table, after=total)
        return new, held, total

    caches, tables = [jnp.zeros(shape.cache), jnp.ones(shape.cache)], [empty(shape) + 0, empty(shape) + 0]
    layer_bytes = caches[0].nbytes
    analysis = step.lower(caches, tables).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < layer_bytes // 4
    assert analysis.alias_size_in_bytes >= 2 * layer_bytes
    pointers = [cache.unsafe_buffer_pointer() for cache in caches]
    for _ in range(10):
        caches, tables, _ = step(caches, tables)
        assert [cache.unsafe_buffer_pointer() for cache in caches] == pointers
    assert float(caches[0][0, 0, 0, 0, 0, 0]) == 1.0
    pool.check()


def raises(pool: ffi.HostPool, match: str, call, error=RuntimeError) -> None:
    """A handler's error: raised with the result on the CPU, found by `check` on a GPU, once."""

    def run() -> None:
        jax.block_until_ready(call())
        pool.check()

    with pytest.raises(error, match=match):
        run()
    pool.check()


def test_errors_name_the_handler_and_the_number_and_the_pool_stays_usable(device, make_pool):
    pool, table = make_pool(SHAPE.n_pages, SHAPE.page_bytes), SHAPE.page_table()
    cache, bad = SHAPE.random_cache(0), table.at[1, 2].set(10)
    place = r"page table entry 10 of block 2 \(row 1, KV head [01]\) is page 4[01], outside"
    raises(
        pool,
        f"fetch_blocks: {place}",
        lambda: fetch(pool.handle, jnp.array(cache), everywhere(SHAPE, [2, 0]), empty(SHAPE), bad),
    )
    raises(pool, r"store_blocks: page table entry 10 of block 2", lambda: store_all(pool, [cache, cache], bad, 2, 0))
    raises(
        pool,
        r"store_blocks: block 5 \(row [01], KV head [01]\) is outside the 5 blocks",
        lambda: store_all(pool, [cache, cache], table, 5, 0),
    )
    raises(pool, "store_blocks: slot -1", lambda: store_all(pool, [cache, cache], table, 0, -1))
    raises(pool, "store_blocks: slot 4", lambda: store_all(pool, [cache, cache], table, 0, 4))
    small = jnp.zeros((2, 2, 4, 2, 4, 4))
    raises(pool, "a slot of the cache has 128 bytes, a page of the host pool 256",
           lambda: fetch(pool.handle, small, everywhere(SHAPE, [0]), empty(SHAPE), table))  # fmt: skip
    stale = pool.handle
    pool.renew()
    names_no_pool = rf"handle \({stale[0]}, {stale[1]}\) names no open host pool"
    nothing = everywhere(SHAPE, [-1])
    raises(pool, f"fetch_blocks: {names_no_pool}", lambda: fetch(stale, jnp.array(cache), nothing, empty(SHAPE), table))
    slots, block = [at_slot(SHAPE, 0)] * 2, jnp.zeros(2, jnp.int32)
    raises(
        pool, f"store_blocks: {names_no_pool}",
        lambda: ffi.store_blocks(stale, [cache, cache], slots, block, block > 0, table, after=cache),
    )  # fmt: skip
    assert pool.stats().pages_written == 0 or pool.pinned
    jax.block_until_ready(store_all(pool, [cache, cache], table, 1, 1))
    got = fetch(pool.handle, jnp.zeros(SHAPE.cache), everywhere(SHAPE, [1]), empty(SHAPE), table, layer=1)
    assert as_bytes(got.cache)[:, :, 0].tobytes() == as_bytes(cache)[:, :, 1].tobytes()
    pool.check()


def test_arguments_that_do_not_fit_are_refused_while_tracing(device, make_pool):
    pool, table = make_pool(SHAPE.n_pages, SHAPE.page_bytes), SHAPE.page_table()
    cache, block = SHAPE.random_cache(0), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="4 slots cannot hold 5 wanted blocks"):
        fetch(pool.handle, cache, everywhere(SHAPE, [0] * 5), empty(SHAPE), table)
    for change in ({"k": jnp.zeros((2, 2, 9))}, {"v": jnp.zeros((2, 1, 8))}, {"position": jnp.zeros(3, jnp.int32)}):
        token = ffi.NewToken(jnp.zeros((2, 2, 8)), jnp.zeros((2, 2, 8)), block)._replace(**change)
        with pytest.raises(RuntimeError, match=r"must be \[B, K, H\] and its position \[B\]"):
            jax.block_until_ready(fetch(pool.handle, cache, everywhere(SHAPE, [0]), empty(SHAPE), table, token=token))
    token = ffi.NewToken(jnp.zeros((2, 2, 8), jnp.bfloat16), jnp.zeros((2, 2, 8)), block)
    with pytest.raises(RuntimeError, match="must have the cache's type"):
        jax.block_until_ready(fetch(pool.handle, cache, everywhere(SHAPE, [0]), empty(SHAPE), table, token=token))
    with pytest.raises(ValueError, match="layer=2 is outside the 2 layers"):
        fetch(pool.handle, cache, everywhere(SHAPE, [0]), empty(SHAPE), table, layer=2)
    with pytest.raises(ValueError, match="n_ctas=0 is outside"):
        fetch(pool.handle, cache, everywhere(SHAPE, [0]), empty(SHAPE), table, n_ctas=0)
    for caches, slots in (([], []), ([cache], [])):
        with pytest.raises(ValueError, match=f"{len(caches)} caches and 0 arrays of slots"):
            ffi.store_blocks(pool.handle, caches, slots, block, block > 0, table, after=block)


@pytest.mark.gpu
@pytest.mark.parametrize("n_ctas", [1, 3, 8, 12, 16, 132])
def test_the_number_of_thread_blocks_changes_nothing(device, make_pool, n_ctas):
    """Clusters of 1, 2, 4 and 8 thread blocks."""
    if device.platform == "cpu":
        pytest.skip("has no meaning on the CPU")
    shape = Shape(rows=9, heads=3, slots=5, block=16, dim=32, layers=2, dtype="bfloat16")
    pool, table = make_pool(shape.n_pages, shape.page_bytes), shape.page_table()
    cache = shape.random_cache(3)
    bits = as_bytes(cache)
    for block in range(3):
        slots = [at_slot(shape, block)] * 2
        full = jnp.ones(shape.rows, bool)
        chosen = jnp.full(shape.rows, block, jnp.int32)
        jax.block_until_ready(
            ffi.store_blocks(pool.handle, [cache, cache], slots, chosen, full, table, after=cache, n_ctas=n_ctas)
        )
    got = fetch(pool.handle, jnp.zeros_like(cache), everywhere(shape, [2, 0, 1]), empty(shape), table, n_ctas=n_ctas)
    for slot, block in enumerate((2, 0, 1)):
        assert as_bytes(got.cache)[:, :, slot].tobytes() == bits[:, :, block].tobytes()
    pool.check()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["", "FUSION,CUSTOM_CALL"])
def test_j3_graphs_replay_with_other_lists(device, make_pool, graphs):
    """J3: one executable, ten steps over the tables of the step before; only the wanted blocks differ."""
    if device.platform == "cpu":
        pytest.skip("has no graphs")
    shape = Shape(slots=4, blocks=9, block=16, dim=32)
    pool, table = make_pool(shape.n_pages, shape.page_bytes), shape.page_table()
    pages = {}
    for row, head, block in np.ndindex(shape.rows, shape.heads, shape.blocks):
        page = np.full(shape.page_bytes // 4, 100 * row + 10 * head + block, np.float32)
        pages[row, head, block] = page
        pool.write_page((int(table[row, block]) * shape.layers + 1) * shape.heads + head, page)
    options = {"xla_gpu_enable_command_buffer": graphs} | ({"xla_gpu_graph_min_graph_size": 1} if graphs else {})

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2), compiler_options=options)
    def step(cache, slot_block, last_used, wanted, now):
        fresh_from = jnp.full(shape.rows, 99, jnp.int32)
        return ffi.fetch_blocks(
            pool.handle, cache, wanted, slot_block, last_used, now, fresh_from, table, layer=1, n_layers=shape.layers
        )

    rng = np.random.default_rng(0)
    cache, slot_block, last_used = jnp.zeros(shape.cache), empty(shape) + 0, empty(shape) + 1
    for turn in range(10):
        wanted = np.stack([rng.permutation(shape.blocks)[:3] for _ in range(4)]).reshape(2, 2, 3).astype(np.int32)
        got = step(cache, slot_block, last_used, wanted, jnp.int32(turn))
        cache, slot_block, last_used = got.cache, got.slot_block, got.last_used
        for row, head, place in np.ndindex(2, 2, 3):
            slot = np.asarray(got.cache[row, head, int(got.slot_ids[row, head, place])])
            assert (slot.reshape(-1) == pages[row, head, int(wanted[row, head, place])]).all(), turn
    pool.check()
