"""Pooling and query-aware scores in JAX against the oracle, for many geometries and group sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.pallas_kernels import pool_blocks, pool_windows, pooled_scores
from tests.oracle import nosa_numpy as oracle
from tests.oracle.compare import IMPLEMENTATIONS, assert_close
from tests.oracle.nosa_numpy import Geometry

# Published; windows that do not overlap; windows longer than a block; one window per block; a third per stride.
GEOMETRIES = [Geometry(64, 32, 16), Geometry(16, 4, 4), Geometry(4, 8, 2), Geometry(6, 6, 6), Geometry(12, 8, 4)]


def rotated(geometry, seed, length, *shape):
    return np.random.default_rng(seed).normal(size=(2, length, *shape)).astype(np.float32)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_pooling_matches_oracle(geometry, extra):
    length = 5 * geometry.block + geometry.window + extra
    n_blocks = geometry.blocks(length)
    for shape in ((3, 6), (3,)):
        x = rotated(geometry, 1, length, *shape)
        windows = pool_windows(jnp.asarray(x), window=geometry.window, stride=geometry.stride)
        expected = oracle.pool_windows(oracle.f64(x), geometry)
        assert_close(windows, expected, 1e-6)
    blocks = pool_blocks(windows, n_blocks=n_blocks, windows_per_block=geometry.block // geometry.stride)
    assert_close(blocks, oracle.pool_blocks(expected, n_blocks, geometry), 1e-6)


@pytest.mark.parametrize("length", [0, 1, 31])
def test_sequences_shorter_than_a_window_have_no_window(length):
    windows = pool_windows(jnp.ones((1, length, 2, 4)), window=32, stride=16)
    assert windows.shape == (1, 2, 0, 4)
    blocks = pool_blocks(windows[..., 0], n_blocks=1, windows_per_block=4)
    np.testing.assert_array_equal(blocks, np.full((1, 2, 1), -np.inf))
    scores = pooled_scores(
        jnp.ones((1, 1, 4, 4)), windows, jnp.zeros((1, 1), int), n_blocks=1, block_size=64, window=32, stride=16
    )
    np.testing.assert_array_equal(scores, np.full((1, 1, 2, 1), -np.inf))


def test_window_means_keep_the_dtype_and_sum_in_float32():
    """A sum of 256 and 31 ones would stay at 256 in bfloat16."""
    x = jnp.ones((1, 32, 1), jnp.bfloat16).at[0, 0].set(256)
    windows = pool_windows(x, window=32, stride=16)
    assert windows.dtype == jnp.bfloat16
    assert windows.item() == jnp.asarray((256 + 31) / 32, jnp.bfloat16).item()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("group", "head_dim", "geometry"), [(1, 2, GEOMETRIES[1]), (3, 10, GEOMETRIES[2]), (8, 6, GEOMETRIES[3]),
                                        (16, 16, GEOMETRIES[4])], ids=str
)  # fmt: skip
def test_scores_match_oracle(group, head_dim, geometry, implementation):
    """Any group size and even head dim; queries at every position, before the first complete window too."""
    length = 4 * geometry.block + geometry.window + 1
    q = 2 * rotated(geometry, 2, length, 2 * group, head_dim)
    pooled_k = oracle.pool_windows(oracle.f64(rotated(geometry, 3, length, 2, head_dim)), geometry)
    positions = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    scores = pooled_scores(
        jnp.asarray(q), jnp.asarray(pooled_k, jnp.float32), jnp.asarray(positions),
        n_blocks=geometry.blocks(length), block_size=geometry.block, window=geometry.window, stride=geometry.stride,
        implementation=implementation,
    )  # fmt: skip
    assert scores.dtype == jnp.float32
    assert_close(scores, oracle.pooled_scores(oracle.f64(q), pooled_k, positions, scores.shape[-1], geometry), 3e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scores_of_a_few_queries_equal_those_of_all(implementation):
    """A query's scores depend on its position alone, not on the other queries or on keys after it."""
    geometry, length = GEOMETRIES[4], 300
    kwargs = dict(
        n_blocks=geometry.blocks(length), block_size=geometry.block, window=geometry.window, stride=geometry.stride,
        implementation=implementation,
    )  # fmt: skip
    score = jax.jit(lambda *x: pooled_scores(*x, **kwargs))
    q = jnp.asarray(rotated(geometry, 4, length, 4, 8))
    windows = pool_windows(
        jnp.asarray(rotated(geometry, 5, length, 2, 8)), window=geometry.window, stride=geometry.stride
    )
    positions = jnp.tile(jnp.arange(length), (2, 1))
    everything = score(q, windows, positions)
    some = np.array([0, 7, 8, 100, 299])
    later_nan = windows.at[:, :, geometry.windows(101) :].set(jnp.nan)
    few = score(q[:, some], windows, positions[:, some])
    np.testing.assert_allclose(few, everything[:, some], rtol=1e-6)
    np.testing.assert_array_equal(score(q[:, some[:4]], later_nan, positions[:, some[:4]]), few[:, :4])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_s1_nan_key_spoils_only_blocks_that_see_it(implementation):
    geometry = Geometry(4, 4, 2)
    k = rotated(geometry, 6, 40, 2, 4)
    k[0, 21, 1] = np.nan
    q, positions = rotated(geometry, 7, 40, 4, 4), np.tile(np.arange(40), (2, 1))
    windows = oracle.pool_windows(oracle.f64(k), geometry)
    scores = pooled_scores(
        jnp.asarray(q), jnp.asarray(windows, jnp.float32), jnp.asarray(positions),
        n_blocks=10, block_size=4, window=4, stride=2, implementation=implementation,
    )  # fmt: skip
    expected = oracle.pooled_scores(oracle.f64(q), windows, positions, 10, geometry)
    np.testing.assert_array_equal(np.isnan(scores), np.isnan(expected))
    assert not np.isnan(scores[:, :21]).any()
    assert_close(np.nan_to_num(scores, neginf=-1), np.nan_to_num(expected, neginf=-1), 3e-6)
