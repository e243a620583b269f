"""What grows token by token has the bits of what is pooled at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.eviction import eviction_scores, ranking_scores
from nosa_jax.ffi import EvictionHead, PooledStatistics, append_token
from nosa_jax.offload import CacheLayout, init_state
from nosa_jax.offload.append import append_pooling, append_tail
from nosa_jax.rope import rope_tables, rotate
from nosa_jax.selection import block_ranking, pooled_keys
from tests.infer.cases import ONE_LAYER

TOKENS, ROWS = 53, 3
CONFIGS = {
    "two strides": ONE_LAYER,
    "four strides, bfloat16": ONE_LAYER.replace(pool_window=8, local_blocks=3, dtype="bfloat16"),
    "one stride": ONE_LAYER.replace(block_size=6, pool_window=3, pool_stride=3),
    "exp ranking": ONE_LAYER.replace(eviction="dma", pool_window=2, pool_stride=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_b7_windows_that_complete_in_decode_have_the_bits_of_prefill(name):
    """B7: window sums, pooled keys, pooled cis and cis of rows that start at other times; an idle row stays empty."""
    config = CONFIGS[name]
    layout = CacheLayout(config, "nosa", ROWS, TOKENS, True, config.budget.total)
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(ROWS, TOKENS, config.num_kv_heads, config.head_dim)), config.dtype)
    cis = jnp.asarray(rng.normal(size=(ROWS, TOKENS, config.num_kv_heads)), jnp.float32)
    delay = jnp.asarray([0, 7, TOKENS])  # row 1 starts 7 steps later, row 2 never
    cache = init_state(layout).layers[0]
    empty = PooledStatistics(*(getattr(cache, field) for field in PooledStatistics._fields))

    @jax.jit
    def grow(cache):
        def add(cache, step):
            lengths = jnp.maximum(step - delay, 0)
            active = step >= delay
            token = jnp.arange(ROWS), lengths
            return append_pooling(cache, k[token], cis[token], lengths, active, layout), None

        return jax.lax.scan(add, cache, jnp.arange(TOKENS))[0]

    @jax.jit
    def pool(k, cis):
        ranking = ranking_scores(cis, config.eviction)
        return pooled_keys(k, config), block_ranking(ranking, config, n_blocks=layout.n_blocks)

    grown = grow(empty)
    for row, n in enumerate((TOKENS, TOKENS - 7)):
        keys, rank = pool(k[row : row + 1, :n], cis[row : row + 1, :n])
        windows = config.num_windows(n)
        np.testing.assert_array_equal(grown.pooled_k[row, :, :windows], keys[0])
        np.testing.assert_array_equal(grown.block_rank[row], rank[0])
        flat = np.asarray(grown.cis[row]).reshape(config.num_kv_heads, -1)
        np.testing.assert_array_equal(flat[:, :n], cis[row, :n].T)
    for leaf, before in zip(jax.tree.leaves(grown), jax.tree.leaves(empty), strict=True):
        np.testing.assert_array_equal(leaf[2], before[2])


def test_the_tail_goes_to_its_slot_and_nowhere_else():
    """A negative slot writes nothing, in particular not to the last slot."""
    rng = np.random.default_rng(1)
    slots = jnp.asarray(rng.normal(size=(2, 2, 3, 2, 4, 5)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 5)), jnp.float32) for _ in range(2))
    expected = np.array(slots)
    expected[0, 0, 2, 0, 1], expected[0, 0, 2, 1, 1] = k[0, 0], v[0, 0]
    expected[1, 1, 0, 0, 3], expected[1, 1, 0, 1, 3] = k[1, 1], v[1, 1]
    tail_slot, lengths = jnp.asarray([[2, -1], [-1, 0]], jnp.int32), jnp.asarray([5, 7], jnp.int32)
    np.testing.assert_array_equal(append_tail(slots, k, v, tail_slot, lengths), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("scored", [True, False])
def test_one_launch_does_what_the_small_kernels_do(name, scored):
    """`append_token` against XLA, token by token, with NaN projections and a row that is not active.

    Rotations and scores agree to rounding; what is pooled of them has the same bits.
    """
    config = CONFIGS[name]
    layout = CacheLayout(config, "nosa", ROWS, TOKENS, True, config.budget.total)
    rng = np.random.default_rng(1)
    cache = init_state(layout).layers[0]
    one = two = PooledStatistics(*(getattr(cache, field) for field in PooledStatistics._fields))
    kv_heads, head_dim = config.num_kv_heads, config.head_dim
    head = EvictionHead(
        jnp.asarray(rng.normal(size=(kv_heads, kv_heads, head_dim)), jnp.float32),
        jnp.asarray(rng.normal(size=kv_heads), jnp.float32),
    )

    @jax.jit
    def in_one_launch(statistics, projected, lengths, active):
        cos, sin = (table[:, 0] for table in rope_tables(lengths[:, None], config))
        return append_token(
            statistics, projected, cos, sin, head if scored else None, lengths, active,
            stride=config.pool_stride, exponential=config.eviction == "dma",
        )  # fmt: skip

    @jax.jit
    def by_xla(statistics, k, cis, lengths, active):
        return append_pooling(statistics, k, cis, lengths, active, layout)

    for step in range(TOKENS):
        q, k, v = (rng.normal(size=(ROWS, heads, head_dim)) for heads in (config.num_heads, kv_heads, kv_heads))
        if step % 11 == 5:
            k[0, 0, 1] = v[1, 0, 0] = np.nan
        q, k, v = (jnp.asarray(x, config.dtype) for x in (q, k, v))
        lengths, active = jnp.full(ROWS, step, jnp.int32), jnp.array([True, step > 9, False])
        rotated_q, rotated_k, same_v, two = in_one_launch(two, jnp.concatenate([q, k, v], axis=1), lengths, active)
        tables = rope_tables(lengths[:, None], config)
        for rotated, x in ((rotated_q, q), (rotated_k, k)):
            expected = np.asarray(rotate(x[:, None], *tables)[:, 0], np.float32)
            np.testing.assert_allclose(np.asarray(rotated, np.float32), expected, rtol=1e-2, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(same_v, np.float32), np.asarray(v, np.float32))
        cis = two.cis[:, :, step // config.block_size, step % config.block_size]
        expected = np.asarray(eviction_scores(v[:, None], *head)[:, 0]) if scored else np.zeros((ROWS, kv_heads))
        np.testing.assert_allclose(np.asarray(cis)[active], expected[active], rtol=1e-5, atol=1e-6)
        one = by_xla(one, rotated_k, cis, lengths, active)
    for field, a, b in zip(PooledStatistics._fields, one, two, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=field)


@pytest.mark.gpu
def test_s5_extreme_pre_activations_of_the_eviction_head_give_finite_scores():
    """S5: softplus of -1e4 to 1e4, in one launch, is what XLA makes of it, and keeps its order."""
    config = CONFIGS[next(iter(CONFIGS))]
    layout = CacheLayout(config, "nosa", ROWS, TOKENS, True, config.budget.total)
    cache = init_state(layout).layers[0]
    statistics = PooledStatistics(*(getattr(cache, field) for field in PooledStatistics._fields))
    kv_heads, head_dim = config.num_kv_heads, config.head_dim
    projected = jnp.zeros((ROWS, config.num_heads + 2 * kv_heads, head_dim), config.dtype)
    lengths, active = jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS, bool)
    cos, sin = (table[:, 0] for table in rope_tables(lengths[:, None], config))
    scores = []
    for bias in (-1e4, -88.0, 0.0, 20.0, 88.0, 89.0, 1e4):
        head = EvictionHead(jnp.zeros((kv_heads, kv_heads, head_dim)), jnp.full(kv_heads, bias))
        *_, after = jax.jit(partial(append_token, stride=config.pool_stride, exponential=config.eviction == "dma"))(
            statistics, projected, cos, sin, head, lengths, active
        )
        cis = np.asarray(after.cis)[:, :, 0, 0]
        expected = np.asarray(eviction_scores(projected[:, None, -kv_heads:], *head)[:, 0])
        np.testing.assert_allclose(cis, expected, rtol=1e-5, atol=1e-6)
        scores.append(cis.max())
    assert np.isfinite(scores).all()
    assert (np.diff(scores) >= 0).all()
