"""Sparse attention on Hopper GPUs: layouts around the kernels of `mosaic_forward`, `mosaic_dq` and `mosaic_dkv`."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels.sparse_attention import mosaic_dkv, mosaic_dq, mosaic_forward
from nosa_jax.pallas_kernels.sparse_attention.tiling import LOG2E, Tiling, forward_warpgroups
from nosa_jax.pallas_kernels.sparse_attention.unions import TileUnions, tile_unions
from nosa_jax.pallas_kernels.sparse_attention.visits import block_visits


def row_limits(positions, lengths, n_queries: int, n_keys: int, batch: int) -> jax.Array:
    """[B, T] int32: the last key that each query may see, -1 for a query beyond its row's length."""
    if positions is None:
        positions = jnp.arange(n_queries, dtype=jnp.int32)[None]
    ends = jnp.int32(n_keys) if lengths is None else jnp.minimum(lengths.astype(jnp.int32), n_keys)[:, None]
    limits = jnp.minimum(positions.astype(jnp.int32), ends - 1)
    if lengths is not None:
        limits = jnp.where(positions < ends, limits, -1)
    return jnp.broadcast_to(limits, (batch, n_queries))


def query_rows(x: jax.Array, n_kv: int, tiling: Tiling) -> jax.Array:
    """[B, T, N, ...] to [B * K * tiles * rows, ...]; padding is zero."""
    batch, length, n_heads, *rest = x.shape
    x = x.reshape(batch, length, n_kv, n_heads // n_kv, *rest)
    missing = -length % tiling.tokens
    padding = ((0, 0), (0, missing), (0, 0), (0, tiling.padded_group - tiling.group), *((0, 0),) * len(rest))
    return jnp.moveaxis(jnp.pad(x, padding), 2, 1).reshape(-1, *rest)


def from_query_rows(rows: jax.Array, shape: tuple[int, ...], n_kv: int, tiling: Tiling) -> jax.Array:
    """The inverse of `query_rows`, for rows [R, ...] and the shape [B, T, N, ...] wanted."""
    batch, length, n_heads = shape[:3]
    x = rows.reshape(batch, n_kv, -1, tiling.padded_group, *rows.shape[1:])
    return jnp.moveaxis(x[:, :, :length, : tiling.group], 1, 2).reshape(shape)


def key_rows(x: jax.Array, lengths: jax.Array | None, block_size: int) -> jax.Array:
    """[B, S, K, ...] to [B * K * padded S, ...]; padding and what lies beyond a row's length become 0."""
    batch, length, n_kv = x.shape[:3]
    if lengths is not None:
        beyond = jnp.arange(length)[None] >= lengths[:, None]
        x = jnp.where(beyond.reshape(batch, length, *(1,) * (x.ndim - 2)), 0, x)
    x = jnp.pad(x, ((0, 0), (0, -length % block_size), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x, 2, 1).reshape(-1, *x.shape[3:])


def from_key_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `key_rows`, for the shape [B, S, K, ...] wanted."""
    batch, length, n_kv = shape[:3]
    return jnp.moveaxis(rows.reshape(batch, n_kv, -1, *shape[3:])[:, :, :length], 1, 2)


class _Prepared(NamedTuple):
    """The inputs in the kernels' layouts."""

    tiling: Tiling
    limits: jax.Array
    unions: TileUnions
    q: jax.Array
    k: jax.Array
    v: jax.Array
    cis: jax.Array | None


def _prepare(q, k, v, cis, block_ids, positions, lengths, block_size: int, warpgroups: int) -> _Prepared:
    batch, n_queries, n_heads, head_dim = q.shape
    n_keys, n_kv = k.shape[1:3]
    tiling = Tiling.choose(head_dim, block_size, n_heads // n_kv, warpgroups)
    limits = row_limits(positions, lengths, n_queries, n_keys, batch)
    seen = jnp.where(block_ids <= (limits // block_size)[:, :, None, None], block_ids, -1)
    unions = tile_unions(seen, -(-n_keys // block_size), tiling.tokens)
    padded = jnp.pad(limits, ((0, 0), (0, -n_queries % tiling.tokens)), constant_values=-1)
    per_row = jnp.broadcast_to(padded[:, None, :, None], (batch, n_kv, padded.shape[1], tiling.padded_group))
    return _Prepared(
        tiling,
        per_row.reshape(-1),
        unions,
        query_rows(q, n_kv, tiling),
        key_rows(k, lengths, block_size),
        key_rows(v, lengths, block_size),
        None if cis is None else key_rows(cis.astype(jnp.float32), lengths, block_size),
    )


@partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _attend(q, k, v, cis, block_ids, positions, lengths, block_size, interpret, warpgroups):
    tiling, limits, unions, *tensors = _prepare(
        q, k, v, cis, block_ids, positions, lengths, block_size, warpgroups
    )
    out, lse = mosaic_forward.forward(*tensors, unions, limits, tiling, interpret)
    n_kv = k.shape[2]
    return from_query_rows(out, q.shape, n_kv, tiling), from_query_rows(lse, q.shape[:3], n_kv, tiling)


def _attend_forward(q, k, v, cis, block_ids, positions, lengths, block_size, interpret, warpgroups):
    out, lse = _attend(q, k, v, cis, block_ids, positions, lengths, block_size, interpret, warpgroups)
    return (out, lse), (q, k, v, cis, block_ids, positions, lengths, out, lse)


def _attend_backward(block_size, interpret, warpgroups, residuals, cotangents):
    del warpgroups
    q, k, v, cis, block_ids, positions, lengths, out, lse = residuals
    d_out, d_lse = cotangents
    n_kv = k.shape[2]
    tiling, limits, unions, q_rows, k_rows, v_rows, cis_rows = _prepare(
        q, k, v, cis, block_ids, positions, lengths, block_size, 2
    )
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1) - d_lse
    lse2 = jnp.where(jnp.isfinite(lse), lse * LOG2E, 0.0)
    per_query = tuple(query_rows(x, n_kv, tiling) for x in (d_out, lse2, delta))
    args = (q_rows, *per_query, limits, k_rows, v_rows, cis_rows)
    dq = mosaic_dq.query_gradient(*args, unions, tiling, interpret)
    visits = block_visits(unions, limits, -(-k.shape[1] // block_size))
    dk, dv, dcis = mosaic_dkv.key_gradients(*args, visits, tiling, interpret)
    dk, dv = from_key_rows(dk, k.shape), from_key_rows(dv, v.shape)
    dcis = None if dcis is None else from_key_rows(dcis, cis.shape).astype(cis.dtype)
    return from_query_rows(dq, q.shape, n_kv, tiling), dk, dv, dcis, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cis: jax.Array | None,
    block_ids: jax.Array,
    positions: jax.Array | None,
    lengths: jax.Array | None,
    *,
    block_size: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """[B, T, N, H] in the dtype of q and the log-sum-exp [B, T, N]; as `reference.sparse_attention`."""
    warpgroups = forward_warpgroups(q.shape[3], q.shape[2] // k.shape[2])
    return _attend(q, k, v, cis, block_ids, positions, lengths, block_size, interpret, warpgroups)
