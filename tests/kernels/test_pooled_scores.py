"""The Mosaic GPU kernels of query-aware scores: interpreted with race detection and poisoned memory, and on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels import pooled_scores as public
from nosa_jax.pallas_kernels.pooled_scores import mosaic_gpu, prefill, reference

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
by_lane = pytest.mark.parametrize(
    "interpret", [INTERPRET, pytest.param(None, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
PUBLISHED = dict(block_size=64, window=32, stride=16)
SMALL = dict(block_size=8, window=8, stride=4)


def case(positions, n_windows, *, kv=1, group=16, head_dim=64, window, stride, block_size, seed=0, dtype=jnp.bfloat16):
    """Queries at `positions` [B][T] over pooled keys that are NaN where no query of the row may look."""
    rng = np.random.default_rng(seed)
    positions = np.asarray(positions, np.int32)
    q = 2 * rng.normal(size=(*positions.shape, kv * group, head_dim))
    keys = rng.normal(size=(len(positions), kv, n_windows, head_dim))
    seen = np.clip((positions.max(axis=1) - window + 1) // stride + 1, 0, n_windows)
    for row, count in enumerate(seen):
        keys[row, :, count:] = np.nan
    sizes = dict(n_blocks=-(-n_windows * stride // block_size), block_size=block_size, window=window, stride=stride)
    return (jnp.asarray(q, dtype), jnp.asarray(keys, dtype), jnp.asarray(positions)), sizes


def run(args, sizes, interpret):
    return np.asarray(mosaic_gpu.pooled_scores(*args, **sizes, interpret=interpret))


def in_float32(args, sizes):
    q, keys, positions = args
    return np.asarray(reference.pooled_scores(q.astype(jnp.float32), keys.astype(jnp.float32), positions, **sizes))


def assert_scores(actual, expected):
    """The same blocks without a window; elsewhere 99 % within 1e-5 of the value and all within 1e-4.

    Products of bfloat16 numbers are exact in float32, so these bounds are those of float32 sums and exponentials.
    """
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
    here = np.isfinite(expected)
    error = np.abs(actual[here] - expected[here]) / np.maximum(np.abs(expected[here]), 1e-6)
    assert not np.isnan(error).any()
    assert np.quantile(error, 0.99) <= 1e-5
    assert error.max() <= 1e-4


DECODE = {
    "8B": dict(positions=[[9000], [4111]], n_windows=560, kv=2, head_dim=128, **PUBLISHED),
    "group of 3, head dim 96": dict(positions=[[700], [300]], n_windows=90, kv=2, group=3, head_dim=96, **SMALL),
    "one head, head dim 192": dict(positions=[[700]], n_windows=170, group=1, head_dim=192, **SMALL),
    "group of 8, head dim 256": dict(positions=[[700]], n_windows=170, group=8, head_dim=256, **SMALL),
    "two queries of a row": dict(positions=[[700, 11], [60, 61]], n_windows=170, kv=2, **SMALL),
}


@by_lane
@pytest.mark.parametrize("shape", DECODE)
def test_decode_matches_float32(shape, interpret):
    """Rows of different lengths in buffers of one length; what a row has not filled is NaN."""
    args, sizes = case(**DECODE[shape])
    assert_scores(run(args, sizes, interpret), in_float32(args, sizes))


@by_lane
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_decode_around_window_and_block_boundaries_b1(dtype, interpret):
    """B1, B2: no window, the first one, the ends of blocks and of the tiles of 64 blocks."""
    positions = [[p] for p in (0, 6, 7, 8, 11, 63, 64, 511, 512, 515, 516, 519)]
    args, sizes = case(positions, 140, group=2, dtype=dtype, **SMALL)
    assert_scores(run(args, sizes, interpret), in_float32(args, sizes))


PREFILL = {
    "8B": dict(positions=[np.arange(9100, 9120)], n_windows=570, kv=1, head_dim=128, **PUBLISHED),
    "group of 3": dict(positions=[[700, 3, 30, 9, 11, 680], [60, 2, 7, 8, 3, 4]], n_windows=176, group=3, **SMALL),
    "one window per block": dict(
        positions=[np.arange(500, 509)], n_windows=128, group=24, block_size=4, window=8, stride=4
    ),
    "head dim 96": dict(positions=[np.arange(590, 599)], n_windows=150, head_dim=96, **SMALL),
    "head dim 192": dict(positions=[np.arange(590, 599)], n_windows=150, head_dim=192, **SMALL),
    "head dim 256": dict(positions=[np.arange(590, 599)], n_windows=150, head_dim=256, **SMALL),
}


@by_lane
@pytest.mark.parametrize(
    "shape", [x if x in ("8B", "group of 3") else pytest.param(x, marks=pytest.mark.slow) for x in PREFILL]
)
def test_prefill_matches_float32(shape, interpret):
    """B1: several programs, positions in any order, rows that do not fill a program, tiles seen in part."""
    args, sizes = case(**PREFILL[shape])
    assert_scores(run(args, sizes, interpret), in_float32(args, sizes))


@by_lane
@pytest.mark.parametrize(
    "tuning",
    [(1, 1), pytest.param((2, 1), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow)],
    ids=str,
)
def test_other_tunings_of_prefill(tuning, interpret):
    args, sizes = case([np.arange(590, 599)], 160, **SMALL)
    q, keys, positions = args
    phases = sizes["block_size"] // sizes["stride"]
    scores = prefill.prefill_scores(
        q, keys.reshape(1, -1, phases * 64), positions, n_blocks=sizes["n_blocks"], phases=phases, n_windows=160,
        window=8, stride=4, tuning=prefill.Tuning(*tuning), interpret=interpret,
    )  # fmt: skip
    assert_scores(np.asarray(scores), in_float32(args, sizes))


@by_lane
@pytest.mark.parametrize("positions", [[[599]], [np.arange(590, 599)]], ids=["decode", "prefill"])
def test_b4_logits_of_any_size(positions, interpret):
    """B4: logits near -6e4 or 6e4, and a late one that exceeds the first by more than float32's exponent range."""
    args, sizes = case(positions, 148, **SMALL)
    q, keys, where = args
    ones = jnp.ones_like(q)
    shifted = [keys.at[..., 0].set(size) for size in (-6e4 * 8, 6e4 * 8)]
    peak = jnp.ones_like(keys).at[0, 0, 131].set(64.0)
    for q_case, keys_case in ((q.at[..., 0].set(1), shifted[0]), (q.at[..., 0].set(1), shifted[1]), (ones, peak)):
        actual = run((q_case, keys_case, where), sizes, interpret)
        expected = in_float32((q_case, keys_case, where), sizes)
        np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
        here = np.isfinite(expected)
        # A float32 logit of 6e4 is itself uncertain by 0.4 %.
        np.testing.assert_allclose(actual[here], expected[here], rtol=3e-2, atol=1e-6)


