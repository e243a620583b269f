"""`HostPool`: pages of host memory that handlers inside a compiled step read and write."""

import time
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import jax
import numpy as np
from jaxtyping import Int32, UInt8

from nosa_jax.ffi import _cpu
from nosa_jax.ffi.pinning import pin, require_pinnable
from nosa_jax.ffi.registration import has_cuda

if TYPE_CHECKING:
    from nosa_jax.ffi import _cuda

PoolClosedError = _cpu.PoolClosedError


@dataclass(frozen=True)
class PoolStats:
    """What the handlers moved since the pool was made; calls count executions, also of empty lists."""

    pages_read: int  # host -> device
    pages_written: int  # device -> host
    bytes_read: int
    bytes_written: int
    read_calls: int
    write_calls: int


class HostPool:
    """One slab of host memory, cut into pages of equal size, outside of JAX's own memory.

    A page holds one block of one KV head (K, then V). Compiled code finds the pool through `handle`, which it takes
    as data: one compiled step serves every pool, and a closed pool is noticed instead of being read. The slab is
    freed by `close`, at the end of a `with` block, or with the last reference; a handler that is running keeps it
    until it is done. Handlers on the CPU can use every pool; those of a GPU need one that was made for a GPU, which
    is pinned; it is valid on that GPU (and on the CPU) and refused on another.

    Attributes:
        n_pages, page_bytes: its size.
        touch_seconds: what mapping the slab and touching each of its pages took.
        pin_seconds: what registering it with CUDA took; about 0 for a pool that is not for a GPU.

    Args:
        n_pages: pages, at least 1.
        page_bytes: bytes of one page, at least 1.
        device: where the handlers run that will use the pool; JAX's default device if not given.
        available_bytes: host bytes to plan with, where the system's own figure (free memory, limits of control
            groups) is known to be wrong.

    Raises:
        HostMemoryError: (a MemoryError) more than 95 % of the available memory would be used, or a pool for a GPU is
            above a limit on locked memory that was found to apply (nothing was allocated); or the system refused to
            map or to pin it (everything was given back). It names the bytes and the limit.
        ValueError: a size below 1.
        RuntimeError: 1024 pools are open already.
    """

    def __init__(
        self,
        n_pages: int,
        page_bytes: int,
        *,
        device: jax.Device | None = None,
        available_bytes: int | None = None,
    ) -> None:
        for name, value in (("n_pages", n_pages), ("page_bytes", page_bytes)):
            if not 1 <= value < 2**63:
                raise ValueError(f"HostPool: {name}={value} must be at least 1 and below 2**63")
        self.n_pages = n_pages
        self.page_bytes = page_bytes
        gpu = _gpu_number(device)  # first: it may start JAX's backend, which is not the pool's set-up
        start = time.perf_counter()
        available = _cpu.available_bytes() if available_bytes is None else available_bytes
        if gpu is not None:
            require_pinnable(self.nbytes, gpu, available)
        self._native = _cpu.HostPool(n_pages, page_bytes, available)
        touched = time.perf_counter()
        self._pinned = None if gpu is None else pin(self._native, n_pages, page_bytes, gpu)
        # Unpins before the slab goes, also when the interpreter exits with the pool open.
        self._finalizer = weakref.finalize(self, _close, self._native, self._pinned)
        self._first_generation = self._native.handle[1]
        self.touch_seconds = touched - start
        self.pin_seconds = time.perf_counter() - touched

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.n_pages * self.page_bytes

    @property
    def setup_seconds(self) -> float:
        """What making the pool took: touching and pinning."""
        return self.touch_seconds + self.pin_seconds

    @property
    def pinned(self) -> bool:
        """Whether the pool was made for a GPU."""
        return self._pinned is not None

    @property
    def handle(self) -> Int32[np.ndarray, "2"]:
        """What handlers take to find this pool, until `renew`.

        Stays readable after `close`, and is then refused by handlers.
        """
        return np.array(self._native.handle, np.int32)

    @property
    def closed(self) -> bool:
        """Whether the pages are gone."""
        return self._native.closed

    def close(self) -> None:
        """Give the memory back. Closing again does nothing; whatever uses the pool afterwards gets an error.

        A pinned pool waits for its devices to finish what they were given before.
        """
        self._finalizer()

    def renew(self) -> None:
        """Give the pool another `handle`; whatever holds an earlier one is refused by handlers from now on.

        Pages keep their contents, nothing is mapped or pinned again. Waits until what was started with an earlier
        handle is done, so pages can be given to others at once.

        Raises:
            PoolClosedError: the pool is closed.
        """
        self._native.renew()
        if self._pinned is not None:
            self._pinned.renew(self._native.handle[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        kind = "pinned" if self.pinned else "not pinned"
        rate = self.nbytes / self.setup_seconds / 1e9
        return (
            f"HostPool({self.n_pages} pages of {self.page_bytes} bytes, {state}, {kind}, "
            f"set up in {self.setup_seconds:.3f} s ({rate:.1f} GB/s; {self.touch_seconds:.3f} s to touch, "
            f"{self.pin_seconds:.3f} s to pin), handle {self._native.handle})"
        )

    def stats(self) -> PoolStats:
        """Counters since the pool was made; readable after `close` too.

        On a GPU they are those of the steps that are done: read a step's result first.
        """
        counts = self._native.stats()
        if self._pinned is not None:
            counts = {name: count + counts[name] for name, count in self._pinned.counts().items()}
        return PoolStats(
            bytes_read=counts["pages_read"] * self.page_bytes,
            bytes_written=counts["pages_written"] * self.page_bytes,
            **counts,
        )

    def check(self) -> None:
        """Raise what a handler could only record.

        Handlers on the CPU raise by themselves, so there this finds nothing. On a GPU nothing can be raised from
        within a step: call this after a step's results were read. What was found is raised once, whichever of the
        pool's handles it came with.

        Raises:
            PoolClosedError: a handler on a GPU was given the handle of a closed pool, one from before `renew`, that of
                a pool that was not made for this GPU, or one that was never given out.
            RuntimeError: a block, slot, count or page number out of range; the message holds the numbers.
        """
        if not has_cuda():
            return
        from nosa_jax.ffi import _cuda

        slot, generation = self._native.handle
        fault = _cuda.take_fault(slot, self._first_generation, generation)
        if fault is not None:
            was_closed, text = fault
            raise PoolClosedError(text) if was_closed else RuntimeError(text)

    def read_page(self, index: int) -> UInt8[np.ndarray, " bytes"]:
        """A copy of one page, for tests and debugging.

        Raises:
            IndexError: no such page.
            PoolClosedError: the pool is closed.
        """
        return np.frombuffer(self._native.read_page(index), np.uint8).copy()

    def write_page(self, index: int, data: bytes | np.ndarray) -> None:
        """Fill one page, for tests and debugging.

        Raises:
            ValueError: `data` is not of `page_bytes` bytes.
            IndexError: no such page.
            PoolClosedError: the pool is closed.
        """
        self._native.write_page(index, data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes())


def _gpu_number(device: jax.Device | None) -> int | None:
    """CUDA's number of the GPU that a pool is for, None if it is for the CPU."""
    if not has_cuda():
        return None
    if device is None:
        default = jax.config.jax_default_device
        device = default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]
    return device.local_hardware_id if device.platform in ("gpu", "cuda") else None


def _close(native: "_cpu.HostPool", pinned: "_cuda.PinnedPool | None") -> None:
    if pinned is not None:
        pinned.release()
    native.close()
