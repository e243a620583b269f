"""Eviction head and positions in JAX against the oracle, at the extremes too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.config import NosaConfig
from nosa_jax.eviction import eviction_scores, ranking_scores
from nosa_jax.rope import apply_rope, inverse_frequencies, rope_angles
from tests.oracle import gradients
from tests.oracle import nosa_numpy as oracle
from tests.oracle.compare import assert_close

PRE_ACTIVATIONS = (-1e4, -88.0, 0.0, 20.0, 88.0, 89.0, 1e4)
CONFIG = NosaConfig.tiny(head_dim=8, rope_factors=(1.0, 1.5, 4.0, 9.0), rope_attention_factor=1.1)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_scores_and_gradients_match_oracle(kv_heads):
    rng = np.random.default_rng(kv_heads)
    shapes = (2, 9, kv_heads, 6), (kv_heads, kv_heads, 6), (kv_heads,), (2, 9, kv_heads)
    v, delta, a, d_cis = (rng.normal(size=s).astype(np.float32) for s in shapes)
    cis, pullback = jax.vjp(jax.jit(eviction_scores), v, delta, a)
    exact = oracle.f64(v), oracle.f64(delta).reshape(kv_heads, -1), oracle.f64(a)
    assert_close(cis, oracle.eviction_scores(*exact), 1e-6)
    expected = gradients.eviction_scores_grad(*exact, oracle.f64(d_cis))
    for actual, wanted in zip(pullback(d_cis), expected, strict=True):
        assert_close(actual, wanted.reshape(actual.shape), 1e-6)


@pytest.mark.parametrize("a", [3e4, -3e4])
def test_s5_extreme_pre_activations_in_bfloat16(a):
    """Values and gradients stay finite and ordered as in float64, from bfloat16 values and a large |A|."""
    v = jnp.asarray(PRE_ACTIVATIONS, jnp.bfloat16)[None, :, None, None] * jnp.asarray([1.0, 0.0], jnp.bfloat16)
    delta, scale = jnp.asarray([[[1.0, 0.5]]], jnp.bfloat16), jnp.asarray([a], jnp.bfloat16)
    cis, pullback = jax.vjp(eviction_scores, v, delta, scale)
    assert cis.dtype == jnp.float32
    exact = [oracle.f64(v), oracle.f64(delta).reshape(1, 2), oracle.f64(scale)]
    expected = oracle.eviction_scores(*exact)
    # exp(-88) is below the normal numbers of float32 and may be flushed to zero.
    np.testing.assert_allclose(cis, expected, rtol=1e-6, atol=1e-33)
    steps = np.diff(np.asarray(cis).ravel()) * np.sign(a)
    assert (steps >= 0).all()
    assert (steps[1:] > 0).all()
    wanted = gradients.eviction_scores_grad(*exact, np.ones(cis.shape))
    for actual, want in zip(pullback(jnp.ones_like(cis)), wanted, strict=True):
        assert np.isfinite(np.asarray(actual, np.float32)).all()
        assert actual.dtype == jnp.bfloat16
        assert_close(actual, want.reshape(actual.shape), 0.004)


def test_s5_ranking_keeps_an_order_that_exp_loses():
    """ED-DMA ranks cis; exp(cis), as DMA ranks, overflows and makes large scores equal."""
    cis = jnp.asarray([[88.0, 89.0, 1e4]])
    assert (np.diff(ranking_scores(cis, "ed_dma")) > 0).all()
    assert np.isinf(ranking_scores(cis, "dma")[0, 1:]).all()


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace(rope_factors=None, rope_attention_factor=1.0)], ids=str)
def test_rope_matches_oracle(config):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 64, 3, 8)).astype(np.float32)
    for start, tolerance in ((0, 2e-6), (4096, 2e-6), (131_000, 2e-6), (2**22 - 64, 2e-5)):
        positions = start + np.stack([np.arange(64), rng.permutation(64)]).astype(np.int32)
        expected = oracle.rope(
            oracle.f64(x), positions, config.rope_theta, config.rope_factors, config.rope_attention_factor
        )
        assert_close(jax.jit(apply_rope, static_argnums=2)(x, positions, config), expected, tolerance)


@pytest.mark.parametrize(("position", "error"), [(0, 0), (4_097, 3e-7), (131_071, 3e-7), (2**22 - 1, 3e-6)])
@pytest.mark.parametrize("config", [CONFIG, NosaConfig.nosa_8b()], ids=["longrope", "8b"])
def test_rope_angles_stay_exact_at_long_contexts(config, position, error):
    """A product in float32 would be off by 0.004 radians at 131,071."""
    angles = np.asarray(jax.jit(rope_angles, static_argnums=1)(jnp.asarray([[position]]), config), np.float64)
    exact = position * inverse_frequencies(config)
    assert np.abs(np.exp(1j * angles[0, 0]) - np.exp(1j * exact)).max() <= error
    assert np.abs(angles).max() <= np.pi * (1 + 1e-7)


def test_rope_keeps_bfloat16():
    x = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    assert apply_rope(x, jnp.arange(4)[None], CONFIG).dtype == jnp.bfloat16
