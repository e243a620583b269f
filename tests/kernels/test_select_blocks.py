"""The Mosaic GPU kernel of block selection: interpreted with race detection and poisoned memory, and on a GPU.

Its ids must be the reference's, always.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels import select_blocks as public
from nosa_jax.pallas_kernels.select_blocks import mosaic_gpu, reference
from tests.oracle.nosa_numpy import Budget
from tests.oracle.test_selection import KINDS, scores_of_kind

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
by_lane = pytest.mark.parametrize(
    "interpret", [INTERPRET, pytest.param(None, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
DEFAULT = Budget(1, 17, 15, 31)


def assert_same_ids(score_q, score_e, positions, budget, interpret, block_size=64):
    args = (jnp.asarray(score_q), jnp.asarray(score_e), jnp.asarray(positions, jnp.int32))
    rules = dict(block_size=block_size, **budget._asdict())
    actual = mosaic_gpu.select_blocks(*args, **rules, interpret=interpret)
    assert actual.dtype == jnp.int32
    np.testing.assert_array_equal(actual, reference.select_blocks(*args, **rules))
    return np.asarray(actual)


def random_scores(kinds, n_blocks, rows, seed=0):
    rng = np.random.default_rng(seed)
    return (scores_of_kind(kind, rng, (1, rows, 1, n_blocks)) for kind in kinds)


@by_lane
@pytest.mark.parametrize("kind", KINDS)
def test_same_ids_for_scores_that_selections_get_wrong_s1(kind, interpret):
    """S1: equal scores, three values, NaN, infinities, signed zeros."""
    score_q, score_e = random_scores((kind, KINDS[KINDS.index(kind) - 1]), 300, 1)
    assert_same_ids(score_q, score_e, [[299 * 64]], DEFAULT, interpret)


@by_lane
def test_a_negative_position_selects_nothing(interpret):
    """Rows that are not active, beside one that is."""
    score_q, score_e = random_scores(("normal", "special"), 70, 3)
    ids = assert_same_ids(score_q, score_e, [[-1, 69 * 64, -(2**31)]], Budget(1, 2, 2, 3), interpret)
    assert (ids[0, 0] == reference.NO_BLOCK).all()
    assert (ids[0, 1] >= 0).all()
    assert (ids[0, 2] == reference.NO_BLOCK).all()


@by_lane
@pytest.mark.parametrize(
    ("n_blocks", "budget", "kind"),
    [
        (1023, Budget(1, 2, 2, 3), "three values"),
        (1024, Budget(1, 4, 3, 8), "equal"),
        (1025, Budget(1, 5, 3, 8), "one NaN"),
        (1025, DEFAULT, "three values"),
    ],
    ids=str,
)
def test_ties_over_odd_numbers_of_blocks_s1(n_blocks, budget, kind, interpret):
    """S1: budgets of 8, 16, 17 and 64 over 1023, 1024 and 1025 blocks."""
    score_q, score_e = random_scores((kind, "three values"), n_blocks, 1, seed=n_blocks)
    assert_same_ids(score_q, score_e, [[n_blocks * 64 - 1]], budget, interpret)


@pytest.mark.gpu
@pytest.mark.parametrize("n_blocks", [1023, 1024, 1025, 4096, 8192, 16_384])
@pytest.mark.parametrize("budget", [Budget(1, 2, 2, 3), Budget(1, 4, 3, 8), Budget(1, 5, 3, 8), DEFAULT], ids=str)
def test_every_kind_over_many_blocks_s1(n_blocks, budget):
    positions = np.random.default_rng(n_blocks).integers(0, n_blocks * 64, (1, 12))
    for kinds in zip(KINDS, KINDS[::-1], strict=True):
        score_q, score_e = random_scores(kinds, n_blocks, 12)
        ids = assert_same_ids(score_q, score_e, positions, budget, None)
        np.testing.assert_array_equal(ids, assert_same_ids(score_q, score_e, positions, budget, None))


@by_lane
def test_number_of_blocks_around_the_budget_b2(interpret):
    """B2, B3: one block, the forced count, C - 1, C and C + 1; blocks after the current one are NaN."""
    budget = Budget(1, 2, 3, 4)
    counts = [1, 3, 9, 10, 11]
    score_q, score_e = (s.repeat(len(counts), 1).copy() for s in random_scores(("normal", "normal"), 12, 1))
    for row, count in enumerate(counts):
        score_q[:, row, :, count:], score_e[:, row, :, count:] = np.nan, np.nan
    ids = assert_same_ids(score_q, score_e, [[count * 4 - 1 for count in counts]], budget, interpret, block_size=4)
    for row, count in enumerate(counts[:4]):
        np.testing.assert_array_equal(ids[0, row, 0, :count], np.arange(count))
        assert (ids[0, row, 0, count:] == -1).all()


@by_lane
@pytest.mark.parametrize(
    "budget", [Budget(0, 1, 0, 0), Budget(0, 1, 2, 0), Budget(3, 2, 0, 4), Budget(9, 9, 1, 80)], ids=str
)
def test_budgets_with_empty_parts_and_more_than_64_slots(budget, interpret):
    score_q, score_e = random_scores(("normal", "normal"), 200, 1, seed=1)
    assert_same_ids(score_q, score_e, [[399]], budget, interpret, block_size=2)


@by_lane
def test_static_scores_of_each_sequence_serve_all_its_queries(interpret):
    score_q = np.random.default_rng(2).normal(size=(2, 2, 2, 40)).astype(np.float32)
    score_e = np.random.default_rng(3).normal(size=(2, 1, 2, 40)).astype(np.float32)
    positions = [[70, 79], [33, 60]]
    budget = Budget(1, 2, 3, 4)
    ids = assert_same_ids(score_q, score_e, positions, budget, interpret, block_size=2)
    if interpret is None:
        each = assert_same_ids(score_q, np.repeat(score_e, 2, 1), positions, budget, interpret, block_size=2)
        np.testing.assert_array_equal(ids, each)


@pytest.mark.parametrize(("rows", "n_blocks"), [(16, 1024), (512, 2048), (2, 77), (1, 16_384)], ids=str)
def test_lowers_for_cuda(rows, n_blocks):
    scores = jax.ShapeDtypeStruct((rows, 1, 2, n_blocks), jnp.float32)
    positions = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    select = partial(mosaic_gpu.select_blocks, block_size=64, **DEFAULT._asdict())
    jax.jit(select).trace(scores, scores, positions).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("n_blocks", [256, 512, 1024, 1536, 2048])
def test_scores_of_usual_contexts_are_read_where_they_are(n_blocks):
    """16K to 128K tokens in blocks of 64: padding would be two kernels more in each layer of a step."""
    scores = jax.ShapeDtypeStruct((16, 1, 2, n_blocks), jnp.float32)
    choose = partial(mosaic_gpu.select_blocks, block_size=64, **DEFAULT._asdict())
    traced = str(jax.make_jaxpr(choose)(scores, scores, jax.ShapeDtypeStruct((16, 1), jnp.int32)))
    assert "select_blocks" in traced
    assert " pad[" not in traced
    odd = jax.ShapeDtypeStruct((16, 1, 2, n_blocks + 1), jnp.float32)
    assert " pad[" in str(jax.make_jaxpr(choose)(odd, odd, jax.ShapeDtypeStruct((16, 1), jnp.int32)))


def test_what_the_kernel_does_not_take_is_named():
    scores = jnp.zeros((1, 1, 1, 8))
    wide = jnp.zeros((1, 1, 1, 20_000))
    assert mosaic_gpu.unsupported(scores, scores, slots=64) is None
    assert "20000 blocks exceed its limit of 16384" in mosaic_gpu.unsupported(wide, wide, slots=64)
    assert "leave nothing to select" in mosaic_gpu.unsupported(scores[..., :0], scores[..., :0], slots=64)
    with pytest.raises(NotImplementedError, match=r"score_e is bfloat16"):
        public(
            scores, scores.astype(jnp.bfloat16), jnp.zeros((1, 1), int), block_size=4, **DEFAULT._asdict(),
            implementation="mosaic_gpu",
        )  # fmt: skip
