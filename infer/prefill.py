"""Reading a prompt into one row of the cache, layer by layer.

Memory beside the cache: the hidden states of the tokens read at once, and one layer's keys and values of that row.
"""

import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.rows import RowTokens, extend_row, layer_pages, pool_row, store_row
from nosa_jax.offload.state import DecodeState, LayerCache, init_state
from nosa_jax.pallas_kernels import NO_BLOCK, dense_attention, sparse_attention
from nosa_jax.pallas_kernels.query_chunks import map_query_chunks
from nosa_jax.selection import select

_COMPILING_TOGETHER = min(8, os.cpu_count() or 1)  # programs; the compiler needs some hundred megabytes for each
TOKEN_CHUNK = 4096  # tokens that go through the feed-forward layer at once; its width is several times the model's


def padded_length(n_tokens: int, layout: CacheLayout) -> int:
    """The static length that a piece of `n_tokens` is padded to: 1, 2, 3, 4, 6, 8, 12 ... blocks.

    Few lengths mean few compilations: about two per doubling of the context.
    """
    block = layout.config.block_size
    size, half = 1, False
    while size * block < n_tokens:
        size, half = (size * 4 // 3, False) if half else ((size * 3 // 2, True) if size > 1 else (2, False))
    return min(size, layout.n_blocks) * block


def continuation_lengths(chunk: int, layout: CacheLayout) -> tuple[int, ...]:
    """The static lengths of pieces that continue a prompt read `chunk` tokens at a time: a quarter of it, and all.

    Two, because there is a program for each of them and for each length of what was read before.
    """
    return tuple(sorted({padded_length(-(-chunk // 4), layout), padded_length(chunk, layout)}))


def piece_length(n_tokens: int, start: int, chunk: int, layout: CacheLayout) -> int:
    """The static length of a piece of `n_tokens` at position `start` of a prompt that is read `chunk` at a time."""
    if start == 0:
        return padded_length(n_tokens, layout)
    return next(length for length in continuation_lengths(chunk, layout) if n_tokens <= length)


def prefill_row(
    model: FrozenModel,
    state: DecodeState,
    row: int,
    tokens: Int[np.ndarray, " n"],
    start: int,
    *,
    length: int | None = None,
) -> DecodeState:
    """Append `tokens` to a row that holds `start` tokens; with 0 the row's old contents are forgotten.

    The row's page table and capacity must be set. One compilation per padded length of the tokens and of those before.

    Args:
      state: donated; the one passed in cannot be used again.
      tokens: at least one id. The row must have room for them.
      length: whole blocks that the tokens are padded to; None for `padded_length`.

    Returns: the state with the row's length, cache and next-token logits updated.
    """
    layout = state.layout
    count = len(tokens)
    padded = np.zeros((1, padded_length(count, layout) if length is None else length), np.int32)
    padded[0, :count] = tokens
    numbers = [jnp.asarray(n, jnp.int32) for n in (row, start, count)]

    x = _embed(*model.parts.whole, jnp.asarray(padded))
    layers = list(state.layers)
    for index, (graph, parameters) in enumerate(model.parts.layers):
        x, leaves = _prefill_layer(
            graph, parameters, x, jax.tree.leaves(layers[index]), *numbers, jnp.asarray(index, jnp.int32), state.step,
            state.page_table, state.handle, layout=layout, earlier=padded_length(start, layout) if start else 0,
        )  # fmt: skip
        layers[index] = LayerCache(*leaves)
    logits = _last_logits(*model.parts.whole, x, numbers[2])
    return state.replace(
        layers=tuple(layers),
        lengths=state.lengths.at[row].set(start + count),
        logits=state.logits.at[row].set(logits),
    )


def compile_pieces(model: FrozenModel, layout: CacheLayout, pieces: Collection[tuple[int, int]]) -> None:
    """Compile what `prefill_row` runs, several programs at a time; calls of it find them afterwards.

    Nothing is run, and no array is made. If this is interrupted, or a program does not compile, those that have not
    begun are given up.

    pieces: padded length of the tokens, and padded length of those before, of each piece.
    """
    default_device = jax.config.jax_default_device  # threads have settings of their own

    def run(compile_one: Callable[..., None], *sizes: int) -> None:
        with jax.default_device(default_device):
            compile_one(model, layout, *sizes)

    threads = ThreadPoolExecutor(_COMPILING_TOGETHER)
    try:
        longest_first = sorted(set(pieces), key=sum, reverse=True)
        waiting = [threads.submit(run, _compile_layer, *piece) for piece in longest_first]
        waiting += [threads.submit(run, _compile_ends, length) for length in sorted({length for length, _ in pieces})]
        for program in waiting:
            program.result()
    finally:
        threads.shutdown(cancel_futures=True)


def _compile_layer(model: FrozenModel, layout: CacheLayout, length: int, earlier: int) -> None:
    def of_state() -> tuple[list[Array], Array, Array, Array]:
        state = init_state(layout)
        return jax.tree.leaves(state.layers[0]), state.step, state.page_table, state.handle

    cache, *tables = _shapes_beside(model, jax.eval_shape(of_state))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    x = _shape_of_hidden(model, length)
    _prefill_layer.lower(
        *model.parts.layers[0], x, cache, *[number] * 4, *tables, layout=layout, earlier=earlier
    ).compile()


def _compile_ends(model: FrozenModel, layout: CacheLayout, length: int) -> None:
    """What runs before and after the layers."""
    whole = model.parts.whole
    _embed.lower(*whole, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
    _last_logits.lower(*whole, _shape_of_hidden(model, length), jax.ShapeDtypeStruct((), jnp.int32)).compile()


def _shape_of_hidden(model: FrozenModel, length: int) -> Any:
    graph, parameters = model.parts.whole
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return _shapes_beside(model, jax.eval_shape(partial(_embed, graph), parameters, tokens))


def _shapes_beside(model: FrozenModel, shapes: Any) -> Any:
    """As those of arrays that were computed with the model or put beside it."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=model.sharding), shapes)


@partial(jax.jit, static_argnums=0)
def _embed(graph: Any, parameters: Any, tokens: jax.Array) -> jax.Array:
    return nnx.merge(graph, parameters).embed(tokens)


@partial(jax.jit, static_argnums=0)
def _last_logits(graph: Any, parameters: Any, x: jax.Array, count: jax.Array) -> jax.Array:
    modules = nnx.merge(graph, parameters)
    return modules.unembed(modules.final_norm(x[0, count - 1]))


@partial(jax.jit, static_argnums=0, static_argnames=("layout", "earlier"), donate_argnums=(2, 3))
def _prefill_layer(
    graph: Any,
    parameters: Any,
    x: jax.Array,
    leaves: list[Array],
    row: Array,
    start: Array,
    count: Array,
    layer_index: Array,
    step: Array,
    page_table: Array,
    handle: Array,
    *,
    layout: CacheLayout,
    earlier: int,
) -> tuple[jax.Array, list[Array]]:
    """One layer of a piece; leaves: of its `LayerCache`, in the order of the fields."""
    config, cache = layout.config, LayerCache(*leaves)
    layer = nnx.merge(graph, parameters)
    offsets = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    positions = start + offsets
    q, k, v, cis = layer.attention.project(layer.attention_norm(x), positions)
    is_token = offsets < count
    new = RowTokens(
        jnp.where(is_token[..., None, None], k, 0),
        jnp.where(is_token[..., None, None], v, 0),
        jnp.where(is_token[..., None], cis, 0),
    )
    pages = layer_pages(page_table, handle, row, layer_index, config.num_layers)
    tokens = extend_row(cache, new, row, start, pages, layout, earlier=earlier)
    length = start + count
    pooling = pool_row(tokens, length, config)

    if layout.attention == "dense":
        heads = dense_attention(q, tokens.k, tokens.v, positions if earlier else None)
        every = jnp.arange(layout.n_blocks, dtype=jnp.int32)
        last = jnp.where(every * config.block_size < length, every, NO_BLOCK)
        selected = jnp.broadcast_to(last, (config.num_kv_heads, layout.n_blocks))
    else:
        block_ids = select(
            q,
            pooling.keys,
            pooling.block_rank,
            positions,
            config=config,
            attention=layout.attention,
        )
        heads = sparse_attention(
            q,
            tokens.k,
            tokens.v,
            tokens.cis if config.uses_eviction_head(layout.attention) else None,
            block_ids,
            positions if earlier else None,
            block_size=config.block_size,
        )
        selected = block_ids[0, count - 1]
    cache = store_row(cache, tokens, pooling, selected, row, start, length, step, pages, layout)
    return map_query_chunks(layer.finish, (x, heads), TOKEN_CHUNK), jax.tree.leaves(cache)
