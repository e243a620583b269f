"""The two memories behind the rows: the host pool with its pages, and the state that holds the slots."""

from collections.abc import Callable

import numpy as np

from nosa_jax.ffi import HostPool
from nosa_jax.infer.plan import MemoryPlan
from nosa_jax.infer.requests import Request
from nosa_jax.infer.row_steps import start_row
from nosa_jax.offload.pages import OutOfPagesError, PageAllocator
from nosa_jax.offload.state import DecodeState, init_state


class RowMemory:
    """Owns an engine's host pages and says which row has which.

    Args:
      place: puts a new state where the model is.

    Raises:
      HostMemoryError: the pool does not fit into the machine's free memory.
    """

    def __init__(self, plan: MemoryPlan, place: Callable[[DecodeState], DecodeState]) -> None:
        self.plan, self.layout, self._place = plan, plan.layout, place
        self.pool: HostPool | None = None
        if self.layout.offload:
            self.pool = HostPool(plan.page_groups * self.layout.pages_per_block, self.layout.page_bytes)
        self.allocator = PageAllocator(plan.page_groups, plan.group_bytes)

    def close(self) -> None:
        """Free the pages. Closing again does nothing."""
        if self.pool is not None:
            self.pool.close()

    def reset(self) -> None:
        """Take all pages back: whoever still steps a state made before gets an error instead of others' pages.

        Waits for the steps that run.
        """
        if self.pool is not None:
            self.pool.renew()
        self.allocator = PageAllocator(self.plan.page_groups, self.plan.group_bytes)

    def new_state(self) -> DecodeState:
        """An empty state over the pages."""
        return self._place(init_state(self.layout, None if self.pool is None else self.pool.handle))

    def check(self) -> None:
        """Raise what steps on a GPU could only record."""
        if self.pool is not None:
            self.pool.check()

    def groups_for(self, request: Request) -> int:
        """Page groups to reserve: blocks of the prompt and of all its new tokens."""
        return self.layout.config.num_blocks(request.reserved) if self.layout.offload else 0

    def fits_now(self, request: Request) -> bool:
        """Whether enough pages are free."""
        return self.groups_for(request) <= self.allocator.n_free

    def require_room(self, requests: list[Request]) -> None:
        """Refuse requests that the whole pool could not hold at the same time.

        Raises:
          OutOfPagesError: names the bytes needed and there.
        """
        needed, have, each = sum(map(self.groups_for, requests)), self.plan.page_groups, self.plan.group_bytes
        if needed > have:
            who = f"prompt {requests[0].index} needs" if len(requests) == 1 else f"{len(requests)} prompts need"
            raise OutOfPagesError(
                f"{who} {needed} blocks of host memory ({needed * each:,} bytes) for "
                f"{sum(len(r.tokens) for r in requests)} tokens and up to "
                f"{sum(r.params.max_new_tokens for r in requests)} new ones, and the host pool has {have} "
                f"({have * each:,} bytes available); shorten them, ask for fewer new tokens, or give the engine a "
                "larger host_budget"
            )

    def start(self, state: DecodeState, row: int, request: Request, *, active: bool) -> tuple[DecodeState, np.ndarray]:
        """Reserve a request's pages and make the row theirs; returns its page groups too.

        Raises:
          OutOfPagesError: too few are free.
        """
        groups = self.allocator.allocate(self.groups_for(request))
        table = np.full(self.layout.n_blocks, -1, np.int32)
        table[: len(groups)] = groups
        return start_row(state, row, table, request.reserved, active=active), groups

    def release(self, groups: np.ndarray) -> None:
        """Give pages back; they can be reserved again at once.

        Whatever is dispatched from now on runs after the steps that were dispatched before: the state is passed on
        from one to the next.
        """
        if len(groups):
            self.allocator.free(groups)
