"""NOSA's formulas in float64 NumPy: positions, eviction head, pooling, scores, selection and attention.

Written from the definition (arXiv 2510.13602 and docs/) and not from the JAX code, with plain loops where
they are the clearest statement. Shapes use the letters of docs/: B batch, T/S query/key positions, N/K query/KV
heads, G = N/K, H head dim, P tokens per block, M blocks, W windows, C selected blocks. Padding in a list of selected
blocks is -1.
"""

from typing import NamedTuple

import numpy as np

Array = np.ndarray
NONE = -1


class Geometry(NamedTuple):
    """Tokens per block, per pooling window, and between the starts of neighbouring windows."""

    block: int
    window: int
    stride: int

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block)

    def windows(self, tokens: int) -> int:
        """Complete windows among `tokens` tokens."""
        return 0 if tokens < self.window else (tokens - self.window) // self.stride + 1

    def last_token(self, window: int) -> int:
        """Position of the last token that window number `window` covers."""
        return window * self.stride + self.window - 1

    def windows_of(self, block: int, windows: int) -> list[int]:
        """The existing windows whose maximum is the score of `block`: r*b-1 .. r*b+r-1."""
        per_block = self.block // self.stride
        first = per_block * block - 1
        return [w for w in range(first, first + per_block + 1) if 0 <= w < windows]


class Budget(NamedTuple):
    """Blocks that each selection rule takes; `local` counts the current block."""

    sink: int
    local: int
    query: int
    evict: int

    @property
    def total(self) -> int:
        """C."""
        return self.sink + self.local + self.query + self.evict


def f64(x) -> Array:
    """Any array, bfloat16 included, as float64."""
    return np.asarray(x, dtype=np.float64)


def softplus(x: Array) -> Array:
    """log(1 + e^x) without overflow."""
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid(x: Array) -> Array:
    """The derivative of softplus, without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def softmax(x: Array) -> Array:
    """Softmax of the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x over its root mean square along the last axis, times `weight`."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rope(x: Array, positions: Array, theta: float, factors=None, attention_factor: float = 1.0) -> Array:
    """Rotate x[B,T,N,H] to positions[B,T]; pair i is (x[i], x[i + H/2]).

    Its frequency is 1 / (factors[i] * theta^(2i/H)), and the result is scaled by `attention_factor` (LongRoPE).
    """
    half = x.shape[-1] // 2
    factors = np.ones(half) if factors is None else f64(factors)
    frequency = 1.0 / (factors * theta ** (2.0 * np.arange(half) / x.shape[-1]))
    angle = f64(positions)[..., None, None] * frequency
    cos, sin = np.cos(angle) * attention_factor, np.sin(angle) * attention_factor
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def eviction_scores(v: Array, delta: Array, scale: Array) -> Array:
    """cis[B,S,K] = A[k] * softplus(delta[k] @ concat(v[s])): delta [K,K*H], A = `scale` [K], v before any RoPE."""
    heads = v.reshape(*v.shape[:2], -1)
    return scale * softplus(heads @ delta.T)


def pool_windows(x: Array, geometry: Geometry) -> Array:
    """Means over complete windows: x[B,S,K,...] -> [B,K,W,...]."""
    n = geometry.windows(x.shape[1])
    out = np.zeros((x.shape[0], x.shape[2], n, *x.shape[3:]))
    for w in range(n):
        start = w * geometry.stride
        out[:, :, w] = x[:, start : start + geometry.window].mean(axis=1)
    return out


def pool_blocks(windows: Array, n_blocks: int, geometry: Geometry) -> Array:
    """Maximum over each block's existing windows: [...,W] -> [...,M]; -inf for a block without any."""
    out = np.full((*windows.shape[:-1], n_blocks), -np.inf)
    for block in range(n_blocks):
        if members := geometry.windows_of(block, windows.shape[-1]):
            out[..., block] = windows[..., members].max(-1)
    return out


def window_scores(q: Array, pooled_k: Array, position: int, geometry: Geometry) -> Array:
    """One query position and KV head: q[G,H], pooled_k[W,H] -> s over the windows complete at `position`.

    Softmax over the visible windows for every query head, then the sum over the group.
    """
    visible = min(geometry.windows(position + 1), pooled_k.shape[0])
    if visible == 0:
        return np.zeros(0)
    return softmax(q @ pooled_k[:visible].T / np.sqrt(q.shape[-1])).sum(0)


