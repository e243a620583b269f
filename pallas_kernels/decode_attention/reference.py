"""Attention of one query per row over cache slots, in plain jnp."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from nosa_jax.pallas_kernels.decode_attention.merge import Partial


def decode_attention(
    q: jax.Array,
    slots: jax.Array,
    cis: jax.Array | None,
    slot_ids: jax.Array,
    block_ids: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """[B, N, H] in the dtype of q; logits, softmax and sums in float32."""
    return decode_attention_partial(q, slots, cis, slot_ids, block_ids, lengths).out.astype(q.dtype)


def decode_attention_partial(
    q: jax.Array,
    slots: jax.Array,
    cis: jax.Array | None,
    slot_ids: jax.Array,
    block_ids: jax.Array,
    lengths: jax.Array,
) -> Partial:
    """Out [B, N, H] and lse [B, N], float32."""
    batch, n_heads, head_dim = q.shape
    n_kv, _, _, block_size = slots.shape[1:5]
    grouped = q.reshape(batch, n_kv, n_heads // n_kv, head_dim)

    # Compared as blocks, since the tokens of a very large id overflow.
    blocks = (lengths + block_size - 1) // block_size
    valid = (slot_ids >= 0) & (block_ids >= 0) & (block_ids < blocks[:, None, None])
    pages = jnp.take_along_axis(slots, jnp.where(valid, slot_ids, 0)[..., None, None, None], axis=2)
    safe_ids = jnp.where(valid, block_ids, 0)
    tokens = safe_ids[..., None] * block_size + jnp.arange(block_size)
    visible = valid[..., None] & (tokens < lengths[:, None, None, None])  # [B, K, C, P]

    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    # What lies in a slot beyond a row's length is undefined: it may be NaN, and 0 * NaN would spread.
    keys = jnp.where(visible[..., None], pages[:, :, :, 0], 0)
    values = jnp.where(visible[..., None], pages[:, :, :, 1], 0)
    logits = jnp.einsum(
        "bkgh,bkcph->bkgcp", grouped, keys, preferred_element_type=jnp.float32, precision=precision
    ) / math.sqrt(head_dim)
    if cis is not None:
        bias = jnp.take_along_axis(cis, safe_ids[..., None], axis=2)
        logits = logits + jnp.where(visible, bias, 0.0)[:, :, None]
    logits = jnp.where(visible[:, :, None], logits, -jnp.inf)
    top = logits.max(axis=(-2, -1), keepdims=True, initial=-jnp.inf)
    safe_top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(logits - safe_top)
    total = weights.sum(axis=(-2, -1))
    out = jnp.einsum(
        "bkgcp,bkcph->bkgh",
        weights.astype(slots.dtype),
        values,
        preferred_element_type=jnp.float32,
        precision=precision,
    )
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    lse = jnp.log(total) + safe_top[..., 0, 0]
    return Partial(out.reshape(q.shape), lse.reshape(q.shape[:2]))
