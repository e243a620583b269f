"""Attention over selected blocks in JAX, forward and gradients, against the float64 oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.pallas_kernels import sparse_attention
from tests.oracle import gradients
from tests.oracle import nosa_numpy as oracle
from tests.oracle.compare import IMPLEMENTATIONS, assert_close

INT_MAX = np.iinfo(np.int32).max
NAMES = ("dq", "dk", "dv", "dcis")


@partial(jax.jit, static_argnames=("block_size", "implementation"))
def forward_and_gradients(q, k, v, cis, ids, positions, d_out, block_size, implementation):
    out, pullback = jax.vjp(
        lambda *x: sparse_attention(*x, ids, positions, block_size=block_size, implementation=implementation),
        q, k, v, cis,
    )  # fmt: skip
    return out, pullback(d_out)


attend = jax.jit(sparse_attention, static_argnames=("block_size", "implementation"))


def inputs(seed, queries, keys, *, batch=2, group=2, kv_heads=2, head_dim=8):
    """q, k, v, cis and the output's cotangent, float32; cis has both signs."""
    rng = np.random.default_rng(seed)
    shapes = (batch, queries, group * kv_heads, head_dim), (batch, keys, kv_heads, head_dim)
    arrays = [rng.normal(size=s) for s in (shapes[0], shapes[1], shapes[1], shapes[1][:3], shapes[0])]
    return [x.astype(np.float32) for x in arrays]


def random_ids(seed, positions, kv_heads, n_blocks, block_size, count):
    """Distinct ids up to the current block, fewer where there are fewer, -1 after them."""
    rng = np.random.default_rng(seed)
    out = np.full((*positions.shape, kv_heads, count), -1, np.int32)
    for index in np.ndindex(out.shape[:-1]):
        candidates = rng.permutation(min(positions[index[:2]] // block_size + 1, n_blocks))[:count]
        out[index][: len(candidates)] = np.sort(candidates)
    return out


def check(arrays, ids, positions, block_size, implementation, tolerance=3e-6):
    *tensors, d_out = arrays
    out, grads = forward_and_gradients(*tensors, ids, positions, d_out, block_size, implementation)
    exact = [oracle.f64(x) for x in tensors]
    assert_close(out, oracle.sparse_attention(*exact, ids, positions, block_size), tolerance)
    expected = gradients.sparse_attention_grad(*exact, ids, positions, block_size, oracle.f64(d_out))
    for name, actual, wanted in zip(NAMES, grads, expected, strict=True):
        assert actual.shape == wanted.shape, name
        assert_close(actual, wanted, tolerance)
    return out, grads


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129])
def test_b1_lengths_around_blocks(length, implementation, poison_free_memory):
    """Forward and all gradients, three runs over freed memory that holds NaN."""
    arrays = inputs(length, length, length)
    positions = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    ids = random_ids(length, positions, 2, -(-length // 64), 64, 2)
    runs = []
    for _ in range(3):
        poison_free_memory()
        runs.append(check(arrays, ids, positions, 64, implementation))
    for other in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, runs[0], other)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [4092, 4095, 4097])
