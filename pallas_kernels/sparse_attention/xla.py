"""Attention of long inputs as masked matrix products, a chunk of queries at a time.

A chunk of t queries holds its logits [B, N, t, S] in float32 and nothing of size T * S exists, in the forward pass
or (each chunk is recomputed there) in the backward pass. Matrix products over all keys beat gathering the selected
ones on machines without a sparse kernel. Keys that no query of a chunk can see because they come later are cut off
in a few static steps.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from nosa_jax.pallas_kernels.query_chunks import map_query_chunks

QUERY_CHUNK = 128  # query positions whose logits exist at once
KEY_TIERS = 4  # static key lengths; 4 tiers spend 62.5 % of the products that one full length would


def _masked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One chunk: q [B, t, N, H], k and v [B, S, K, H], bias [B, S, K], mask [B, t, K or 1, S].

    Returns the output and the log of the sum of exponentials [B, t, N].
    """
    batch, length, n_heads, head_dim = q.shape
    n_kv = k.shape[2]
    grouped = q.reshape(batch, length, n_kv, n_heads // n_kv, head_dim)
    logits = jnp.einsum(
        "btkgh,bskh->bktgs",
        grouped,
        k,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
    ) / math.sqrt(head_dim)
    if bias is not None:
        logits = logits + jnp.moveaxis(bias, 2, 1)[:, :, None, None]
    logits = jnp.where(jnp.moveaxis(mask, 2, 1)[:, :, :, None], logits, -jnp.inf)
    top = lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(logits - top)
    total = weights.sum(axis=-1)
    out = jnp.einsum(
        "bktgs,bskh->btkgh",
        weights.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if v.dtype == jnp.float32 else None,
    )
    total, top = jnp.moveaxis(total, 2, 1), jnp.moveaxis(top[..., 0], 2, 1)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    return (out / total[..., None]).reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:3])


def _tiers(n_queries: int, n_keys: int, aligned: bool) -> list[tuple[int, int, int]]:
    """Query ranges and how many keys each can see: [(first, end, keys)]."""
    tiers = min(KEY_TIERS, -(-n_queries // QUERY_CHUNK)) if aligned else 1
    step = -(-n_queries // (tiers * QUERY_CHUNK)) * QUERY_CHUNK
    bounds = range(0, n_queries, step)
    return [(first, min(first + step, n_queries), min(first + step, n_keys) if aligned else n_keys) for first in bounds]


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cis: jax.Array | None,
    block_ids: jax.Array | None,
    positions: jax.Array | None,
    lengths: jax.Array | None = None,
    *,
    block_size: int,
) -> jax.Array:
    """[B, T, N, H]; block_ids None selects everything, positions None puts query i at position i."""
    return with_lse(q, k, v, cis, block_ids, positions, lengths, block_size=block_size)[0]


def with_lse(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cis: jax.Array | None,
    block_ids: jax.Array | None,
    positions: jax.Array | None,
    lengths: jax.Array | None = None,
    *,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """The same with the log of the sum of exponentials [B, T, N], float32, -inf where a query sees nothing."""
    batch, length = q.shape[:2]
    aligned = positions is None
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))

    outputs = []
    for first, end, n_keys in _tiers(length, k.shape[1], aligned):
        k_part, v_part = k[:, :n_keys], v[:, :n_keys]
        cis_part = None if cis is None else cis[:, :n_keys]

        def attend(
            q_chunk: jax.Array,
            positions_chunk: jax.Array,
            *ids: jax.Array,
            k: jax.Array = k_part,
            v: jax.Array = v_part,
            bias: jax.Array | None = cis_part,
        ) -> tuple[jax.Array, jax.Array]:
            mask = (jnp.arange(k.shape[1]) <= positions_chunk[..., None])[:, :, None]
            if lengths is not None:
                mask &= (jnp.arange(k.shape[1]) < lengths[:, None])[:, None, None]
                mask &= (positions_chunk < lengths[:, None])[:, :, None, None]
            if ids:
                blocks = jnp.arange(-(-k.shape[1] // block_size))
                selected = (ids[0][..., None] == blocks).any(axis=-2)
                mask = mask & jnp.repeat(selected, block_size, axis=-1)[..., : k.shape[1]]
            return _masked_attention(q_chunk, k, v, bias, mask)

        per_query = (q, positions) if block_ids is None else (q, positions, block_ids)
        outputs.append(map_query_chunks(attend, tuple(x[:, first:end] for x in per_query), QUERY_CHUNK, remat=True))
    return outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *outputs)
