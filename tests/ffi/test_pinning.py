"""When a pool for a GPU is refused for the limit on locked memory; CUDA's answer is made up."""

import resource

import pytest

from nosa_jax import ffi
from nosa_jax.ffi import _cpu, pinning, pool
from nosa_jax.ffi.pinning import HUGE_PAGE, MOST_ON_TRIAL, bytes_on_trial

GIB = 2**30
LIMIT = 8 * 2**20  # of many Linux systems


@pytest.mark.parametrize(("nbytes", "limit", "available", "trial"), [
    (GIB, None, 2 * GIB, None),  # no limit
    (LIMIT, LIMIT, 2 * GIB, None),  # not above it
    (LIMIT + 1, LIMIT, 2 * GIB, LIMIT + 1),  # no more than the pool itself
    (GIB, LIMIT, 2 * GIB, LIMIT + HUGE_PAGE),
    (GIB, LIMIT, GIB, LIMIT + HUGE_PAGE),
    (GIB, LIMIT, GIB - 1, None),  # refused anyway, for another reason
    (GIB, 0, 2 * GIB, HUGE_PAGE),
    (GIB, MOST_ON_TRIAL - HUGE_PAGE, 2 * GIB, MOST_ON_TRIAL),
    (GIB, MOST_ON_TRIAL - HUGE_PAGE + 1, 2 * GIB, None),  # the trial itself would be large
])  # fmt: skip
def test_a_little_more_than_the_limit_is_pinned_on_trial(nbytes, limit, available, trial):
    assert bytes_on_trial(nbytes, limit, available) == trial


def test_a_pool_is_refused_before_it_is_mapped_where_the_trial_fails(monkeypatch):
    """With the value, the limit, CUDA's words and the way out."""
    trials = []

    def refuse(gpu, nbytes):
        trials.append((gpu, nbytes))
        return "cudaErrorMemoryAllocation: out of memory"

    monkeypatch.setattr(pool, "_gpu_number", lambda device: 3)
    monkeypatch.setattr(pinning, "_locked_memory_limit", lambda: LIMIT)
    monkeypatch.setattr(pinning, "_why_not_pinned", refuse)
    monkeypatch.setattr(_cpu, "HostPool", None)  # mapping would end in another error
    says = rf"{GIB} bytes .*\(ulimit -l\) is {LIMIT} bytes, .*cudaErrorMemoryAllocation.*`ulimit -l unlimited`"
    with pytest.raises(ffi.HostMemoryError, match=says):
        ffi.HostPool(1024, 2**20, available_bytes=2 * GIB)
    assert trials == [(3, LIMIT + HUGE_PAGE)]


@pytest.mark.parametrize(("limit", "trials"), [(LIMIT, [LIMIT + HUGE_PAGE]), (GIB - 1, []), (GIB, []), (None, [])])
def test_a_pool_is_tried_only_where_a_small_trial_tells_something(monkeypatch, limit, trials):
    """And made where the trial succeeds: some drivers ignore the limit."""
    made = []
    monkeypatch.setattr(pinning, "_locked_memory_limit", lambda: limit)
    monkeypatch.setattr(pinning, "_why_not_pinned", lambda gpu, nbytes: made.append(nbytes))
    pinning.require_pinnable(GIB, 0, 2 * GIB)
    assert made == trials


def test_the_limit_is_the_soft_one(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 2**30))
    assert pinning._locked_memory_limit() == 65536
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert pinning._locked_memory_limit() is None
