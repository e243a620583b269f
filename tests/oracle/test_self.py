"""The oracle judged by itself: hand-made values, finite differences, dense attention by another route."""

import numpy as np
import pytest

from tests.oracle import gradients
from tests.oracle import nosa_numpy as oracle
from tests.oracle.nosa_numpy import Budget, Geometry

PUBLISHED = Geometry(64, 32, 16)


def test_published_geometry_pools_five_windows_per_block():
    assert PUBLISHED.windows_of(0, 100) == [0, 1, 2, 3]
    assert PUBLISHED.windows_of(5, 100) == [19, 20, 21, 22, 23]
    assert PUBLISHED.windows_of(5, 21) == [19, 20]
    assert PUBLISHED.windows_of(5, 19) == []
    assert [PUBLISHED.windows(n) for n in (0, 31, 32, 47, 48, 4133)] == [0, 0, 1, 1, 2, 257]
    assert PUBLISHED.blocks(4133) == 65
    assert PUBLISHED.last_token(4 * 5 + 3) == 64 * 5 + 79


def test_window_means_and_block_maxima_by_hand():
    geometry = Geometry(block=4, window=4, stride=2)
    x = np.arange(9.0).reshape(1, 9, 1)
    windows = oracle.pool_windows(x, geometry)
    np.testing.assert_array_equal(windows, [[[1.5, 3.5, 5.5]]])
    np.testing.assert_array_equal(oracle.pool_blocks(windows, 4, geometry), [[[3.5, 5.5, -np.inf, -np.inf]]])


def test_rope_rotates_pairs_and_keeps_relative_angles():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 1, 8))

    def product(i, j):
        at = [oracle.rope(x, np.array([[p]]), 100.0, 1 + np.arange(4)) for x, p in ((q, i), (k, j))]
        return (at[0] * at[1]).sum()

    np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-12)
    np.testing.assert_array_equal(oracle.rope(q, np.array([[0]]), 100.0), q)
    unit = np.array([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    turned = oracle.rope(unit, np.array([[3]]), 1e4, [2.0, 1.0], attention_factor=1.5).ravel()
    np.testing.assert_allclose(turned, [1.5 * np.cos(1.5), 0, 1.5 * np.sin(1.5), 0], rtol=1e-12)


def test_softplus_and_its_derivative_at_extremes():
    x = np.array([-1e4, -88, 0, 20, 88, 89, 1e4])
    assert np.isfinite(oracle.softplus(x)).all()
    np.testing.assert_allclose(oracle.softplus(x)[2:4], [np.log(2), np.log1p(np.exp(20.0))])
    np.testing.assert_array_equal(oracle.sigmoid(x)[[0, 2, 6]], [0, 0.5, 1])


def test_selection_by_hand():
    budget = Budget(sink=1, local=2, query=1, evict=2)
    nan = float("nan")
    score_q = np.array([0, 1, 5, 5, 2, 0, 0, 0.0])
    score_e = np.array([0, 3, 9, nan, 3, 3, 0, 0.0])
    # forced 0, 6, 7; block 2 ties with 3 and has the lower index; then 1 and 4 tie with 5.
    assert oracle.select(score_q, score_e, 7, 1, budget) == [0, 1, 2, 4, 6, 7]
    assert oracle.select(score_q, score_e, 4, 1, budget) == [0, 1, 2, 3, 4]
    assert oracle.rank(np.array([nan, -np.inf, 0.0, -0.0, np.inf]), [0, 1, 2, 3, 4]) == [4, 2, 3, 1, 0]


def test_all_blocks_selected_equals_dense_attention():
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(2, 7, 4, 6)), rng.normal(size=(2, 7, 2, 6)), rng.normal(size=(2, 7, 2, 6))
    cis = rng.normal(size=(2, 7, 2))
    positions = np.tile(np.arange(7), (2, 1))
    out = oracle.sparse_attention(q, k, v, cis, oracle.every_block(positions, 2, 3, 3), positions, 3)
    k, v, cis = (np.repeat(x, 2, axis=2) for x in (k, v, cis))
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(6) + cis.transpose(0, 2, 1)[:, :, None]
    logits = np.where(np.tri(7, dtype=bool), logits, -np.inf)
    np.testing.assert_allclose(out, np.einsum("bnts,bsnh->btnh", oracle.softmax(logits), v), rtol=1e-12)


def numeric_gradient(function, x, step=1e-6):
    """Central differences of a scalar function of x."""
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[i] += sign * step
            ends.append(function(moved))
        out[i] = (ends[0] - ends[1]) / (2 * step)
    return out


@pytest.mark.parametrize("with_bias", [True, False])
def test_attention_gradients_match_finite_differences(with_bias):
    rng = np.random.default_rng(2)
    arrays = [rng.normal(size=s) for s in ((1, 4, 4, 4), (1, 7, 2, 4), (1, 7, 2, 4))]
    arrays.append(rng.normal(size=(1, 7, 2)) if with_bias else None)
    ids = np.array([[0, 1, -1], [2, 0, 9], [1, 2, -1], [-1, 3, -1]])[None, :, None].repeat(2, 2)
    ids[0, 0, 1] = [1, -1, -1]
    positions = np.array([[3, 6, 5, 6]])
    d_out = rng.normal(size=arrays[0].shape)
    grads = gradients.sparse_attention_grad(*arrays, ids, positions, 2, d_out)
    for i, (array, grad) in enumerate(zip(arrays, grads, strict=True)):
        if array is None:
            continue

        def loss(x, i=i):
            return (d_out * oracle.sparse_attention(*arrays[:i], x, *arrays[i + 1 :], ids, positions, 2)).sum()

        np.testing.assert_allclose(grad, numeric_gradient(loss, array), atol=1e-8)


def test_eviction_head_gradients_match_finite_differences():
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=s) for s in ((2, 3, 2, 4), (2, 8), (2,))]
    d_cis = rng.normal(size=(2, 3, 2))
    grads = gradients.eviction_scores_grad(*arrays, d_cis)
    for i, (array, grad) in enumerate(zip(arrays, grads, strict=True)):

        def loss(x, i=i):
            return (d_cis * oracle.eviction_scores(*arrays[:i], x, *arrays[i + 1 :])).sum()

        np.testing.assert_allclose(grad, numeric_gradient(loss, array), atol=1e-8)
