"""Timing what training and prefill call: scores, selection and attention of every query of a sequence."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernel_bench import Bench, normal
from selections import drifting_selection, union_size

from nosa_jax.pallas_kernels import pooled_scores, select_blocks, sparse_attention


def scores(bench: Bench) -> None:
    """pooled_scores and select_blocks of every query of the longest sequence."""
    s, length = bench.shape, max(bench.options.lengths)
    n_blocks, name = length // s.block, bench.options.kernel
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    keys = normal(3, (1, s.kv_heads, length // s.stride, s.head_dim))
    q = normal(4, (1, length, s.heads, s.head_dim))
    rank = normal(5, (1, 1, s.kv_heads, n_blocks), jnp.float32)
    score = partial(pooled_scores, n_blocks=n_blocks, implementation=name, **s.pooling)
    choose = partial(select_blocks, block_size=s.block, implementation=name, **s.budget)
    found = jax.jit(score)(q, keys, positions)
    contenders: dict[str, Any] = {
        # The last query's: the first sees no window, and 0 * -inf would make NaN of the next round's queries.
        f"scores {name}": (
            lambda q, k: q + (score(q, k, positions)[:, -1:, 0, :1, None] * 0).astype(q.dtype), q, [keys],
        ),
        f"selection {name}": (
            lambda r, x: r + choose(x, r, positions)[0, 0, 0, 0].astype(r.dtype) * 0, rank, [found],
        ),
    }  # fmt: skip
    case = f"sequence of {length} tokens"
    seconds = bench.seconds(case, contenders, repeats=2, rounds=3)
    operations = 2 * length * s.heads * (length / s.stride) / 2 * s.head_dim
    bench.add("pooled_scores", case, seconds, operations / bench.matmul, length=length)


def attention(bench: Bench) -> None:
    """sparse_attention, forward and with its gradient, against dense causal attention (cuDNN's on a GPU)."""
    for length in bench.options.lengths:
        _attention_of(length, bench)


def _attention_of(length: int, bench: Bench) -> None:
    s, name = bench.shape, bench.options.kernel
    dense_name = "cudnn" if bench.on_gpu else "xla"
    ids = drifting_selection(length, s.kv_heads, block_size=s.block, changed=bench.options.changed_picks, **s.budget)
    k, v = normal(1, (1, length, s.kv_heads, s.head_dim)), normal(2, (1, length, s.kv_heads, s.head_dim))
    cis = normal(3, (1, length, s.kv_heads), jnp.float32)
    q = normal(0, (1, length, s.heads, s.head_dim))
    weights = normal(5, q.shape)

    def sparse(q: jax.Array, k: jax.Array, v: jax.Array, cis: jax.Array, ids: jax.Array) -> jax.Array:
        return sparse_attention(q, k, v, cis, ids, block_size=s.block, implementation=name)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=dense_name)

    def train(attend: Any, qkv: Any, x: Any) -> Any:
        cis, ids, weights = x

        def loss(q: jax.Array, k: jax.Array, v: jax.Array, cis: jax.Array) -> jax.Array:
            return (attend(q, k, v, cis, ids).astype(jnp.float32) * weights).sum()

        *grads, dcis = jax.grad(loss, argnums=(0, 1, 2, 3))(*qkv, cis)
        first = dcis.reshape(-1)[0].astype(weights.dtype) * 0
        return tuple(x + dx + first for x, dx in zip(qkv, grads, strict=True))

    dense_label = f"{dense_name} dense"
    forward = {
        name: (lambda q, x: q + sparse(q, *x), q, [(k, v, cis, ids)]),
        dense_label: (lambda q, x: q + dense(q, *x), q, [(k, v, cis, ids)]),
    }
    both = {
        label: (partial(train, attend), (q, k, v), [(cis, ids, weights)])
        for label, attend in ((name, sparse), (dense_label, dense))
    }
    union = union_size(ids, 4)
    # Products of 64 rows, 4 tokens of 16 heads, with the blocks that at least one of the 4 selected.
    product = 2 * length * s.heads * union * s.block * s.head_dim
    for case, contenders, products in (("forward", forward, 2), ("forward and backward", both, 7)):
        seconds = bench.seconds(f"{case}, {length} tokens", contenders, repeats=1, rounds=3)
        more: dict[str, Any] = {}
        if name in seconds and dense_label in seconds:
            more["faster_than_dense_by"] = seconds[dense_label] / seconds[name]
        bench.add(
            "sparse_attention", f"{case}, {length} tokens", seconds, products * product / bench.matmul,
            length=length, pass_=case, blocks_for_4_tokens=union, **more,
        )  # fmt: skip
