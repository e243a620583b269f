"""Query-aware block scores in plain jnp: softmax over visible windows, sum over the group, max over the block."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from nosa_jax.pallas_kernels.pooling.reference import pool_blocks


def window_scores(q: jax.Array, pooled_k: jax.Array, positions: jax.Array, *, window: int, stride: int) -> jax.Array:
    """Group-summed softmax probabilities of pooled keys: float32 [B, T, K, W], -inf where a window is not visible."""
    batch, length, n_heads, head_dim = q.shape
    n_kv, n_windows = pooled_k.shape[1:3]
    grouped = q.reshape(batch, length, n_kv, n_heads // n_kv, head_dim)
    logits = jnp.einsum(
        "btkgh,bkwh->btkgw",
        grouped,
        pooled_k.astype(q.dtype),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    ) / math.sqrt(head_dim)
    last_token = jnp.arange(n_windows) * stride + window - 1
    visible = (last_token <= positions[..., None])[:, :, None, None, :]
    logits = jnp.where(visible, logits, -jnp.inf)
    top = logits.max(axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.where(visible, jnp.exp(logits - jnp.where(jnp.isneginf(top), 0.0, top)), 0.0)
    normaliser = weights.sum(axis=-1, keepdims=True)
    probabilities = weights / jnp.where(normaliser == 0, 1.0, normaliser)
    return jnp.where(visible[:, :, :, 0], probabilities.sum(axis=3), -jnp.inf)


def pooled_scores(
    q: jax.Array, pooled_k: jax.Array, positions: jax.Array, *, n_blocks: int, block_size: int, window: int, stride: int
) -> jax.Array:
    """Block scores [B, T, K, M] in float32; -inf where a block has no visible window."""
    scores = window_scores(q, pooled_k, positions, window=window, stride=stride)
    return pool_blocks(scores, n_blocks=n_blocks, windows_per_block=block_size // stride)
