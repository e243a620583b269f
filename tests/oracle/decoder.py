"""The whole decoder in float64 NumPy: Llama-style layers around NOSA attention, or one of its compared systems.

Weights are a dictionary with the names and [out, in] layout of published checkpoints.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import nosa_numpy as oracle
from .nosa_numpy import Array, Budget, Geometry


@dataclass(frozen=True)
class LayerTrace:
    """What one layer computed: q/k after RoPE, v, cis, pooled scores [B,T,K,M], selected ids [B,T,K,C], outputs."""

    q: Array
    k: Array
    v: Array
    cis: Array | None
    pooled_k: Array
    score_q: Array
    score_e: Array
    ids: Array
    attention: Array
    hidden: Array


def geometry_of(config: Any) -> Geometry:
    """Block and window sizes of a NosaConfig."""
    return Geometry(config.block_size, config.pool_window, config.pool_stride)


def budget_of(config: Any, attention: str) -> Budget:
    """How each compared system splits the blocks: InfLLMv2 gives all free picks to the query, DMA all to cis."""
    free = config.query_blocks + config.evict_blocks
    query = {"infllmv2": free, "dma": 0}.get(attention, config.query_blocks)
    return Budget(config.sink_blocks, config.local_blocks, query, free - query)


def attend(
    config: Any, attention: str, q: Array, k: Array, v: Array, cis: Array | None, positions: Array
) -> dict[str, Array]:
    """Pool, score, select and attend for queries q[B,T,N,H] at positions[B,T] over keys k, v [B,S,K,H].

    cis is None where the system has no eviction head; every static score is then equal.
    """
    geometry = geometry_of(config)
    n_blocks = geometry.blocks(k.shape[1])
    pooled_k = oracle.pool_windows(k, geometry)
    score_q = oracle.pooled_scores(q, pooled_k, positions, n_blocks, geometry)
    static = np.zeros(k.shape[:3]) if cis is None else cis
    if config.eviction == "dma":
        static = np.exp(static)
    score_e = oracle.pool_blocks(oracle.pool_windows(static, geometry), n_blocks, geometry)
    score_e = np.broadcast_to(score_e[:, None], score_q.shape)
    if attention == "dense":
        ids = oracle.every_block(positions, k.shape[2], config.block_size, n_blocks)
    else:
        ids = oracle.select_blocks(score_q, score_e, positions, config.block_size, budget_of(config, attention))
    out = oracle.sparse_attention(q, k, v, cis, ids, positions, config.block_size)
    return {"pooled_k": pooled_k, "score_q": score_q, "score_e": score_e, "ids": ids, "attention": out}


def layer(config: Any, weights: dict[str, Array], index: int, x: Array, positions: Array, attention: str) -> LayerTrace:
    """One decoder layer over x[B,T,D]; weights are the whole checkpoint."""

    def w(name: str) -> Array:
        return weights[f"model.layers.{index}.{name}.weight"]

    def heads(name: str, count: int) -> Array:
        return (h @ w(f"self_attn.{name}").T).reshape(*x.shape[:2], count, config.head_dim)

    def rotated(y: Array) -> Array:
        return oracle.rope(y, positions, config.rope_theta, config.rope_factors, config.rope_attention_factor)

    h = oracle.rms_norm(x, w("input_layernorm"), config.rms_norm_eps)
    q, k = rotated(heads("q_proj", config.num_heads)), rotated(heads("k_proj", config.num_kv_heads))
    v = heads("v_proj", config.num_kv_heads)
    cis = None
    if attention in ("nosa", "dma") and config.eviction != "none":
        cis = oracle.eviction_scores(v, w("self_attn.delta"), weights[f"model.layers.{index}.self_attn.A"])
    trace = attend(config, attention, q, k, v, cis, positions)
    x = x + trace["attention"].reshape(*x.shape[:2], -1) @ w("self_attn.o_proj").T
    h = oracle.rms_norm(x, w("post_attention_layernorm"), config.rms_norm_eps)
    gate = h @ w("mlp.gate_proj").T
    x = x + (gate * oracle.sigmoid(gate) * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
    return LayerTrace(q=q, k=k, v=v, cis=cis, hidden=x, **trace)


def forward(
    config: Any, weights: dict[str, Array], tokens: Array, attention: str | None = None
) -> tuple[Array, list[LayerTrace]]:
    """Logits [B,T,V] of tokens[B,T] at positions 0..T-1, and the trace of every layer."""
    weights = {name: oracle.f64(value) for name, value in weights.items()}
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    x = weights["model.embed_tokens.weight"][tokens]
    traces = []
    for index in range(config.num_layers):
        traces.append(layer(config, weights, index, x, positions, attention or config.attention))
        x = traces[-1].hidden
    x = oracle.rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    head = weights["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    return x @ head.T, traces