@by_lane
def test_b4_changing_later_keys_changes_nothing(interpret):
    args, sizes = case([np.arange(300, 309)], 150, **SMALL)
    q, keys, positions = args
    before = run(args, sizes, interpret)
    np.testing.assert_array_equal(run((q, keys.at[:, :, 77:].set(1e4), positions), sizes, interpret), before)


@by_lane
@pytest.mark.parametrize("positions", [[[599]], [np.arange(590, 599)]], ids=["decode", "prefill"])
def test_one_nan_key_reaches_every_score_of_its_head_s1(positions, interpret):
    """S1: as in the reference, a NaN key makes all the scores of the queries that see it NaN, and no others."""
    args, sizes = case(positions, 150, kv=2, **SMALL)
    q, keys, where = args
    args = (q, keys.at[0, 1, 40].set(jnp.nan), where)
    actual, expected = run(args, sizes, interpret), in_float32(args, sizes)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    assert np.isnan(actual[:, :, 1]).any()
    assert not np.isnan(actual[:, :, 0]).any()


@by_lane
@pytest.mark.parametrize("positions", [[[599]], [np.arange(590, 599)]], ids=["decode", "prefill"])
def test_two_runs_are_bit_equal(positions, interpret):
    args, sizes = case(positions, 150, **SMALL)
    np.testing.assert_array_equal(run(args, sizes, interpret), run(args, sizes, interpret))