def test_b1_long_lengths_with_fewer_queries_than_keys(length, implementation):
    """T != S: the last 5 positions and some earlier ones attend to a long sequence."""
    positions = np.array([[0, 63, 2000, *range(length - 5, length)]], np.int32)
    arrays = inputs(length, positions.shape[1], length, batch=1)
    check(arrays, random_ids(1, positions, 2, -(-length // 64), 64, 12), positions, 64, implementation)


def test_b1_long_length_with_queries_everywhere():
    """The chunked implementation over 4097 queries, aligned with the keys; every 97th output against the oracle."""
    length = 4097
    q, k, v, cis, d_out = inputs(3, length, length, batch=1, group=1, kv_heads=1)
    positions = np.arange(length, dtype=np.int32)[None]
    ids = random_ids(2, positions, 1, 65, 64, 6)
    rows = np.arange(0, length, 97)
    d_out[:, np.setdiff1d(np.arange(length), rows)] = 0
    out, pullback = jax.vjp(lambda *x: attend(*x, ids, block_size=64, implementation="xla"), q, k, v, cis)
    exact = [oracle.f64(x) for x in (q[:, rows], k, v, cis)]
    assert_close(out[:, rows], oracle.sparse_attention(*exact, ids[:, rows], positions[:, rows], 64), 3e-6)
    expected = gradients.sparse_attention_grad(*exact, ids[:, rows], positions[:, rows], 64, oracle.f64(d_out[:, rows]))
    dq, *rest = pullback(d_out)
    assert not np.delete(np.asarray(dq), rows, axis=1).any()
    for actual, wanted in zip((dq[:, rows], *rest), expected, strict=True):
        assert_close(actual, wanted, 3e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("group", "head_dim", "block_size"), [(1, 2, 5), (3, 6, 4), (8, 10, 16), (16, 16, 8)])
def test_any_group_head_dim_and_block_size(group, head_dim, block_size, implementation):
    arrays = inputs(group, 33, 33, group=group, head_dim=head_dim)
    positions = np.tile(np.arange(33, dtype=np.int32), (2, 1))
    check(
        arrays, random_ids(5, positions, 2, -(-33 // block_size), block_size, 3), positions, block_size, implementation
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_bias_equals_zero_bias(implementation):
    q, k, v, cis, _ = inputs(0, 20, 20)
    positions = np.tile(np.arange(20, dtype=np.int32), (2, 1))
    ids = random_ids(0, positions, 2, 5, 4, 3)
    kwargs = dict(block_size=4, implementation=implementation)
    out = attend(q, k, v, None, ids, positions, **kwargs)
    np.testing.assert_allclose(out, attend(q, k, v, np.zeros_like(cis), ids, positions, **kwargs), rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("n_blocks", [1, 3, 4, 5])
def test_b2_everything_selected_equals_dense_with_bias(n_blocks, implementation):
    length = 4 * n_blocks - 1
    arrays = inputs(n_blocks, length, length)
    positions = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    ids = oracle.every_block(positions, 2, 4, n_blocks).astype(np.int32)
    check(arrays, ids, positions, 4, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_documents_in_rows_of_their_own_equal_each_alone(implementation):
    """Boundaries 0, 781 and 2048: two rows with lengths give every document what it gets alone, gradients included."""
    lengths, block = (781, 1267), 64
    q, k, v, cis, d_out = inputs(3, max(lengths), max(lengths))
    positions = np.arange(max(lengths), dtype=np.int32)[None].repeat(2, axis=0)
    ids = random_ids(3, positions, 2, -(-max(lengths) // block), block, 4)

    @jax.jit
    def run(q, k, v, cis, ids, d_out, lengths):
        out, pullback = jax.vjp(
            lambda *x: sparse_attention(*x, ids, None, lengths, block_size=block, implementation=implementation),
            q, k, v, cis,
        )  # fmt: skip
        return out, *pullback(d_out)

    together = run(q, k, v, cis, ids, d_out, jnp.asarray(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        alone = run(*(x[row : row + 1, :length] for x in (q, k, v, cis, ids, d_out)), None)
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a[row : row + 1, :length], b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("padding", [-1, 6, INT_MAX, np.iinfo(np.int32).min])
def test_b3_padding_touches_nothing(padding, implementation):
    """Rows with 0, 1, C-1 and C ids; padding of every kind leaves outputs and gradients alone.

    The last block holds 1e4, so an id of -1 taken for it would show everywhere.
    """
    count, n_blocks, block_size = 3, 6, 4
    arrays = inputs(9, 24, 23)
    for x in arrays[1:4]:
        x[:, (n_blocks - 1) * block_size :] = 1e4
    positions = np.tile(np.arange(24, dtype=np.int32), (2, 1))
    ids = random_ids(9, positions, 2, n_blocks - 1, block_size, count)
    for row, length in enumerate((0, 1, count - 1)):
        ids[:, row::4, :, length:] = -1
    *tensors, d_out = arrays
    padded = np.where(ids < 0, np.int32(padding), ids)
    out, grads = check(arrays, padded, positions, block_size, implementation)
    clean_out, clean_grads = forward_and_gradients(*tensors, ids, positions, d_out, block_size, implementation)
    np.testing.assert_array_equal(out, clean_out)
    jax.tree.map(np.testing.assert_array_equal, grads, clean_grads)
    assert not np.asarray(out[:, ::4]).any()
    assert not np.asarray(grads[0][:, ::4]).any()
    for grad in grads[1:]:
        assert not np.asarray(grad[:, (n_blocks - 1) * block_size :]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shift", [1.0, -6e4, -1e5, 1e5])
def test_b4_constant_shift_of_logits_changes_no_bit(shift, implementation):
    """Inputs on a coarse grid, so that shifted logits are exact in float32 and any difference is a fault."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.integers(-3, 4, size=(1, 16, 2, 4)).astype(np.float32) for _ in range(3))
    cis = rng.integers(-4, 5, size=(1, 16, 2)).astype(np.float32) / 2
    positions = np.arange(16, dtype=np.int32)[None]
    ids = random_ids(4, positions, 2, 4, 4, 2)
    d_out = rng.normal(size=q.shape).astype(np.float32)
    plain = forward_and_gradients(q, k, v, cis, ids, positions, d_out, 4, implementation)
    shifted = forward_and_gradients(q, k, v, cis + np.float32(shift), ids, positions, d_out, 4, implementation)
    jax.tree.map(np.testing.assert_array_equal, plain, shifted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_b4_later_tokens_change_nothing(implementation):
    q, k, v, cis, _ = inputs(6, 24, 24)
    positions = np.tile(np.arange(24, dtype=np.int32), (2, 1))
    ids = oracle.every_block(positions, 2, 4, 6).astype(np.int32)
    kwargs = dict(block_size=4, implementation=implementation)
    before = attend(q, k, v, cis, ids, positions, **kwargs)
    for x in (k, v, cis):
        x[:, 14:] = 77.0
    np.testing.assert_array_equal(attend(q, k, v, cis, ids, positions, **kwargs)[:, :14], before[:, :14])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_s2_backward_of_507_tokens_8_heads_and_2_selected_blocks(implementation):
    """A length that fills no block, group 4, fewer blocks selected than exist."""
    positions = np.arange(507, dtype=np.int32)[None]
    arrays = inputs(507, 507, 507, batch=1, group=4)
    check(arrays, random_ids(507, positions, 2, 8, 64, 2), positions, 64, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_s3_gradient_of_a_block_that_every_query_selects(implementation):
    """The error of dk, dv and dcis does not grow with the number of queries that are summed."""
    errors = []
    for queries in (256, 2048):
        arrays = inputs(7, queries, 16, batch=1, kv_heads=1)
        positions = np.full((1, queries), 15, np.int32)
        ids = np.full((1, queries, 1, 2), -1, np.int32)
        ids[..., 0] = 1
        *tensors, d_out = arrays
        _, grads = forward_and_gradients(*tensors, ids, positions, d_out, 8, implementation)
        exact = [oracle.f64(x) for x in tensors]
        expected = gradients.sparse_attention_grad(*exact, ids, positions, 8, oracle.f64(d_out))
        errors.append([np.linalg.norm(a - w) / np.linalg.norm(w) for a, w in zip(grads[1:], expected[1:], strict=True)])
    assert np.max(errors) < 3e-6
    assert (np.array(errors[1]) < 4 * np.array(errors[0]) + 1e-7).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_inputs_stay_close_to_the_oracle(implementation):
    q, k, v, cis, _ = inputs(8, 48, 48)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    positions = np.tile(np.arange(48, dtype=np.int32), (2, 1))
    ids = random_ids(8, positions, 2, 6, 8, 3)
    out = attend(*low, cis, ids, positions, block_size=8, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    exact = oracle.sparse_attention(*(oracle.f64(x) for x in low), oracle.f64(cis), ids, positions, 8)
    assert_close(out, exact, 0.006)
