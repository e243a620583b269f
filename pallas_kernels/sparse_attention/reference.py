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
    *,
    block_size: int,
) -> jax.Array:
    """[B, T, N, H] in the dtype of q, computed in float32; memory grows with T * C * block_size."""
    batch, length, n_heads, head_dim = q.shape
    n_keys, n_kv = k.shape[1:3]
    n_blocks = -(-n_keys // block_size)
    grouped = q.astype(jnp.float32).reshape(batch, length, n_kv, n_heads // n_kv, head_dim)

    in_range = (block_ids >= 0) & (block_ids < n_blocks)
    tokens = jnp.where(in_range, block_ids, 0)[..., None] * block_size + jnp.arange(block_size)
    visible = in_range[..., None] & (tokens <= positions[:, :, None, None, None]) & (tokens < n_keys)
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
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("btkgj,btkjh->btkgh", weights, selected_v, precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape).astype(q.dtype)
