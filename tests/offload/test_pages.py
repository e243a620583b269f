"""The page allocator as a state machine against plain sets."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nosa_jax.offload import OutOfPagesError, PageAllocator


class Allocation(RuleBasedStateMachine):
    """Groups are handed out once, come back, and a request that fails changes nothing."""

    @initialize(n=st.integers(0, 12))
    def start(self, n):
        self.n, self.allocator, self.held = n, PageAllocator(n, 100), []

    @rule(count=st.integers(0, 14))
    def allocate(self, count):
        free = self.n - sum(len(h) for h in self.held)
        if count > free:
            message = rf"needs {count} blocks.*\({count * 100:,} bytes\).*{free} are free \({free * 100:,} bytes"
            with pytest.raises(OutOfPagesError, match=message):
                self.allocator.allocate(count)
            return
        groups = self.allocator.allocate(count)
        assert groups.dtype == np.int32
        assert groups.shape == (count,)
        self.held.append(groups)

    @rule(data=st.data())
    def free(self, data):
        if self.held:
            self.allocator.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(data=st.data())
    def free_part(self, data):
        if self.held:
            groups = self.held.pop()
            cut = data.draw(st.integers(0, len(groups)))
            self.allocator.free(groups[:cut])
            self.held.append(groups[cut:])

    @rule(wrong=st.integers(-2, 14), twice=st.booleans())
    def free_wrongly(self, wrong, twice):
        """A group that is not out, beside ones that are; or one that is out, twice."""
        out = [int(g) for groups in self.held for g in groups]
        bad = [*out, out[0]] if twice and out else [*out, wrong]
        if not (twice and out) and wrong in out:
            return
        with pytest.raises(ValueError, match=str(bad[-1])):
            self.allocator.free(np.array(bad, np.int32))

    @invariant()
    def every_group_is_in_one_place(self):
        if not hasattr(self, "held"):
            return
        out = [int(g) for groups in self.held for g in groups]
        assert len(out) == len(set(out))
        assert set(out) <= set(range(self.n))
        assert self.allocator.n_free == self.n - len(out)


TestAllocation = Allocation.TestCase


def test_freed_groups_are_the_next_ones_out():
    """Recently used pages are warm in the host's caches."""
    allocator = PageAllocator(8, 1)
    first, _ = allocator.allocate(3), allocator.allocate(2)
    allocator.free(first)
    np.testing.assert_array_equal(allocator.allocate(3), first)
