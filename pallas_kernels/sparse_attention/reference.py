"""Attention over selected blocks in plain jnp: every query gathers the keys and values of its own blocks."""

import math

import jax
import jax.numpy as jnp
from jax import lax


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cis: jax.Array | None,
    block_ids: jax.Array,
    positions: jax.Array,
    lengths: jax.Array | None = None,
    *,
    block_size: int,
) -> jax.Array:
    """[B, T, N, H] in the dtype of q, computed in float32; memory grows with T * C * block_size."""
    return with_lse(q, k, v, cis, block_ids, positions, lengths, block_size=block_size)[0]


def with_lse(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cis: jax.Array | None,
    block_ids: jax.Array,
    positions: jax.Array,
    lengths: jax.Array | None = None,
    *,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """The same with the log of the sum of exponentials [B, T, N], float32, -inf where a query sees nothing."""
    batch, length, n_heads, head_dim = q.shape
    n_keys, n_kv = k.shape[1:3]
    n_blocks = -(-n_keys // block_size)
    grouped = q.astype(jnp.float32).reshape(batch, length, n_kv, n_heads // n_kv, head_dim)

    in_range = (block_ids >= 0) & (block_ids < n_blocks)
    tokens = jnp.where(in_range, block_ids, 0)[..., None] * block_size + jnp.arange(block_size)
    visible = in_range[..., None] & (tokens <= positions[:, :, None, None, None]) & (tokens < n_keys)
    if lengths is not None:
        ends = lengths[:, None, None, None]
        visible &= (tokens < ends[..., None]) & (positions[:, :, None, None] < ends)[..., None]
    tokens = jnp.where(visible, tokens, 0).reshape(batch, length, n_kv, -1)
    visible = visible.reshape(tokens.shape)

    def gather(x_bskf: jax.Array) -> jax.Array:
        rows = jnp.arange(batch)[:, None, None, None]
        heads = jnp.arange(n_kv)[None, None, :, None]
        return x_bskf.astype(jnp.float32)[rows, tokens, heads]

    selected_k = jnp.where(visible[..., None], gather(k), 0.0)
    selected_v = jnp.where(visible[..., None], gather(v), 0.0)
    logits = jnp.einsum("btkgh,btkjh->btkgj", grouped, selected_k, precision=lax.Precision.HIGHEST)
    logits = logits / math.sqrt(head_dim)
    if cis is not None:
        logits = logits + jnp.where(visible, gather(cis), 0.0)[:, :, :, None]
    logits = jnp.where(visible[:, :, :, None], logits, -jnp.inf)
    top = lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    weights = weights / total
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    out = jnp.einsum("btkgj,btkjh->btkgh", weights, selected_v, precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:3])
