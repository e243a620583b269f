"""What only a GPU can show: captured graphs, streams, pinning, pages beyond 4 GiB."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax import ffi
from tests.ffi.oracle import Shape, all_blocks, as_bytes, transfer

pytestmark = pytest.mark.gpu
SHAPE = Shape(block=16, dim=32, dtype="bfloat16")
GRAPHS = {
    "off": {"xla_gpu_enable_command_buffer": ""},
    "default": {},
    "forced": {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1},
}


@pytest.fixture(autouse=True)
def gpu():
    if not ffi.has_cuda():
        pytest.skip(ffi.status())
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(str(error))
    with jax.default_device(device):
        yield device


def copy_of(array: jax.Array) -> np.ndarray:
    return as_bytes(np.asarray(array)).copy()


@pytest.mark.parametrize("graphs", GRAPHS)
def test_j3_graphs_replay_with_other_handles_and_other_lists(graphs):
    """One executable, replayed ten times over two pools: handle, lists and cache contents change between replays."""
    pools = [ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes) for _ in range(2)]
    table = SHAPE.page_table()

    @functools.partial(jax.jit, compiler_options=GRAPHS[graphs])
    def step(handle, cache, store, load):
        for layer in range(SHAPE.layers):
            cache = ffi.write_pages(handle, cache, store, table, layer=layer, n_layers=SHAPE.layers)
            cache = ffi.swap_in(handle, cache, load, table, layer=layer, n_layers=SHAPE.layers)
        return cache

    rng = np.random.default_rng(0)
    pages: list[dict] = [{}, {}]
    for turn in range(10):
        which = turn % 2
        cache = SHAPE.random_cache(turn)
        want = copy_of(cache)
        blocks, slots = rng.permutation(SHAPE.blocks)[:3].tolist(), rng.permutation(SHAPE.slots)[:3].tolist()
        store = {(r, k): list(zip(blocks, slots, strict=True)) for r in range(2) for k in range(2)}
        load = {(r, k): [(blocks[(r + k + turn) % 3], slots[0])] for r in range(2) for k in range(2)}
        got = step(pools[which].handle, cache, transfer(store, SHAPE, 3), transfer(load, SHAPE, 3))
        for layer in range(SHAPE.layers):
            for (r, k), moves in store.items():
                for block, slot in moves:
                    pages[which][r, k, block, layer] = want[r, k, slot].copy()
            for (r, k), moves in load.items():
                for block, slot in moves:
                    want[r, k, slot] = pages[which][r, k, block, layer]
        assert copy_of(got).tobytes() == want.tobytes(), turn
    for pool in pools:
        pool.check()
        assert pool.stats().read_calls == 5 * SHAPE.layers
        pool.close()


@pytest.mark.parametrize("n_ctas", [1, 3, 16, 132])
def test_the_number_of_thread_blocks_changes_nothing(n_ctas):
    with ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes) as pool:
        table, cache = SHAPE.page_table(), SHAPE.random_cache(5)
        options = {"layer": 1, "n_layers": SHAPE.layers, "n_ctas": n_ctas}
        jax.block_until_ready(ffi.write_pages(pool.handle, cache, all_blocks(SHAPE, [3, 1]), table, **options))
        got = ffi.swap_in(pool.handle, jnp.zeros_like(cache), all_blocks(SHAPE, [3, 1]), table, **options)
        assert copy_of(got[:, :, :2]).tobytes() == copy_of(cache[:, :, :2]).tobytes()
        pool.check()


@pytest.mark.parametrize("shape", [Shape(block=3, dim=5, dtype="int8"), Shape(block=1, dim=3, dtype="bfloat16")])
def test_pages_that_16_bytes_do_not_divide(shape):
    with ffi.HostPool(shape.n_pages, shape.page_bytes) as pool:
        table, cache = shape.page_table(), shape.random_cache(5)
        options = {"layer": 0, "n_layers": shape.layers}
        jax.block_until_ready(ffi.write_pages(pool.handle, cache, all_blocks(shape, [3, 1]), table, **options))
        got = ffi.swap_in(pool.handle, jnp.zeros_like(cache), all_blocks(shape, [3, 1]), table, **options)
        assert copy_of(got[:, :, :2]).tobytes() == copy_of(cache[:, :, :2]).tobytes()
        pool.check()


def test_b5_a_page_beyond_4_gib():
    """Only the last page is filled, and it is what is read; the write goes there too."""
    shape = Shape(rows=1, heads=1, slots=2, block=64, dim=128, blocks=160_000, layers=1, dtype="bfloat16")
    assert (shape.n_pages - 1) * shape.page_bytes > 2**32
    with ffi.HostPool(shape.n_pages, shape.page_bytes) as pool:
        table = jnp.arange(shape.blocks, dtype=jnp.int32)[None]
        last = shape.blocks - 1
        data = np.random.default_rng(0).integers(0, 256, shape.page_bytes, np.uint8)
        pool.write_page(last, data)
        move = transfer({(0, 0): [(last, 1)]}, shape, 1)
        got = ffi.swap_in(pool.handle, jnp.zeros(shape.cache, shape.dtype), move, table, layer=0, n_layers=1)
        assert copy_of(got)[0, 0, 1].tobytes() == data.tobytes()
        assert not copy_of(got)[0, 0, 0].any()
        jax.block_until_ready(
            ffi.write_pages(pool.handle, jnp.ones(shape.cache, shape.dtype), move, table, layer=0, n_layers=1)
        )
        assert (pool.read_page(last).view(np.uint16) == 0x3F80).all()
        assert not pool.read_page(last - 1).any()
        pool.check()


def test_o1_a_slow_kernel_before_the_write_delays_the_write():
    """The write must see what a long chain of products computes, and the read after it what was written."""
    shape = Shape(rows=1, heads=1, slots=2, block=64, dim=128, blocks=2, layers=1, dtype="float32")
    table = shape.page_table()

    @jax.jit
    def run(handle, cache, matrix, scale):
        def product(_, x):
            return x @ matrix

        slow = jax.lax.fori_loop(0, 30, product, jnp.eye(4096))
        cache = cache.at[0, 0, 0].set(slow[0, 0] * scale)
        cache = ffi.write_pages(handle, cache, all_blocks(shape, [0]), table, layer=0, n_layers=1)
        cache = cache.at[0, 0, 0].set(-1.0)
        return ffi.swap_in(handle, cache, transfer({(0, 0): [(0, 1)]}, shape, 1), table, layer=0, n_layers=1)

    with ffi.HostPool(shape.n_pages, shape.page_bytes) as pool:
        for turn in range(1, 4):
            got = run(pool.handle, jnp.zeros(shape.cache), jnp.eye(4096), float(turn))
            assert (np.asarray(got[0, 0, 1]) == turn).all()
            assert (np.asarray(got[0, 0, 0]) == -1).all()
        pool.check()


def test_o4_a_failed_pin_leaves_no_error_behind():
    """Pinning the same memory again fails; the next kernels and the first pool do not notice."""
    from nosa_jax.ffi import _cuda

    with ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes) as pool:
        slot, generation = pool._native.handle
        with pytest.raises(RuntimeError, match=r"pinning .* failed.*limit on locked memory"):
            _cuda.PinnedPool(0, slot, generation, pool._native.address, SHAPE.n_pages, SHAPE.page_bytes)
        assert float(jax.jit(jnp.dot)(jnp.ones((256, 256)), jnp.ones((256, 256)))[0, 0]) == 256.0
        cache = SHAPE.random_cache(0)
        options = {"layer": 0, "n_layers": SHAPE.layers}
        jax.block_until_ready(
            ffi.write_pages(pool.handle, cache, all_blocks(SHAPE, [2]), SHAPE.page_table(), **options)
        )
        got = ffi.swap_in(pool.handle, jnp.zeros_like(cache), all_blocks(SHAPE, [2]), SHAPE.page_table(), **options)
        assert copy_of(got[:, :, 0]).tobytes() == copy_of(cache[:, :, 0]).tobytes()


def test_o4_a_small_locked_memory_limit_is_named_or_does_not_apply():
    """Some drivers ignore the limit; where it applies, nothing is mapped and the message has the size and the limit."""
    script = (
        "import resource, jax, jax.numpy as jnp\n"
        "from nosa_jax import ffi\n"
        "from nosa_jax.ffi import pinning\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "jax.devices()\n"
        "print('trial:', pinning._why_not_pinned(0, 65536 + pinning.HUGE_PAGE))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    ffi.HostPool(256, 2**20).close(); print('pinned')\n"
        "except ffi.HostMemoryError as error:\n"
        "    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**15, 'KiB'\n"
        "    print(error)\n"
        "print(float(jax.jit(jnp.sum)(jnp.ones(1000))))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("1000.0\n")
    if "trial: None" in run.stdout:
        assert "\npinned\n" in run.stdout
    else:
        assert "268435456 bytes" in run.stdout
        assert "(ulimit -l) is 65536 bytes" in run.stdout


def test_counters_start_at_zero_where_a_place_is_used_again():
    table, options = SHAPE.page_table(), {"layer": 0, "n_layers": SHAPE.layers}
    with ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes) as pool:
        jax.block_until_ready(
            ffi.write_pages(pool.handle, SHAPE.random_cache(0), all_blocks(SHAPE, [2]), table, **options)
        )
        assert (pool.stats().write_calls, pool.stats().pages_written) == (1, 4)
    assert (pool.stats().write_calls, pool.stats().pages_written) == (1, 4), "readable after close"
    with ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes) as later:
        assert later.handle[0] == pool.handle[0]
        assert (later.stats().write_calls, later.stats().pages_written) == (0, 0)


def test_a_pool_of_another_gpu_is_refused():
    """Its handle is known on its own device alone."""
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    first, second = jax.devices("cuda")[:2]
    options = {"layer": 0, "n_layers": SHAPE.layers}
    with ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes, device=second) as pool:
        for device, refused in ((first, True), (second, False)):
            with jax.default_device(device):
                cache = SHAPE.random_cache(0)
                jax.block_until_ready(
                    ffi.write_pages(pool.handle, cache, all_blocks(SHAPE, [2]), SHAPE.page_table(), **options)
                )
            if refused:
                with pytest.raises(ffi.PoolClosedError, match="was not made for this device"):
                    pool.check()
            else:
                pool.check()
        assert pool.stats().write_calls == 1


def test_a_page_with_a_fault_is_listed_as_nothing_and_counts_as_arrived():
    """So that nobody waits for it; `check` has the fault, and the other pages are listed as always."""
    pieces, bad_row, bad_block = 3, 1, 2
    every_pair = (SHAPE.rows, SHAPE.heads)
    with ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes) as pool:
        table = SHAPE.page_table().at[bad_row, bad_block].set(SHAPE.n_pages)
        wanted = jnp.broadcast_to(jnp.asarray([bad_block, 0], jnp.int32), (*every_pair, 2))
        nothing = jnp.full((*every_pair, SHAPE.slots), -1, jnp.int32)
        fresh_from = jnp.full(SHAPE.rows, SHAPE.blocks, jnp.int32)
        fetched, pages = ffi.list_blocks(
            pool.handle, SHAPE.random_cache(0), wanted, nothing, nothing, jnp.int32(1), fresh_from, table,
            layer=0, n_layers=SHAPE.layers, pieces=pieces,
        )  # fmt: skip
        with pytest.raises(RuntimeError, match=f"list_blocks: page table entry {SHAPE.n_pages} of block {bad_block}"):
            pool.check()
        assert pool.stats().pages_read == wanted.size
    assert np.asarray(pages.late).all()
    arrived = np.take_along_axis(np.asarray(pages.arrived), np.asarray(fetched.slot_ids), axis=2)
    expected = np.zeros_like(arrived)
    expected[bad_row, :, 0] = pieces
    np.testing.assert_array_equal(arrived, expected)
    entries = np.concatenate([of[:n] for of, n in zip(np.asarray(pages.pages), np.asarray(pages.n_pages), strict=True)])
    assert len(entries) == wanted.size
    assert (entries[:, :2] == 0).all(axis=1).sum() == SHAPE.heads


def test_fetches_in_flight_on_two_gpus_at_once():
    """Every device fetches from its own pool, while the other's fetches are on their way."""
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    devices, shape, turns = jax.devices("cuda")[:2], Shape(slots=4, blocks=9, block=16, dim=32), 20
    table, layer = np.asarray(shape.page_table()), 1
    pools = [ffi.HostPool(shape.n_pages, shape.page_bytes, device=device) for device in devices]
    for number, pool in enumerate(pools):
        for row, head, block in np.ndindex(shape.rows, shape.heads, shape.blocks):
            page = np.full(shape.page_bytes // 4, 1000 * number + 100 * row + 10 * head + block, np.float32)
            pool.write_page((int(table[row, block]) * shape.layers + layer) * shape.heads + head, page)

    @jax.jit
    def fetch(handle, cache, wanted):
        nothing = jnp.full((shape.rows, shape.heads, shape.slots), -1, jnp.int32)
        fresh_from = jnp.full(shape.rows, shape.blocks, jnp.int32)
        return ffi.fetch_blocks(
            handle, cache, wanted, nothing, nothing, jnp.int32(1), fresh_from, jnp.asarray(table), layer=layer,
            n_layers=shape.layers,
        ).cache  # fmt: skip

    def block_of(turn, number):
        return (turn + number) % shape.blocks

    got = []
    for turn in range(turns):
        for number, (device, pool) in enumerate(zip(devices, pools, strict=True)):
            with jax.default_device(device):
                wanted = jnp.full((shape.rows, shape.heads, 1), block_of(turn, number), jnp.int32)
                got.append(fetch(pool.handle, jnp.zeros(shape.cache), wanted))
    for index, cache in enumerate(got):
        turn, number = divmod(index, 2)
        assert cache.devices() == {devices[number]}
        for row, head in np.ndindex(shape.rows, shape.heads):
            held = np.asarray(cache[row, head, 0])
            assert (held == 1000 * number + 100 * row + 10 * head + block_of(turn, number)).all()
    for pool in pools:
        pool.check()
        assert pool.stats().pages_read == turns * shape.rows * shape.heads
        pool.close()


def test_o5_the_interpreter_exits_cleanly_with_a_pool_in_use():
    script = (
        "import jax, jax.numpy as jnp, numpy as np\n"
        "from nosa_jax import ffi\n"
        "pool = ffi.HostPool(8, 1024)\n"
        "load = ffi.TransferList(*(jnp.zeros(s, jnp.int32) for s in ((1, 1, 1), (1, 1, 1), (1, 1))))\n"
        "cache = jnp.zeros((1, 1, 1, 2, 8, 32), jnp.bfloat16)\n"
        "table = jnp.zeros((1, 1), jnp.int32)\n"
        "step = jax.jit(lambda c: ffi.swap_in(pool.handle, c, load, table, layer=0, n_layers=1))\n"
        "for _ in range(100):\n"
        "    cache = step(cache)\n"
        "print('end')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "end\n"


def test_j4_arrays_on_the_cpu_beside_a_gpu():
    """A pinned pool serves the CPU's handlers too; a pool made for the CPU is refused on the GPU, not misread."""
    cpu = jax.devices("cpu")[0]
    cache = SHAPE.random_cache(0)
    options = {"layer": 0, "n_layers": SHAPE.layers}
    with ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes) as pinned:
        jax.block_until_ready(
            ffi.write_pages(pinned.handle, cache, all_blocks(SHAPE, [1]), SHAPE.page_table(), **options)
        )
        with jax.default_device(cpu):
            got = ffi.swap_in(
                pinned.handle,
                jnp.zeros(SHAPE.cache, SHAPE.dtype),
                all_blocks(SHAPE, [1]),
                SHAPE.page_table(),
                **options,
            )
            assert got.devices() == {cpu}
        assert copy_of(got[:, :, 0]).tobytes() == copy_of(cache[:, :, 0]).tobytes()
        assert (pinned.stats().pages_written, pinned.stats().pages_read) == (4, 4)
        with ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes, device=cpu) as unpinned:
            assert not unpinned.pinned
            got = ffi.swap_in(unpinned.handle, jnp.array(cache), all_blocks(SHAPE, [1]), SHAPE.page_table(), **options)
            assert copy_of(got).tobytes() == copy_of(cache).tobytes()
            with pytest.raises(ffi.PoolClosedError, match="was not made for this device"):
                unpinned.check()
        pinned.check()
