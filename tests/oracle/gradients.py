"""Closed-form float64 gradients of the attention over a selection and of the eviction head (docs/, gradients).

The selection itself is a constant: nothing flows through it.
"""

import numpy as np

from .nosa_numpy import Array, attention_weights, sigmoid, softplus, visible_tokens


def sparse_attention_grad(q, k, v, cis, block_ids, positions, block_size: int, d_out) -> tuple[Array, ...]:
    """Cotangents (dq, dk, dv, dcis) of `nosa_numpy.sparse_attention` for the output's cotangent d_out[B,T,N,H].

    With p the attention weights and o the output: dcis_t = sum_g p_t (do·(v_t - o)), and the logit's cotangent, which
    is the same number before the sum over the group, gives dq and dk.
    """
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dcis = np.zeros(k.shape[:3])
    group = q.shape[2] // k.shape[2]
    scale = 1.0 / np.sqrt(q.shape[-1])
    for b, t, h in np.ndindex(q.shape[0], q.shape[1], k.shape[2]):
        tokens = visible_tokens(block_ids[b, t, h], int(positions[b, t]), k.shape[1], block_size)
        if not len(tokens):
            continue
        heads = slice(h * group, (h + 1) * group)
        queries, keys, values, d_rows = q[b, t, heads], k[b, tokens, h], v[b, tokens, h], d_out[b, t, heads]
        p = attention_weights(queries, keys, None if cis is None else cis[b, tokens, h])
        d_logits = p * (d_rows @ values.T - (d_rows * (p @ values)).sum(-1, keepdims=True))
        dq[b, t, heads] = scale * d_logits @ keys
        dk[b, tokens, h] += scale * d_logits.T @ queries
        dv[b, tokens, h] += p.T @ d_rows
        dcis[b, tokens, h] += d_logits.sum(0)
    return dq, dk, dv, dcis


def eviction_scores_grad(v: Array, delta: Array, scale: Array, d_cis: Array) -> tuple[Array, Array, Array]:
    """Cotangents (dv, d_delta, dA) of `nosa_numpy.eviction_scores` for d_cis[B,S,K]."""
    flat = v.reshape(-1, delta.shape[1])
    z = flat @ delta.T
    d_cis = d_cis.reshape(z.shape)
    dz = d_cis * scale * sigmoid(z)
    return (dz @ delta).reshape(v.shape), dz.T @ flat, (d_cis * softplus(z)).sum(0)
