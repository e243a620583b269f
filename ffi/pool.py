"""`HostPool`: pages of host memory that handlers inside a compiled step read and write."""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from jaxtyping import Int32, UInt8

from nosa_jax.ffi import _cpu

HostMemoryError = _cpu.HostMemoryError
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
    until it is done.

    Args:
        n_pages: pages, at least 1.
        page_bytes: bytes of one page, at least 1.
        available_bytes: host bytes to plan with, where the system's own figure (free memory, limits of control
            groups) is known to be wrong.

    Raises:
        HostMemoryError: (a MemoryError) more than 95 % of the available memory would be used. Nothing was allocated.
        ValueError: a size below 1.
        RuntimeError: 1024 pools are open already.
    """

    def __init__(self, n_pages: int, page_bytes: int, *, available_bytes: int | None = None) -> None:
        for name, value in (("n_pages", n_pages), ("page_bytes", page_bytes)):
            if not 1 <= value < 2**63:
                raise ValueError(f"HostPool: {name}={value} must be at least 1 and below 2**63")
        available = _cpu.available_bytes() if available_bytes is None else available_bytes
        self._native = _cpu.HostPool(n_pages, page_bytes, available)
        self.n_pages = n_pages
        self.page_bytes = page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.n_pages * self.page_bytes

    @property
    def handle(self) -> Int32[np.ndarray, "2"]:
        """What handlers take to find this pool. Stays readable after `close`, and is then refused by handlers."""
        return np.array(self._native.handle, np.int32)

    @property
    def closed(self) -> bool:
        """Whether the pages are gone."""
        return self._native.closed

    def close(self) -> None:
        """Give the memory back. Closing again does nothing; whatever uses the pool afterwards gets an error."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"HostPool({self.n_pages} pages of {self.page_bytes} bytes, {state}, handle {self._native.handle})"

    def stats(self) -> PoolStats:
        """Counters since the pool was made; readable after `close` too."""
        counts = self._native.stats()
        return PoolStats(
            bytes_read=counts["pages_read"] * self.page_bytes,
            bytes_written=counts["pages_written"] * self.page_bytes,
            **counts,
        )

    def check(self) -> None:
        """Raise what a handler could only record.

        Handlers on the CPU raise by themselves, so there this finds nothing. On a GPU nothing can be raised from
        within a step: call this after a step's results were read.

        Raises:
            PoolClosedError: the pool was used by a handler after it was closed.
            RuntimeError: a block, slot, count or page number out of range; the message holds the numbers.
        """

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
