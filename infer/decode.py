"""One decoding step: a pure function of weights, state and tokens."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nosa_jax.config import NosaConfig
from nosa_jax.ffi import EvictionHead
from nosa_jax.infer.frozen import FrozenModel, freeze
from nosa_jax.infer.trace import replayed_ids
from nosa_jax.model import DecoderLayer, NosaLM
from nosa_jax.offload.append import append_projections, append_tail
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.residency import Residency, bring_in, write_full_blocks
from nosa_jax.offload.state import DecodeState, LayerCache, StepCounts
from nosa_jax.pallas_kernels import NO_BLOCK, decode_attention
from nosa_jax.selection import select


def decode_step(
    model: NosaLM | FrozenModel, state: DecodeState, tokens: Int[Array, "B"] | Int[np.ndarray, "B"]
) -> tuple[Float[Array, "B V"], DecodeState]:
    """Append one token to every active row and compute the logits of the next (docs/03).

    Jitted; the state is donated, so the one passed in cannot be used again. Compiled once per layout, whatever the
    lengths. Blocks that a layer selects and has not in a slot are copied from host pages inside the step.

    Args:
      model: `freeze(model)`, or a model, which is then split and cast in every call.
      state: from `Engine.prefill` or the previous step.
      tokens: the next token of each row; entries of rows that are not active are ignored. Ids are not checked: those
        outside the vocabulary are read as one of its ids.

    Returns: float32 logits, and the new state. A row that is not active, or whose length has reached its capacity,
      keeps its cache and its previous logits.

    Raises:
      ValueError: `tokens` does not hold one token per row.
      jax.errors.JaxRuntimeError: (on the CPU, when the result is read) the engine that owns the host pages was closed,
        or has given the pages to others. A step on a GPU records it, and `Engine.check` raises.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.shape != state.lengths.shape:
        raise ValueError(f"tokens has shape {tokens.shape}; each of the {state.lengths.shape[0]} rows needs one")
    return _jitted_step(freeze(model), state, tokens)


def step(
    model: FrozenModel,
    state: DecodeState,
    tokens: Int[Array, "B"],
    *,
    picks: Int[Array, "streams picks"] | None = None,
) -> tuple[Float[Array, "B V"], DecodeState]:
    """`decode_step` without its own jit, to be called from a jitted function of yours.

    picks: one step of a `SelectionTrace`, to attend to in place of what was selected. The selection is computed all
      the same: this is for timing.
    """
    modules, layout = model.module(), state.layout
    active = state.active & (state.lengths < state.capacity)
    positions = state.lengths[:, None]
    next_step = state.step + 1

    x = modules.embed(jnp.where(active, tokens, 0)[:, None])
    layers, tail_slots, counts = [], [], []
    for index, (layer, cache) in enumerate(zip(modules.layers, state.layers, strict=True)):
        x, cache, tail_slot, count = _layer_step(
            layer, x, cache, positions, active, next_step, state.page_table, state.handle, picks, index, layout
        )
        layers.append(cache)
        tail_slots.append(tail_slot)
        counts.append(count)
    caches = write_full_blocks(
        layers, tail_slots, state.lengths, active, state.page_table, state.handle, after=x, layout=layout
    )
    logits = modules.unembed(modules.final_norm(x))[:, 0]
    logits = jnp.where(active[:, None], logits, state.logits)

    last = StepCounts(*(jnp.stack(parts) for parts in zip(*counts, strict=True)))
    full = last.selected == layout.n_selected
    locality = jnp.where(full, last.kept / jnp.maximum(last.selected, 1), jnp.inf)
    return logits, state.replace(
        layers=caches,
        lengths=state.lengths + active,
        logits=logits,
        step=next_step,
        last=last,
        total=StepCounts(*(a + b for a, b in zip(state.total, last, strict=True))),
        min_locality=jnp.minimum(state.min_locality, locality),
    )


_jitted_step = partial(jax.jit, donate_argnames="state")(step)


def selected_blocks(
    q: Float[Array, "B 1 N H"],
    cache: LayerCache,
    lengths: Int[Array, "B"],
    active: Bool[Array, "B"],
    layout: CacheLayout,
) -> Int[Array, "B K C"]:
    """Block ids that the token at position `lengths` attends to; nothing for rows that are not active."""
    config = layout.config
    if layout.attention == "dense":
        every = jnp.arange(layout.n_blocks, dtype=jnp.int32)
        ids = jnp.where(every <= (lengths // config.block_size)[:, None, None], every, NO_BLOCK)
        return jnp.broadcast_to(jnp.where(active[:, None, None], ids, NO_BLOCK), cache.selected.shape)
    return select(
        q,
        cache.pooled_k,
        cache.block_rank,
        jnp.where(active, lengths, -1)[:, None],  # at a negative position, nothing is selected
        config=config,
        attention=layout.attention,
    )[:, 0]


def _layer_step(
    layer: DecoderLayer,
    x: jax.Array,
    cache: LayerCache,
    positions: jax.Array,
    active: jax.Array,
    next_step: jax.Array,
    page_table: jax.Array,
    handle: jax.Array,
    picks: jax.Array | None,
    index: int,
    layout: CacheLayout,
) -> tuple[jax.Array, LayerCache, jax.Array, StepCounts]:
    config: NosaConfig = layout.config
    lengths = positions[:, 0]
    attention = layer.attention
    q, k, v = (projected[:, 0] for projected in attention.projections(layer.attention_norm(x)))
    head = EvictionHead(*(w[...].astype(jnp.float32) for w in (attention.delta_weight_kkh, attention.a_k)))
    q, k, v, cache = append_projections(cache, q, k, v, head, lengths, active, layout)
    block_ids = selected_blocks(q[:, None], cache, lengths, active, layout)
    if picks is not None:
        # Chosen at run time, so that the compiler cannot leave out the selection.
        block_ids = jnp.where(next_step >= 0, replayed_ids(picks, lengths, config, index), block_ids)
    cache, residency = bring_in(cache, block_ids, lengths, page_table, handle, next_step, layer=index, layout=layout)

    # The slots go through one chain of in-place updates: this one, attention, and after the last layer
    # `write_full_blocks`.
    slots = append_tail(cache.slots, k, v, residency.tail_slot, lengths)
    cache = dataclasses.replace(cache, slots=slots)
    heads = decode_attention(
        q,
        cache.slots,
        cache.cis if config.uses_eviction_head(layout.attention) else None,
        residency.slot_ids,
        block_ids,
        lengths + 1,
    )
    counts = _count(block_ids, cache.selected, residency)
    selected = jnp.where(active[:, None, None], block_ids, cache.selected)
    cache = dataclasses.replace(cache, selected=selected)
    return layer.finish(x, heads[:, None]), cache, residency.tail_slot, counts


def _count(block_ids: jax.Array, before: jax.Array, residency: Residency) -> StepCounts:
    chosen = block_ids != NO_BLOCK
    kept = chosen & (block_ids[..., :, None] == before[..., None, :]).any(axis=-1)
    return StepCounts(
        hits=residency.hits,
        misses=residency.misses,
        selected=chosen.sum(axis=-1, dtype=jnp.int32),
        kept=kept.sum(axis=-1, dtype=jnp.int32),
    )
