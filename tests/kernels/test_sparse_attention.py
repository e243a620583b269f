"""The Mosaic GPU kernels of sparse attention: interpreted, with race detection and poisoned memory, and on a GPU.

The interpreter takes about a second per tile and block, so its inputs are a few blocks of 16 keys; the GPU lane runs
the same tests and longer ones.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels import dispatch
from nosa_jax.pallas_kernels.sparse_attention import mosaic_gpu, reference, unions, visits, xla
from nosa_jax.pallas_kernels.sparse_attention.api import sparse_attention_with_lse as public
from nosa_jax.pallas_kernels.sparse_attention.tiling import Tiling

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
by_lane = pytest.mark.parametrize(
    "interpret", [INTERPRET, pytest.param(None, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
slow = partial(pytest.param, marks=pytest.mark.slow)
INT_MAX = np.iinfo(np.int32).max
NAMES = ("out", "lse", "dq", "dk", "dv", "dcis")


def inputs(queries, keys, *, batch=1, kv=1, group=2, head_dim=64, block=16, count=2, padding=-1, seed=0, bias=1.0):
    """q, k, v, cis, ids, positions: the last `queries` of `keys` tokens, unsorted ids among padding, cotangents."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    q, d_out = draw(batch, queries, kv * group, head_dim), draw(batch, queries, kv * group, head_dim)
    k, v = draw(batch, keys, kv, head_dim), draw(batch, keys, kv, head_dim)
    cis = jnp.asarray(bias * rng.normal(size=(batch, keys, kv)), jnp.float32)
    positions = np.broadcast_to(np.arange(keys - queries, keys, dtype=np.int32), (batch, queries))
    ids = np.full((batch, queries, kv, count), padding, np.int32)
    for b, t, h in np.ndindex(batch, queries, kv):
        chosen = rng.permutation(positions[b, t] // block + 1)[:count]
        ids[b, t, h, rng.permutation(count)[: len(chosen)]] = chosen
    return (q, k, v, cis, jnp.asarray(ids), jnp.asarray(positions)), d_out


@partial(jax.jit, static_argnames=("block", "implementation", "interpret"))
def everything(args, lengths, d_out, d_lse, *, block, implementation, interpret=None):
    """(out, lse, dq, dk, dv, dcis), dcis only if there is a bias."""
    *tensors, ids, positions = args
    run = {"kernel": partial(mosaic_gpu.sparse_attention, interpret=interpret), "reference": reference.with_lse}
    attend = run.get(implementation, partial(public, implementation=implementation))
    results, pullback = jax.vjp(lambda *x: attend(*x, ids, positions, lengths, block_size=block), *tensors)
    return (*results, *(x for x in pullback((d_out, d_lse)) if x is not None))


def in_float32(args, lengths, d_out, d_lse, block):
    """The reference on the same numbers in float32."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
    return everything(wide, lengths, d_out.astype(jnp.float32), d_lse, block=block, implementation="reference")


def assert_near(name, actual, expected, loosest=1.2e-2):
    """Within what bfloat16 weights and outputs allow: 99 % of the elements tightly, all loosely; gradients twice it."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert actual.shape == expected.shape, name
    empty = np.isneginf(expected)
    np.testing.assert_array_equal(np.isneginf(actual), empty, err_msg=name)
    error = np.abs(np.where(empty, 0, actual) - np.where(empty, 0, expected))
    allowed = loosest * (2 if name.startswith("d") else 1) * max(1.0, np.abs(expected[~empty]).max(initial=0))
    assert not np.isnan(error).any(), name
    assert np.quantile(error, 0.99) <= allowed / 3, f"{name}: {np.quantile(error, 0.99):.3g}, allowed {allowed / 3:.3g}"
    assert error.max() <= allowed, f"{name}: {error.max():.3g}, allowed {allowed:.3g}"


def check(args, d_out, *, block, interpret, lengths=None, d_lse=None, poison=()):
    """Kernel against reference; `poison` names arrays whose tail beyond the row's length is NaN for the kernel only."""
    d_lse = jnp.zeros(d_out.shape[:3], jnp.float32) if d_lse is None else d_lse
    expected = in_float32(args, lengths, d_out, d_lse, block)
    if poison:
        beyond = jnp.arange(args[1].shape[1])[None, :, None] >= lengths[:, None, None]
        k, v, cis = (jnp.where(beyond if x.ndim == 3 else beyond[..., None], jnp.nan, x) for x in args[1:4])
        args = (args[0], k, v, cis, *args[4:])
    actual = everything(args, lengths, d_out, d_lse, block=block, implementation="kernel", interpret=interpret)
    for name, a, e in zip(NAMES, actual, expected, strict=False):
        assert_near(name, a, e)
    return actual


@by_lane
def test_b1_fewer_queries_than_keys_in_ragged_rows_over_poison(interpret):
    """B1, B3: 23 queries at the end of 43 keys, group 3, ids unsorted; NaN beyond each row's length stays out."""
    args, d_out = inputs(23, 43, batch=2, group=3, count=3)
    lengths = jnp.array([43, 30])
    d_lse = jnp.asarray(np.random.default_rng(1).normal(size=d_out.shape[:3]), jnp.float32)
    out, lse, dq, dk, dv, dcis = check(
        args, d_out, block=16, interpret=interpret, lengths=lengths, d_lse=d_lse, poison=("k", "v", "cis")
    )
    assert not np.asarray(out[1, 10:]).any()
    assert not np.asarray(dq[1, 10:]).any()
    assert np.isneginf(lse[1, 10:]).all()
    for grad in (dk, dv, dcis):
        assert not np.asarray(grad[1, 30:]).any()


@by_lane
@pytest.mark.parametrize("padding", [-1, 3, INT_MAX])
def test_b3_padding_touches_nothing(padding, interpret):
    """Rows with 0, 1 and all ids; every kind of padding gives the same bits, and the last block's 1e4 stays out."""
    (q, k, v, cis, ids, positions), d_out = inputs(40, 48, count=2)
    ids = np.array(ids)
    ids[ids == 2] = -1
    ids[:, ::4], ids[:, 1::4, :, 1:] = -1, -1
    k, v = (x.at[:, 32:].set(1e4) for x in (k, v))
    padded = jnp.asarray(np.where(ids < 0, np.int32(padding), ids))
    out, _, dq, dk, dv, dcis = check((q, k, v, cis, padded, positions), d_out, block=16, interpret=interpret)
    assert not np.asarray(out[:, ::4]).any()
    assert not np.asarray(dq[:, ::4]).any()
    for grad in (dk, dv, dcis):
        assert not np.asarray(grad[:, 32:]).any()


@by_lane
def test_two_runs_are_bit_equal_and_no_bias_is_allowed(interpret):
    (q, k, v, _, ids, positions), d_out = inputs(30, 30, group=4)
    args = (q, k, v, None, ids, positions)
    runs = [check(args, d_out, block=16, interpret=interpret) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *runs)


@by_lane
def test_blocks_of_80_keys_take_several_steps(interpret):
    """80 is no multiple of 64 and too long for a step, so a block is five steps of 16, more than stages; G = 16."""
    args, d_out = inputs(5, 165, group=16, block=80)
    check(args, d_out, block=80, interpret=interpret)


@by_lane
def test_a_block_of_more_visits_than_stages(interpret):
    """Groups of 64 leave two queries a tile in the backward pass, so five tiles visit the only block."""
    args, d_out = inputs(9, 16, group=64, count=1)
    check(args, d_out, block=16, interpret=interpret)


@by_lane
@pytest.mark.parametrize(
    ("shift", "group"), [(1e5, 3), slow(-6e4, 2), slow(-1e5, 16)], ids=["1e5", "-6e4", "-1e5, group of 16"]
)
def test_b4_constant_shift_of_logits_changes_little(shift, group, interpret):
    """A shift that float32 represents exactly leaves the output and all gradients where bfloat16 puts them."""
    (q, k, v, cis, ids, positions), d_out = inputs(20, 20, group=group)
    cis = jnp.round(cis * 4) / 4
    q = jnp.round(q)  # products of small integers: the sums are exact too
    k = jnp.round(k)
    run = partial(everything, lengths=None, d_out=d_out, d_lse=jnp.zeros(d_out.shape[:3]), block=16,
                  implementation="kernel", interpret=interpret)  # fmt: skip
    plain, shifted = (run((q, k, v, bias, ids, positions)) for bias in (cis, cis + shift))
    for name, a, b in zip(NAMES, shifted, plain, strict=False):
        if name != "lse":
            assert_near(name, a, np.float32(b))


@by_lane
@pytest.mark.parametrize(
    ("largest", "group"), [(95.0, 2), slow(1e4, 3), slow(1e3, 16)], ids=["95", "1e4", "1e3, group of 16"]
)
def test_s5_biases_of_any_size_leave_gradients_finite(largest, group, interpret):
    """S5: eviction scores as pre-activations of -1e4 to 1e4 give them; groups of 2 and 3 have rows that only pad."""
    (q, k, v, _, ids, positions), d_out = inputs(20, 20, group=group)
    scores = np.array([0.0, 0.69, 20.0, 88.0, 89.0, largest, largest], np.float32)
    cis = jnp.asarray(np.random.default_rng(group).choice(scores, (1, 20, k.shape[2])))
    args = (q, k, v, cis, ids, positions)
    if largest <= 1e3:
        check(args, d_out, block=16, interpret=interpret)
    else:  # float32 rounds logits of that size by a thousandth, here and in the reference
        d_lse = jnp.zeros(d_out.shape[:3])
        for x in everything(args, None, d_out, d_lse, block=16, implementation="kernel", interpret=interpret):
            assert np.isfinite(np.float32(x)).all()


@by_lane
def test_b4_later_keys_of_the_same_block_change_nothing(interpret):
    """B4: outputs up to a token keep their bits when keys, values and biases after it in its block change."""
    (q, k, v, cis, ids, positions), _ = inputs(32, 32)
    attend = jax.jit(partial(mosaic_gpu.sparse_attention, block_size=16, interpret=interpret))
    token = 20
    later = (x.at[:, token + 1 :].add(jnp.asarray(3, x.dtype)) for x in (k, v, cis))
    for plain, other in zip(attend(q, k, v, cis, ids, positions), attend(q, *later, ids, positions), strict=True):
        np.testing.assert_array_equal(plain[:, : token + 1], other[:, : token + 1])
        assert (np.asarray(plain) != np.asarray(other)).any()


# The public function's choice, forward and backward.
def test_programs_for_the_cpu_take_xla_in_both_directions_where_a_gpu_could_run_the_kernels(monkeypatch):
    """J4: the results of the named implementation, and no kernel in the program; in one for CUDA there are kernels."""
    args, d_out = inputs(40, 40)
    d_lse = jnp.ones(d_out.shape[:3], jnp.float32)
    named = everything(args, None, d_out, d_lse, block=16, implementation="xla")
    monkeypatch.setattr(dispatch, "why_no_kernels", lambda: None)
    chosen = everything(args, None, d_out, d_lse, block=16, implementation=None)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-2), *jax.tree.map(np.float32, (chosen, named)))
    traced = everything.trace(args, None, d_out, d_lse, block=16, implementation=None)
    kernels = [traced.lower(lowering_platforms=(x,)).as_text().count("mosaic_gpu_v2") for x in ("cpu", "cuda")]
    assert kernels[0] == 0
    assert kernels[1] >= 6  # forward, dq, sums over chunks, and their totals for k, v and cis


