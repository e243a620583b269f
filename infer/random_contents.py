"""Parameters and caches of random contents, made where they lie and at once: for timing steps without a prefill."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nosa_jax.config import NosaConfig
from nosa_jax.ffi import HostPool
from nosa_jax.infer.frozen import FrozenModel, freeze
from nosa_jax.model import DecoderLayer, NosaLM
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import DecodeState, LayerCache, init_state


def random_model(config: NosaConfig, seed: int = 0) -> FrozenModel:
    """Freshly initialised parameters in the compute dtype.

    One program makes a layer and runs once for each, another makes the rest: none of as many parameters as the model
    has is compiled, and beside the parameters only one layer's intermediate values are in memory.
    """
    config = config.replace(param_dtype=config.dtype)
    single = config.replace(num_layers=1)

    @jax.jit
    def make_layer(key: jax.Array) -> dict[Any, Any]:
        return dict(nnx.to_flat_state(nnx.state(DecoderLayer(config, rngs=nnx.Rngs(params=key)))))

    @jax.jit
    def make_rest(key: jax.Array) -> dict[Any, Any]:
        flat = nnx.to_flat_state(nnx.state(NosaLM(single, rngs=nnx.Rngs(params=key))))
        return {path: x for path, x in flat if path[0] != "layers"}

    # The device's own generator: programs that compile at once, and no time for billions of values.
    first, *keys = jax.random.split(jax.random.key(seed, impl="rbg"), 1 + config.num_layers)
    flat = make_rest(first)
    for index, key in enumerate(keys):
        flat |= {("layers", index, *path): x for path, x in make_layer(key).items()}
    graph, _ = nnx.split(nnx.eval_shape(lambda: NosaLM.from_config(config)))
    return freeze(nnx.merge(graph, nnx.from_flat_state(flat)))


def filled_state(layout: CacheLayout, pool: HostPool | None, length: int) -> DecodeState:
    """A state whose rows hold `length` tokens of random contents, the latest blocks in the slots.

    Rows share host pages in turn where the pool has fewer than they need: what is read is random either way.
    """
    n_groups = layout.max_batch * layout.n_blocks
    if pool is not None:
        n_groups = pool.n_pages // layout.pages_per_block
    table = np.arange(layout.max_batch * layout.n_blocks, dtype=np.int32).reshape(layout.max_batch, -1) % n_groups
    state = init_state(layout, None if pool is None else pool.handle)
    # The device's own generator: gigabytes in no time, and a program that compiles at once.
    keys = jax.random.split(jax.random.key(0, impl="rbg"), layout.config.num_layers)
    fill = jax.jit(partial(_filled_layer, layout=layout, length=length), donate_argnums=0)
    return state.replace(
        layers=tuple(fill(layer, key) for layer, key in zip(state.layers, keys, strict=True)),
        lengths=jnp.full(layout.max_batch, length, jnp.int32),
        capacity=jnp.full(layout.max_batch, layout.max_context, jnp.int32),
        active=jnp.ones(layout.max_batch, bool),
        page_table=jnp.asarray(table),
    )


def _filled_layer(layer: LayerCache, key: jax.Array, *, layout: CacheLayout, length: int) -> LayerCache:
    """One layer: random keys, values and scores, and a full table of the latest blocks."""
    config = layout.config
    slots, pooled, ranks = jax.random.split(key, 3)
    first = max(0, config.num_blocks(length) - layout.n_slots)
    held = jnp.broadcast_to(jnp.arange(first, first + layout.n_slots, dtype=jnp.int32), layer.slot_block.shape)
    exists = jnp.arange(layout.n_blocks) < config.num_blocks(length)
    return dataclasses.replace(
        layer,
        slots=jax.random.normal(slots, layer.slots.shape, layer.slots.dtype),
        slot_block=held if layout.offload else layer.slot_block,
        pooled_k=jax.random.normal(pooled, layer.pooled_k.shape, layer.pooled_k.dtype),
        block_rank=jnp.where(exists, jax.random.normal(ranks, layer.block_rank.shape), -jnp.inf),
    )