def pooled_scores(q: Array, pooled_k: Array, positions: Array, n_blocks: int, geometry: Geometry) -> Array:
    """Query-aware block scores: q[B,T,N,H], pooled_k[B,K,W,H], positions[B,T] -> [B,T,K,M]."""
    batch, queries, heads, _ = q.shape
    kv_heads = pooled_k.shape[1]
    group = heads // kv_heads
    out = np.zeros((batch, queries, kv_heads, n_blocks))
    for b, t, k in np.ndindex(batch, queries, kv_heads):
        rows = q[b, t, k * group : (k + 1) * group]
        out[b, t, k] = pool_blocks(window_scores(rows, pooled_k[b, k], positions[b, t], geometry), n_blocks, geometry)
    return out


def rank(scores: Array, candidates: list[int]) -> list[int]:
    """Candidates from best to worst: higher score first, equal scores by lower index, NaN after everything."""

    def key(block: int):
        score = scores[block]
        return (1, 0.0, block) if np.isnan(score) else (0, -score, block)

    return sorted(candidates, key=key)


def select(score_q: Array, score_e: Array, position: int, block_size: int, budget: Budget) -> list[int]:
    """Ascending block ids that one query position and KV head attends to; scores are [M]."""
    current = position // block_size
    forced = {*range(budget.sink), *range(current - budget.local + 1, current + 1)} & {*range(current + 1)}
    rest = [block for block in range(current + 1) if block not in forced]
    by_query = rank(score_q, rest)[: budget.query]
    rest = [block for block in rest if block not in by_query]
    by_eviction = rank(score_e, rest)[: budget.evict]
    return sorted([*forced, *by_query, *by_eviction])


def select_blocks(score_q: Array, score_e: Array, positions: Array, block_size: int, budget: Budget) -> Array:
    """`select` for every row: scores [B,T,K,M], positions [B,T] -> [B,T,K,C], padded with -1."""
    out = np.full((*score_q.shape[:3], budget.total), NONE, np.int32)
    for b, t, k in np.ndindex(*score_q.shape[:3]):
        ids = select(score_q[b, t, k], score_e[b, t, k], int(positions[b, t]), block_size, budget)
        out[b, t, k, : len(ids)] = ids
    return out


def visible_tokens(ids: Array, position: int, n_tokens: int, block_size: int) -> Array:
    """Token positions <= `position` inside the listed blocks; ids outside the sequence are padding."""
    last = min(position + 1, n_tokens)
    starts = [int(i) * block_size for i in ids if 0 <= i < -(-n_tokens // block_size)]
    return np.array([t for s in starts for t in range(s, min(s + block_size, last))], dtype=int)


def attention_weights(q: Array, k: Array, cis: Array | None) -> Array:
    """Softmax of q[G,H] · k[t,H] / sqrt(H) + cis[t], over tokens: [G,t]."""
    logits = q @ k.T / np.sqrt(q.shape[-1])
    return softmax(logits if cis is None else logits + cis)


def sparse_attention(q, k, v, cis, block_ids, positions, block_size: int) -> Array:
    """Attention of q[B,T,N,H] over the tokens <= position of the selected blocks; rows that see nothing give 0.

    k, v [B,S,K,H]; cis [B,S,K] or None for no bias; block_ids [B,T,K,C]; positions [B,T].
    """
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(q.shape[0], q.shape[1], k.shape[2]):
        tokens = visible_tokens(block_ids[b, t, h], int(positions[b, t]), k.shape[1], block_size)
        if len(tokens):
            heads = slice(h * group, (h + 1) * group)
            bias = None if cis is None else cis[b, tokens, h]
            out[b, t, heads] = attention_weights(q[b, t, heads], k[b, tokens, h], bias) @ v[b, tokens, h]
    return out


def every_block(positions: Array, kv_heads: int, block_size: int, n_blocks: int) -> Array:
    """The selection of dense attention: all blocks up to the current one, [B,T,K,M], padded with -1."""
    ids = np.arange(n_blocks)
    dense = np.where(ids <= positions[..., None] // block_size, ids, NONE)
    return np.repeat(dense[:, :, None], kv_heads, axis=2)
