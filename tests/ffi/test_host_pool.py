"""The contract of the host pool by itself."""

import gc
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from nosa_jax import ffi


def test_pages_keep_what_was_written_and_only_that_page_changes(make_pool):
    pool = make_pool(5, 48)
    assert (pool.n_pages, pool.page_bytes, pool.nbytes) == (5, 48, 240)
    data = np.arange(48, dtype=np.uint8)
    pool.write_page(3, data)
    assert pool.read_page(3).tolist() == data.tolist()
    for other in (0, 1, 2, 4):
        assert not pool.read_page(other).any(), "memory starts as zeros and other pages stay"
    pool.read_page(3)[:] = 0
    assert pool.read_page(3)[7] == 7, "read_page returns a copy"


def test_wrong_pages_and_sizes_are_named(make_pool):
    pool = make_pool(5, 48)
    for index in (-1, 5, 2**40):
        with pytest.raises(IndexError, match=f"page {index} is outside the host pool's 5 pages"):
            pool.read_page(index)
        with pytest.raises(IndexError, match=str(index)):
            pool.write_page(index, bytes(48))
    with pytest.raises(ValueError, match="48 bytes, got 47"):
        pool.write_page(0, bytes(47))
    for sizes in ((0, 8), (8, 0), (-1, 8), (8, -3), (2**63, 1)):
        with pytest.raises(ValueError, match="must be at least 1"):
            ffi.HostPool(*sizes)


def test_close_is_idempotent_and_final(make_pool):
    pool = make_pool(2, 8)
    handle = pool.handle.tolist()
    assert not pool.closed
    pool.close()
    pool.close()
    assert pool.closed
    assert pool.handle.tolist() == handle, "stays readable, so that a late user gets an error and not another pool"
    assert pool.stats().pages_read == 0
    for use in (lambda: pool.read_page(0), lambda: pool.write_page(0, bytes(8))):
        with pytest.raises(ffi.PoolClosedError, match="closed"):
            use()
    with ffi.HostPool(1, 1) as inner:
        assert not inner.closed
    assert inner.closed
    assert "closed" in repr(inner)


def test_handles_are_never_reused(make_pool):
    seen = set()
    for _ in range(50):
        pool = make_pool(1, 8)
        assert pool.handle.dtype == np.int32
        seen.add(tuple(pool.handle.tolist()))
        pool.close()
    assert len(seen) == 50
    assert len({slot for slot, _ in seen}) < 50, "places in the registry are"


def test_renewed_handles_are_new_and_the_pages_stay(make_pool):
    pool, other = make_pool(3, 16), make_pool(3, 16)
    pool.write_page(2, bytes(range(16)))
    seen = {tuple(other.handle.tolist())}
    for _ in range(5):
        seen.add(tuple(pool.handle.tolist()))
        pool.renew()
        assert tuple(pool.handle.tolist()) not in seen
        assert pool.read_page(2).tolist() == list(range(16))
    pool.close()
    with pytest.raises(ffi.PoolClosedError, match="closed"):
        pool.renew()
    seen.add(tuple(pool.handle.tolist()))
    assert tuple(make_pool(3, 16).handle.tolist()) not in seen, "the place is used again, with a later generation"


def test_the_set_up_is_timed_by_its_parts(make_pool):
    pool = make_pool(64, 2**20)
    assert pool.touch_seconds > 0
    assert pool.pin_seconds >= 0
    assert pool.setup_seconds == pool.touch_seconds + pool.pin_seconds
    assert f"{pool.touch_seconds:.3f} s to touch, {pool.pin_seconds:.3f} s to pin" in repr(pool)


def test_the_registry_says_when_it_is_full_and_recovers():
    pools = []
    try:
        with pytest.raises(RuntimeError, match="1024 pools are open already"):
            pools.extend(ffi.HostPool(1, 8) for _ in range(1025))
    finally:
        for pool in pools:
            pool.close()
        gc.collect()
    ffi.HostPool(1, 8).close()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_o5_memory_returns_to_the_baseline(device, how):
    process, mib = psutil.Process(), 2**20
    ffi.HostPool(1, 64 * mib).close()
    before = process.memory_info().rss
    for _ in range(50):
        pool = ffi.HostPool(64, mib)
        assert process.memory_info().rss - before > 60 * mib, "pages are there from the start"
        if how == "close":
            pool.close()
        del pool
    gc.collect()
    assert process.memory_info().rss - before < 16 * mib


def test_o4_ten_terabytes_are_refused_before_anything_is_allocated(device, make_pool):
    before = psutil.Process().memory_info().rss
    with pytest.raises(ffi.HostMemoryError, match=r"need 9313\.23 GiB \(10000000000000 bytes\).*are available") as info:
        make_pool(10**7, 10**6)
    assert isinstance(info.value, MemoryError)
    with pytest.raises(ffi.HostMemoryError, match="more bytes than an address can name"):
        make_pool(2**40, 2**40)
    assert psutil.Process().memory_info().rss - before < 2**24
    product = jax.jit(jnp.dot)(jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert float(product[0, 0]) == 64.0
    pool = make_pool(4, 64)
    pool.write_page(0, bytes(range(64)))
    assert pool.read_page(0)[63] == 63


def test_o4_the_limit_is_95_percent_of_what_is_available():
    page = 2**16
    with pytest.raises(ffi.HostMemoryError, match=r"6291456 bytes.*6619136 bytes\) are available"):
        ffi.HostPool(96, page, available_bytes=101 * page)
    with ffi.HostPool(95, page, available_bytes=101 * page) as pool:
        assert pool.nbytes == 95 * page


def test_o4_a_limit_on_address_space_is_a_memory_error():
    script = (
        "import resource\n"
        "from nosa_jax import ffi\n"
        "import psutil\n"
        "used = psutil.Process().memory_info().vms\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))\n"
        "try:\n"
        "    ffi.HostPool(2**10, 2**20, available_bytes=2**40)\n"
        "except ffi.HostMemoryError as error:\n"
        "    print(error)\n"
        "ffi.HostPool(4, 2**20)\n"
    )
    one_thread = os.environ | {"NPROC": "1"}  # the stacks of XLA's threads count too
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=one_thread)
    assert run.returncode == 0, run.stderr
    assert "1.00 GiB (1073741824 bytes)" in run.stdout
    assert "ulimit -v" in run.stdout


def test_threads_share_the_registry_and_their_pools_do_not_mix():
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(40):
                mark = bytes([number, turn] * 32)
                with ffi.HostPool(3, 64) as pool:
                    pool.write_page(1, mark)
                    assert pool.read_page(1).tobytes() == mark
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_j4_importing_starts_no_backend():
    """A platform that does not exist makes the start of any backend fail; the import must not notice."""
    script = "import nosa_jax.ffi as f; print(f.status())"
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "CPU handlers built" in run.stdout