@by_lane
def test_constant_keys_and_zero_queries_give_equal_scores_s1(interpret):
    """S1: every window weighs the same, so all blocks with windows tie exactly."""
    args, sizes = case([np.arange(590, 599)], 148, **SMALL)
    scores = run((jnp.zeros_like(args[0]), jnp.ones_like(args[1]), args[2]), sizes, interpret)
    for row in scores[0, :, 0]:
        assert np.unique(row[np.isfinite(row)]).size == 1


@pytest.mark.gpu
def test_b5_more_than_2_31_elements():
    """B5: pooled keys of more than 2^31 elements; only the last sequence has keys other than zero."""
    batch, n_windows = 130, 65_536
    keys = jnp.zeros((batch, 2, n_windows, 128), jnp.bfloat16).at[-1].set(1).at[-1, -1, -1].set(4)
    assert keys.size > 2**31
    q = jnp.ones((batch, 1, 32, 128), jnp.bfloat16)
    sizes = dict(n_blocks=n_windows // 4, **PUBLISHED)
    positions = jnp.full((batch, 1), n_windows * 16 + 16)
    scores = jax.jit(partial(mosaic_gpu.pooled_scores, **sizes))(q, keys, positions)
    assert scores[-1, 0, -1].argmax() == n_windows // 4 - 1
    np.testing.assert_allclose(scores[-1, 0, -1, -1], 16, rtol=1e-3)
    np.testing.assert_allclose(scores[-1, 0, 0], 16 / n_windows, rtol=1e-3)


def lower(q, keys, sizes):
    positions = jax.ShapeDtypeStruct(q[:2], jnp.int32)
    arrays = (jax.ShapeDtypeStruct(q, jnp.bfloat16), jax.ShapeDtypeStruct(keys, jnp.bfloat16), positions)
    jax.jit(partial(mosaic_gpu.pooled_scores, **sizes)).trace(*arrays).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(("heads", "head_dim"), [(32, 128), (16, 128), (2, 64), (6, 96), (16, 192), (16, 256)], ids=str)
def test_decode_lowers_for_cuda(heads, head_dim):
    lower((16, 1, heads, head_dim), (16, 2, 4096, head_dim), dict(n_blocks=1024, **PUBLISHED))


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        (32, 128),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((6, 128), (2, 128), (6, 96), (32, 192), (16, 256))),
    ],
)
def test_prefill_lowers_for_cuda(heads, head_dim):
    lower((1, 8192, heads, head_dim), (1, 2, 8192, head_dim), dict(n_blocks=2048, **PUBLISHED))


def test_what_the_kernels_do_not_take_is_named():
    args, sizes = case([[599]], 150, **SMALL)
    q, keys, _ = args
    reason = partial(
        mosaic_gpu.unsupported, n_blocks=sizes["n_blocks"], block_size=sizes["block_size"], stride=sizes["stride"]
    )
    assert reason(q, keys) is None
    assert "float32" in reason(q.astype(jnp.float32), keys)
    assert "head_dim=80" in reason(jnp.zeros((1, 1, 2, 80), jnp.bfloat16), jnp.zeros((1, 1, 9, 80), jnp.bfloat16))
    assert "0 windows" in reason(q, keys[:, :, :0])
    assert "129 query heads" in reason(jnp.zeros((1, 1, 129, 64), jnp.bfloat16), keys)
    with pytest.raises(NotImplementedError, match=r"queries are float32"):
        public(q.astype(jnp.float32), keys.astype(jnp.float32), args[2], **sizes, implementation="mosaic_gpu")