def test_a_mesh_that_splits_the_batch_lowers_the_kernels_per_device():
    """Each device's program has the kernels for its own rows."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    args, d_out = inputs(16, 16, batch=2)
    attend = jax.shard_map(
        lambda *x: mosaic_gpu.sparse_attention(*x, block_size=16)[0], mesh=mesh, in_specs=spec, out_specs=spec,
        check_vma=False,
    )  # fmt: skip
    gradients = jax.jit(lambda args, d_out: jax.vjp(lambda *x: attend(*x, *args[4:]), *args[:4])[1](d_out))
    assert "mosaic_gpu" in gradients.trace(args, d_out).lower(lowering_platforms=("cuda",)).as_text()


# What lowers, and what is refused.
SHAPES = {
    "8B": dict(n=32, kv=2),
    "1B": dict(n=16, kv=2),
    "one query head": dict(n=2, kv=2),
    "group of 3": dict(n=3, kv=1, head_dim=64, block=16),
    "head dim 96": dict(n=8, kv=1, head_dim=96),
    "head dim 192": dict(n=8, kv=2, head_dim=192, block=48),
    "head dim 256": dict(n=4, kv=2, head_dim=256, block=256),
}


@pytest.mark.parametrize("case", SHAPES)
def test_lowers_for_cuda(case):
    """Forward and backward at long lengths, without a GPU."""
    shape = dict(head_dim=128, block=64) | SHAPES[case]
    n, kv, head_dim, block = (shape[x] for x in ("n", "kv", "head_dim", "block"))
    length = 16_384
    array = jax.ShapeDtypeStruct
    q, k = array((1, length, n, head_dim), jnp.bfloat16), array((1, length, kv, head_dim), jnp.bfloat16)
    ids = array((1, length, kv, 64), jnp.int32)
    args = (q, k, k, array((1, length, kv), jnp.float32), ids, None)
    assert mosaic_gpu.unsupported(q, k, k, ids, block) is None
    d_lse = array(q.shape[:3], jnp.float32)
    traced = everything.trace(args, None, q, d_lse, block=block, implementation="kernel")
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype=jnp.float32), "float32"),
        (dict(head_dim=80), "head dimension 80"),
        (dict(group=65), "65 query heads"),
        (dict(block=24), "block_size=24"),
        (dict(count=256), "the kernels' lists hold 2048"),
        (dict(queries=0), "empty"),
    ],
)
def test_what_the_kernels_do_not_take_is_named(change, message):
    shape = dict(dtype=jnp.bfloat16, head_dim=64, group=2, block=16, count=4, queries=8) | change
    array = jax.ShapeDtypeStruct
    q = array((1, shape["queries"], shape["group"], shape["head_dim"]), shape["dtype"])
    k = array((1, 65_536, 1, shape["head_dim"]), shape["dtype"])
    ids = array((1, shape["queries"], 1, shape["count"]), jnp.int32)
    assert message in mosaic_gpu.unsupported(q, k, k, ids, shape["block"])


# The lists that the kernels walk.
@pytest.mark.parametrize("tokens", [8, 12, 32])
def test_union_lists_hold_each_selected_block_once_with_its_queries(tokens):
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(23)[:5] for _ in range(2 * 50 * 2)]).reshape(2, 50, 2, 5).astype(np.int32) - 2
    lists = jax.tree.map(np.asarray, unions.tile_unions(jnp.asarray(ids), 20, tokens))
    for b, h, tile in np.ndindex(2, 2, -(-50 // tokens)):
        row = b * 2 + h
        wanted: dict[int, int] = {}
        for i, chosen in enumerate(ids[b, tile * tokens : (tile + 1) * tokens, h]):
            for block in chosen[(chosen >= 0) & (chosen < 20)]:
                wanted[int(block)] = wanted.get(int(block), 0) | 1 << i
        count = lists.counts[row, tile]
        bits = lists.bits[row, tile].astype(np.uint32)
        assert list(zip(lists.ids[row, tile, :count].tolist(), bits[:count].tolist(), strict=True)) == sorted(
            wanted.items()
        )
        assert not lists.ids[row, tile, count:].any()


def test_visits_cover_every_union_entry_once_in_chunks(monkeypatch):
    """Also when so few chunks are allowed that they must be long."""
    monkeypatch.setattr(visits, "MANY_CHUNKS", 4)
    tiling = Tiling.choose(64, 16, 16)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(-1, 12, size=(2, 400, 1, 1)), jnp.int32)
    lists = unions.tile_unions(ids, 12, tiling.tokens)
    limits = jnp.asarray(np.repeat(np.arange(2 * 400), tiling.padded_group), jnp.int32)
    turned = visits.block_visits(lists, limits, 12)
    entries, chunk_block, first, count = map(np.asarray, (turned.entries, turned.block, turned.first, turned.count))
    chunk_start, lists = np.asarray(turned.chunk_start), jax.tree.map(np.asarray, lists)
    found = []
    for block, start, length in zip(chunk_block, first, count, strict=True):
        for tile, bits, low, high in entries[start : start + length]:
            assert (low, high) == (tile * 8, tile * 8 + 4)
            found.append((int(block), int(tile), int(bits)))
    wanted = [
        (row * 12 + int(lists.ids[row, tile, j]), row * 50 + tile, int(lists.bits[row, tile, j]))
        for row, tile in np.ndindex(2, 50)
        for j in range(int(lists.counts[row, tile]))
    ]
    assert found == sorted(wanted)
    for block in range(24):
        assert (chunk_block[chunk_start[block] : chunk_start[block + 1]] == block).all()


# Every implementation: lengths and the log-sum-exp.
@pytest.mark.parametrize("implementation", ["reference", "xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_lengths_and_lse_mean_the_same_everywhere(implementation):
    args, d_out = inputs(150, 200, batch=2, group=2, block=64, head_dim=64)
    lengths = jnp.array([200, 120])
    d_lse = jnp.asarray(np.random.default_rng(2).normal(size=d_out.shape[:3]), jnp.float32)
    actual = everything(args, lengths, d_out, d_lse, block=64, implementation=implementation)
    for name, a, e in zip(NAMES, actual, in_float32(args, lengths, d_out, d_lse, 64), strict=True):
        assert_near(name, a, e)
    short = tuple(x[1:, :120] for x in args[1:4])
    alone = reference.with_lse(args[0][1:, :70], *short, args[4][1:, :70], args[5][1:, :70], block_size=64)
    for a, e in zip(actual, alone, strict=False):
        np.testing.assert_allclose(a[1:, :70].astype(np.float32), e.astype(np.float32), atol=2e-2)


def test_lse_merges_disjoint_selections():
    """Two halves of a selection, merged by their log-sum-exps, are the whole; a half may be empty."""
    (q, k, v, cis, ids, positions), _ = inputs(33, 64, count=4)
    halves = [xla.with_lse(q, k, v, cis, x, positions, block_size=16) for x in (ids[..., :2], ids[..., 2:])]
    whole, lse = xla.with_lse(q, k, v, cis, ids, positions, block_size=16)
    merged = jnp.logaddexp(halves[0][1], halves[1][1])
    np.testing.assert_allclose(merged, lse, atol=1e-4)
    parts = sum(out.astype(jnp.float32) * jnp.exp(part - merged)[..., None] for out, part in halves)
    np.testing.assert_allclose(parts, whole.astype(jnp.float32), atol=2e-2)


# The GPU lane alone: lengths that the interpreter would take minutes for.
GPU_SHAPES = {
    "8B": dict(group=16, kv=2, head_dim=128, block=64, count=8),
    "1B": dict(group=8, kv=2, head_dim=128, block=64, count=8),
    "one query head": dict(group=1, kv=3, block=64, count=4),
    "head dim 96, blocks of 128": dict(group=3, head_dim=96, block=128, count=2),
    "head dim 192, blocks of 48": dict(group=4, head_dim=192, block=48, count=4),
    "head dim 256": dict(group=4, head_dim=256, block=64, count=3),
    "blocks of 256": dict(group=16, head_dim=128, block=256, count=2),
    "group of 64": dict(group=64, head_dim=64, block=32, count=5),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_SHAPES)
def test_shapes(case):
    shape = GPU_SHAPES[case]
    args, d_out = inputs(333, 507, batch=2, **shape)
    check(args, d_out, block=shape["block"], interpret=None, lengths=jnp.array([507, 401]), poison=("k", "v", "cis"))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 4092, 4095, 4097])
def test_b1_lengths(length, poison_free_memory):
    """Three runs over freed memory that holds NaN give the same bits."""
    args, d_out = inputs(length, length, group=4, block=64, count=4)
    runs = []
    for _ in range(3):
        poison_free_memory()
        runs.append(check(args, d_out, block=64, interpret=None))
    for other in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, runs[0], other)


@pytest.mark.gpu
@pytest.mark.parametrize("n_blocks", [1, 7, 8, 9])
def test_b2_everything_selected_is_dense_attention_with_the_bias(n_blocks):
    """One block, C - 1, C and C + 1 blocks for C = 8."""
    args, d_out = inputs(n_blocks * 64, n_blocks * 64, kv=2, group=4, block=64, count=8)
    check(args, d_out, block=64, interpret=None)


@pytest.mark.gpu
def test_s2_507_tokens_8_heads_2_kv_heads_2_blocks():
    args, d_out = inputs(507, 507, kv=2, group=4, block=64, count=2)
    check(args, d_out, block=64, interpret=None)


@pytest.mark.gpu
def test_s3_gradient_of_a_block_that_every_query_selects():
    """The relative error of dk, dv and dcis does not grow with the queries that are summed."""
    errors = []
    for queries in (512, 32_768):
        (q, k, v, cis, _, _), d_out = inputs(queries, max(queries, 64), group=4, block=64, count=1)
        k, v, cis = k[:, :64], v[:, :64], cis[:, :64]
        ids, positions = jnp.zeros((1, queries, 1, 1), jnp.int32), jnp.full((1, queries), 63)
        args = (q, k, v, cis, ids, positions)
        d_lse = jnp.zeros(q.shape[:3], jnp.float32)
        actual = everything(args, None, d_out, d_lse, block=64, implementation="kernel")
        exact = in_float32(args, None, d_out, d_lse, 64)
        norm = lambda x: float(jnp.linalg.norm(x.astype(jnp.float32)))  # noqa: E731
        errors.append([norm(a - e) / norm(e) for a, e in zip(actual[3:], exact[3:], strict=True)])
    assert np.max(errors) < 1e-2
    assert (np.array(errors[1]) < 2 * np.array(errors[0]) + 1e-3).all(), errors


@pytest.mark.gpu
def test_b5_more_than_2_to_the_31_elements():
    """Only the last queries and the last block are not zero; they are what is read and what is written."""
    length, heads = 2**20 + 64, 32
    rng = np.random.default_rng(5)
    last = [jnp.asarray(rng.normal(size=(1, 64, n, 64)), jnp.bfloat16) for n in (heads, 2, 2)]
    q, k, v = (jnp.zeros((1, length, x.shape[2], 64), jnp.bfloat16).at[:, -64:].set(x) for x in last)
    assert q.size > 2**31
    ids = jnp.broadcast_to((jnp.arange(length, dtype=jnp.int32) // 64)[None, :, None, None], (1, length, 2, 1))
    out, _ = public(q, k, v, None, ids, block_size=64, implementation="mosaic_gpu")
    positions = jnp.arange(64, dtype=jnp.int32)[None]
    wide = [x.astype(jnp.float32) for x in last]
    expected, _ = reference.with_lse(*wide, None, jnp.zeros((1, 64, 2, 1), jnp.int32), positions, block_size=64)
    assert_near("out", out[:, -64:], expected)
    assert not out[:, :-64].any()


@pytest.mark.gpu
def test_the_library_chooses_the_kernels_and_differentiates_through_them():
    args, d_out = inputs(300, 300, kv=2, group=4, block=64, count=3)
    d_lse = jnp.zeros(d_out.shape[:3], jnp.float32)
    chosen = everything(args, None, d_out, d_lse, block=64, implementation=None)
    named = everything(args, None, d_out, d_lse, block=64, implementation="mosaic_gpu")
    jax.tree.map(np.testing.assert_array_equal, chosen, named)
