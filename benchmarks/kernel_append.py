"""Timing what a decode step does between a layer's projections and its selection: rotate, score, account."""

import dataclasses
from functools import partial
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
from kernel_bench import Bench, chain, normal

from nosa_jax import NosaConfig
from nosa_jax.ffi import EvictionHead, append_token, has_cuda
from nosa_jax.offload import CacheLayout, init_state
from nosa_jax.offload.append import append_projections
from nosa_jax.pallas_kernels import pooled_scores

INPUT_SETS = 4


def append(bench: Bench) -> None:
    """One token per row into a layer's pooled statistics: one launch on a GPU, against XLA's kernels for the same.

    By itself, and with the scores behind, whose pooled keys the launch asks for in the second-level cache.
    """
    for rows in bench.options.rows:
        _append_of(rows, bench)


def _append_of(rows: int, bench: Bench) -> None:
    s = bench.shape
    changes: dict[str, Any] = dict(
        num_layers=1, num_heads=s.heads, num_kv_heads=s.kv_heads, head_dim=s.head_dim, dtype="bfloat16"
    )
    config = NosaConfig.tiny(**changes) if bench.options.small else NosaConfig.nosa_8b(**changes)
    layout = CacheLayout(config, "nosa", rows, s.context, True, 2 * config.budget.total)
    # The slots are not touched; a layer's own are large.
    cache = dataclasses.replace(init_state(layout).layers[0], slots=jnp.zeros((rows, s.kv_heads, 0, 2, 1, 1)))
    cache = dataclasses.replace(cache, pooled_k=normal(5, cache.pooled_k.shape))
    deltas, a = normal(1, (s.kv_heads, s.kv_heads, s.head_dim), jnp.float32), normal(2, (s.kv_heads,), jnp.float32)
    head = EvictionHead(deltas, a)
    lengths, active = jnp.full(rows, s.context - 1, jnp.int32), jnp.ones(rows, bool)  # a window is completed
    sizes = ((rows, s.heads, s.head_dim), *[(rows, s.kv_heads, s.head_dim)] * 2)
    inputs = [tuple(normal(3 * i + j, size) for j, size in enumerate(sizes)) for i in range(INPUT_SETS)]
    score = partial(pooled_scores, n_blocks=layout.n_blocks, implementation=bench.options.kernel, **s.pooling)

    def call(carry: Any, x: Any, *, scores: bool, **replaced: Any) -> Any:
        cache, total = carry
        with patch.multiple("nosa_jax.offload.append", **replaced):  # while it is traced
            q, k, v, cache = append_projections(cache, *x, head, lengths, active, layout)
        if scores:
            total = chain(total, score(q[:, None], cache.pooled_k, lengths[:, None]))
        return cache, chain(chain(total, q), chain(k, v))

    ways: dict[str, dict[str, Any]] = {"xla": {"has_cuda": lambda: False}}
    if bench.on_gpu and has_cuda():
        ways = {
            "append_token": {"append_token": append_token},
            "append_token, no prefetch": {"append_token": partial(append_token, prefetch_bytes=0)},
        } | ways
    start = cache, jnp.zeros(())
    # Projections read and written, sums read and written, a window and a token's scores written.
    strides = layout.n_strides
    per_head = 2 * 2 * s.head_dim * 2 + 2 * strides * (s.head_dim + 1) * 4 + s.head_dim * 2 + 3 * 4
    nbytes = rows * (2 * s.heads * s.head_dim * 2 + s.kv_heads * per_head)
    for name, scores, more in (("append_token", False, 0), ("append and scores", True, cache.pooled_k.nbytes)):
        contenders: dict[str, Any] = {
            way: (partial(call, scores=scores, **replaced), start, inputs) for way, replaced in ways.items()
        }
        contenders["empty chain"] = (lambda total, x: chain(total, x[0]), jnp.zeros(()), inputs)
        case = f"{rows} rows, a window completed"
        seconds = bench.seconds(f"{name}, {case}", contenders, repeats=12, unroll=4, donate=True)
        bench.add(name, case, seconds, (nbytes + more) / bench.bandwidth, rows=rows)
