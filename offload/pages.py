"""Which host pages belong to which row."""

import numpy as np


class OutOfPagesError(MemoryError):
    """The host pool has too few free pages for a request."""


class PageAllocator:
    """Hands out page groups: one group holds one block of a row, for every layer and KV head.

    Args:
      n_groups: groups in the pool.
      group_bytes: bytes of one group, for messages.
    """

    def __init__(self, n_groups: int, group_bytes: int) -> None:
        self.n_groups = n_groups
        self.group_bytes = group_bytes
        self._free = list(range(n_groups - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def n_free(self) -> int:
        """Groups that can be had at once."""
        return len(self._free)

    def allocate(self, count: int) -> np.ndarray:
        """Reserve `count` groups; the ones freed last come first.

        Returns: int32 group numbers [count].

        Raises:
          OutOfPagesError: fewer are free; names the bytes needed and available. Nothing is reserved then.
        """
        if count > len(self._free):
            raise OutOfPagesError(
                f"the request needs {count} blocks of host memory ({count * self.group_bytes:,} bytes) and "
                f"{len(self._free)} are free ({len(self._free) * self.group_bytes:,} bytes of "
                f"{self.n_groups * self.group_bytes:,}); shorten the prompt, ask for fewer new tokens, "
                "or give the engine a larger host_budget"
            )
        groups = [self._free.pop() for _ in range(count)]
        self._used.update(groups)
        return np.asarray(groups, np.int32)

    def free(self, groups: np.ndarray) -> None:
        """Give groups back.

        Raises:
          ValueError: a group is not allocated (freed twice, or never handed out). Nothing is freed then.
        """
        numbers = [int(g) for g in groups]
        if len(set(numbers)) != len(numbers) or not self._used.issuperset(numbers):
            wrong = sorted(g for g in set(numbers) if g not in self._used or numbers.count(g) > 1)
            raise ValueError(f"page groups {wrong} are not allocated")
        self._used.difference_update(numbers)
        self._free.extend(reversed(numbers))
