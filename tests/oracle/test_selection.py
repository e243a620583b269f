"""Block selection in JAX against the oracle: CASES of ties, NaN, odd numbers of blocks and small sequences."""

from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from nosa_jax.pallas_kernels import pool_windows, pooled_scores, select_blocks
from tests.oracle import nosa_numpy as oracle
from tests.oracle.compare import IMPLEMENTATIONS
from tests.oracle.nosa_numpy import Budget, Geometry

SMALL = Budget(sink=1, local=2, query=3, evict=4)


@partial(jax.jit, static_argnames=("block_size", "budget", "implementation"))
def select(score_q, score_e, positions, block_size, budget, implementation):
    return select_blocks(
        score_q, score_e, positions, block_size=block_size, implementation=implementation, **budget._asdict()
    )


def scores_of_kind(kind: str, rng: np.random.Generator, shape) -> np.ndarray:
    """Score arrays that selections of this kind get wrong."""
    x = rng.normal(size=shape).astype(np.float32)
    if kind == "equal":
        x = np.zeros(shape, np.float32)
    elif kind == "three values":
        x = rng.choice(np.array([0.125, 1.0, 1.0078125], np.float32), shape)
    elif kind == "signed zeros":
        x = rng.choice(np.array([0.0, -0.0], np.float32), shape)
    elif kind == "special":
        x = rng.choice(np.array([np.nan, np.inf, -np.inf, 0, 1, -1, 3e38, -3e38], np.float32), shape)
    elif kind == "all NaN":
        x = np.full(shape, np.nan, np.float32)
        x[..., ::2] = -x[..., ::2]  # the other sign bit
    elif kind == "one NaN":
        x[..., shape[-1] // 2] = np.nan
    elif kind == "huge":
        x *= 5e37
    return x


# Denormals are left out: compilers may flush them to zero, on some devices only, which makes them ties.
KINDS = ["normal", "equal", "three values", "signed zeros", "special", "all NaN", "one NaN", "huge"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@hypothesis.given(st.sampled_from(KINDS), st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=40)
def test_selection_laws(implementation, kind_q, kind_e, seed):
    """Equal to the oracle; no duplicates, ascending, current and forced in, nothing from the future, budget filled."""
    rng = np.random.default_rng(seed)
    shape, block_size = (1, 48, 2, 16), 3
    score_q, score_e = scores_of_kind(kind_q, rng, shape), scores_of_kind(kind_e, rng, shape)
    positions = np.arange(48)[None]
    ids = np.asarray(select(score_q, score_e, positions, block_size, SMALL, implementation))
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, oracle.select_blocks(score_q, score_e, positions, block_size, SMALL))
    for t, head in np.ndindex(48, 2):
        row = ids[0, t, head]
        count = (row >= 0).sum()
        current = t // block_size
        assert (row[count:] == -1).all()
        assert (np.diff(row[:count]) > 0).all()
        assert {0, max(0, current - 1), current} <= {*row.tolist()}
        assert row[:count].max() == current
        assert count == min(current + 1, SMALL.total)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("n_blocks", [1023, 1024, 1025])
@pytest.mark.parametrize(
    "budget", [Budget(1, 2, 2, 3), Budget(1, 4, 3, 8), Budget(1, 5, 3, 8), Budget(1, 17, 15, 31)], ids=lambda b: b.total
)
def test_s1_ties_over_odd_numbers_of_blocks(implementation, n_blocks, budget):
    rng = np.random.default_rng(n_blocks)
    positions = np.array([[n_blocks * 2 - 1, n_blocks * 2 - 3, 1200, 40]])
    for kind in ("equal", "three values", "one NaN"):
        score_q, score_e = (scores_of_kind(kind, rng, (1, 4, 1, n_blocks)) for _ in range(2))
        expected = oracle.select_blocks(score_q, score_e, positions, 2, budget)
        for _ in range(2):
            np.testing.assert_array_equal(select(score_q, score_e, positions, 2, budget, implementation), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_s1_constant_keys_and_zero_queries_take_the_lowest_blocks(implementation):
    geometry = Geometry(8, 8, 4)
    k, q = jnp.ones((1, 200, 2, 4)), jnp.zeros((1, 200, 6, 4))
    positions = jnp.arange(200)[None]
    scores = pooled_scores(
        q, pool_windows(k, window=8, stride=4), positions,
        n_blocks=25, block_size=8, window=8, stride=4, implementation=implementation,
    )  # fmt: skip
    ids = select(scores, jnp.zeros_like(scores), positions, geometry.block, SMALL, implementation)
    np.testing.assert_array_equal(ids[0, -1, 0], [0, 1, 2, 3, 4, 5, 6, 7, 23, 24])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_b2_number_of_blocks_around_the_budget(implementation):
    """No block at all, one, the forced count, C-1, C, C+1."""
    rng = np.random.default_rng(0)
    for n_blocks in (0, 1, SMALL.sink + SMALL.local, SMALL.total - 1, SMALL.total, SMALL.total + 1):
        score_q, score_e = rng.normal(size=(2, 1, min(n_blocks, 1), 2, n_blocks)).astype(np.float32)
        positions = np.full((1, min(n_blocks, 1)), n_blocks * 4 - 1)
        ids = np.asarray(select(score_q, score_e, positions, 4, SMALL, implementation))
        np.testing.assert_array_equal(ids, oracle.select_blocks(score_q, score_e, positions, 4, SMALL))
        if 0 < n_blocks <= SMALL.total:
            np.testing.assert_array_equal(ids[0, 0, 0, :n_blocks], np.arange(n_blocks))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "budget", [Budget(0, 1, 0, 0), Budget(0, 1, 2, 0), Budget(3, 2, 0, 4), Budget(9, 9, 1, 1)], ids=str
)
def test_budgets_with_empty_parts(implementation, budget):
    score_q, score_e = np.random.default_rng(1).normal(size=(2, 2, 24, 1, 12)).astype(np.float32)
    positions = np.tile(np.arange(24), (2, 1))
    expected = oracle.select_blocks(score_q, score_e, positions, 2, budget)
    np.testing.assert_array_equal(select(score_q, score_e, positions, 2, budget, implementation), expected)


def test_one_row_of_static_scores_serves_all_queries():
    score_q = np.random.default_rng(2).normal(size=(2, 24, 2, 12)).astype(np.float32)
    score_e = np.random.default_rng(3).normal(size=(2, 1, 2, 12)).astype(np.float32)
    positions = np.tile(np.arange(24), (2, 1))
    ids = select(score_q, score_e, positions, 2, SMALL, None)
    np.testing.assert_array_equal(ids, select(score_q, np.repeat(score_e, 24, 1), positions, 2, SMALL, None))
