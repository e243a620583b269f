"""Timing what a decode step does between a layer's projections and its selection: rotate, score, account."""

import dataclasses
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
from kernel_bench import Bench, chain, normal

from nosa_jax import NosaConfig
from nosa_jax.ffi import EvictionHead, has_cuda
from nosa_jax.offload import CacheLayout, init_state
from nosa_jax.offload.append import append_projections

INPUT_SETS = 4


def append(bench: Bench) -> None:
    """One token per row into a layer's pooled statistics: one launch on a GPU, against XLA's kernels for the same."""
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
    deltas, a = normal(1, (s.kv_heads, s.kv_heads, s.head_dim), jnp.float32), normal(2, (s.kv_heads,), jnp.float32)
    head = EvictionHead(deltas, a)
    lengths, active = jnp.full(rows, s.context - 1, jnp.int32), jnp.ones(rows, bool)  # a window is completed
    inputs = [normal(3 + i, (rows, s.heads + 2 * s.kv_heads, s.head_dim)) for i in range(INPUT_SETS)]

    def call(carry: Any, x: Any) -> Any:
        cache, total = carry
        q, k, v, cache = append_projections(cache, x, head, lengths, active, layout)
        return cache, chain(chain(total, q), chain(k, v))

    def by_xla(carry: Any, x: Any) -> Any:
        with patch("nosa_jax.offload.append.has_cuda", return_value=False):  # while it is traced
            return call(carry, x)

    start = cache, jnp.zeros(())
    contenders: dict[str, Any] = {"xla": (by_xla, start, inputs)}
    if bench.on_gpu and has_cuda():
        contenders = {"append_token": (call, start, inputs)} | contenders
    contenders["empty chain"] = (lambda total, x: chain(total, x), jnp.zeros(()), inputs)
    case = f"{rows} rows, a window completed"
    seconds = bench.seconds(case, contenders, repeats=12, unroll=4, donate=True)
    # Projections read and written, sums read and written, a window and a token's scores written.
    strides = layout.n_strides
    per_head = 2 * 2 * s.head_dim * 2 + 2 * strides * (s.head_dim + 1) * 4 + s.head_dim * 2 + 3 * 4
    nbytes = rows * (2 * s.heads * s.head_dim * 2 + s.kv_heads * per_head)
    bench.add("append_token", case, seconds, nbytes / bench.bandwidth, rows=rows)
