"""Inputs in the layouts of the GPU kernels: the rows of a tile together, padded to whole tiles and blocks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nosa_jax.pallas_kernels.sparse_attention.tiling import Tiling
from nosa_jax.pallas_kernels.sparse_attention.unions import TileUnions, tile_unions


class KernelInputs(NamedTuple):
    """What forward and backward kernels read, for R = batch * KV heads rows of tiles of queries.

    q: [R * tiles * tile rows, H]. k, v: [R * padded keys, H], finite everywhere. cis: [R * padded keys] float32.
    limits: [R * tiles * tile rows] int32, the last key position that a query row may see, -1 for none.
    unions: the blocks that each tile's queries selected.
    """

    tiling: Tiling
    q: jax.Array
    k: jax.Array
    v: jax.Array
    cis: jax.Array | None
    limits: jax.Array
    unions: TileUnions


class QueryCotangents(NamedTuple):
    """What the backward kernels read besides, in the layout of q.

    d_out: cotangent of the output. lse2: the log of the sum of exponentials in base 2, finite; beyond any logit in rows
    that only pad, whose weights are 0 then, however large the bias. delta: the sum of out * d_out over the head
    dimension, less the cotangent of the natural log-sum-exp.
    """

    d_out: jax.Array
    lse2: jax.Array
    delta: jax.Array


def row_limits(
    positions: jax.Array | None, lengths: jax.Array | None, n_queries: int, n_keys: int, batch: int
) -> jax.Array:
    """[B, T] int32: the last key that each query may see, -1 for a query beyond its row's length."""
    if positions is None:
        positions = jnp.arange(n_queries, dtype=jnp.int32)[None]
    ends = jnp.int32(n_keys) if lengths is None else jnp.minimum(lengths.astype(jnp.int32), n_keys)[:, None]
    limits = jnp.minimum(positions.astype(jnp.int32), ends - 1)
    if lengths is not None:
        limits = jnp.where(positions < ends, limits, -1)
    return jnp.broadcast_to(limits, (batch, n_queries))


def query_rows(x: jax.Array, n_kv: int, tiling: Tiling, padding_value: float = 0.0) -> jax.Array:
    """[B, T, N, ...] to [B * K * tiles * rows, ...], with rows that only pad."""
    batch, length, n_heads, *rest = x.shape
    x = x.reshape(batch, length, n_kv, n_heads // n_kv, *rest)
    missing = -length % tiling.tokens
    padding = ((0, 0), (0, missing), (0, 0), (0, tiling.padded_group - tiling.group), *((0, 0),) * len(rest))
    return jnp.moveaxis(jnp.pad(x, padding, constant_values=padding_value), 2, 1).reshape(-1, *rest)


def from_query_rows(rows: jax.Array, shape: tuple[int, ...], n_kv: int, tiling: Tiling) -> jax.Array:
    """The inverse of `query_rows`, for rows [R, ...] and the shape [B, T, N, ...] wanted."""
    batch, length = shape[:2]
    x = rows.reshape(batch, n_kv, -1, tiling.padded_group, *rows.shape[1:])
    return jnp.moveaxis(x[:, :, :length, : tiling.group], 1, 2).reshape(shape)


def key_rows(x: jax.Array, lengths: jax.Array | None, block_size: int) -> jax.Array:
    """[B, S, K, ...] to [B * K * padded S, ...]; padding and what lies beyond a row's length become 0."""
    batch, length = x.shape[:2]
    if lengths is not None:
        beyond = jnp.arange(length)[None] >= lengths[:, None]
        x = jnp.where(beyond.reshape(batch, length, *(1,) * (x.ndim - 2)), 0, x)
    x = jnp.pad(x, ((0, 0), (0, -length % block_size), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x, 2, 1).reshape(-1, *x.shape[3:])


def from_key_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `key_rows`, for the shape [B, S, K, ...] wanted."""
    batch, length, n_kv = shape[:3]
    return jnp.moveaxis(rows.reshape(batch, n_kv, -1, *shape[3:])[:, :, :length], 1, 2)


def kernel_inputs(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cis: jax.Array | None,
    block_ids: jax.Array,
    positions: jax.Array | None,
    lengths: jax.Array | None,
    *,
    block_size: int,
    warpgroups: int,
) -> KernelInputs:
    """The arguments of `sparse_attention` for kernels with that many consumer warpgroups."""
    batch, n_queries, n_heads, head_dim = q.shape
    n_keys, n_kv = k.shape[1:3]
    tiling = Tiling.choose(head_dim, block_size, n_heads // n_kv, warpgroups)
    limits = row_limits(positions, lengths, n_queries, n_keys, batch)
    seen = jnp.where(block_ids <= (limits // block_size)[:, :, None, None], block_ids, -1)
    padded = jnp.pad(limits, ((0, 0), (0, -n_queries % tiling.tokens)), constant_values=-1)
    per_row = jnp.broadcast_to(padded[:, None, :, None], (batch, n_kv, padded.shape[1], tiling.padded_group))
    return KernelInputs(
        tiling,
        query_rows(q, n_kv, tiling),
        key_rows(k, lengths, block_size),
        key_rows(v, lengths, block_size),
        None if cis is None else key_rows(cis.astype(jnp.float32), lengths, block_size),
        per_row.reshape(-1),
        tile_unions(seen, -(-n_keys // block_size), tiling.tokens),
    )
