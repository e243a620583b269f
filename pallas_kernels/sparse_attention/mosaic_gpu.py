"""Sparse attention on Hopper GPUs: layouts around the kernels of `mosaic_forward` and `mosaic_backward`."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels.sparse_attention import mosaic_forward
from nosa_jax.pallas_kernels.sparse_attention.tiling import Tiling
from nosa_jax.pallas_kernels.sparse_attention.unions import tile_unions


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
    """[B, T, N, H] to [B * K * tiles * rows, H]; padding is zero."""
    batch, length, n_heads, head_dim = x.shape
    x = x.reshape(batch, length, n_kv, n_heads // n_kv, head_dim)
    missing = -length % tiling.tokens
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, tiling.padded_group - tiling.group), (0, 0)))
    return jnp.moveaxis(x, 2, 1).reshape(-1, head_dim)


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


def sparse_attention(
    q, k, v, cis, block_ids, positions, lengths, *, block_size, warpgroups=2, interpret=None
):
    batch, n_queries, n_heads, head_dim = q.shape
    n_keys, n_kv = k.shape[1:3]
    n_blocks = -(-n_keys // block_size)
    tiling = Tiling.choose(head_dim, block_size, n_heads // n_kv, warpgroups)
    limits = row_limits(positions, lengths, n_queries, n_keys, batch)
    ids = jnp.where(block_ids <= (limits // block_size)[:, :, None, None], block_ids, -1)
    unions = tile_unions(ids, n_blocks, tiling.tokens)
    padded = jnp.pad(limits, ((0, 0), (0, -n_queries % tiling.tokens)), constant_values=-1)
    row_limit = jnp.broadcast_to(padded[:, None, :, None], (batch, n_kv, padded.shape[1], tiling.padded_group))
    out, lse = mosaic_forward.forward(
        query_rows(q, n_kv, tiling), key_rows(k, lengths, block_size), key_rows(v, lengths, block_size),
        None if cis is None else key_rows(cis.astype(jnp.float32), lengths, block_size),
        unions, row_limit.reshape(-1), tiling, interpret,
    )
    return from_query_rows(out, q.shape, n_kv, tiling), from_query_rows(lse, q.shape[:3], n_kv, tiling)
