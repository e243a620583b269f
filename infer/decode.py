"""One decoding step: a pure function of weights, state and tokens."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nosa_jax.config import NosaConfig
from nosa_jax.ffi import EvictionHead
from nosa_jax.infer.compiling import jit_in_place, step_options
from nosa_jax.infer.frozen import FrozenModel, MergedAttention, freeze
from nosa_jax.infer.trace import replayed_ids
from nosa_jax.model import DecoderLayer, NosaLM
from nosa_jax.offload.append import append_projections
from nosa_jax.offload.arrivals import attend_while_fetching
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
      tokens: the next token of each row, integers; entries of rows that are not active are ignored. Ids are not
        checked: those outside the vocabulary are read as one of its ids.

    Returns: float32 logits, and the new state. A row that is not active, or whose length has reached its capacity,
      keeps its cache and its previous logits.

    Raises:
      ValueError: `tokens` does not hold one token per row, or no integers; or the state was given to an earlier step,
        which has used up its memory.
      jax.errors.JaxRuntimeError: (on the CPU, when the result is read) the engine that owns the host pages was closed,
        or has given the pages to others. A step on a GPU records it, and `Engine.check` raises.
    """
    tokens = jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens are {tokens.dtype}; they must be integer ids, like logits.argmax(axis=-1)")
    tokens = tokens.astype(jnp.int32)
    if state.used_up:
        raise ValueError(
            "this state was given to an earlier decode_step, whose result uses its memory; go on with the state that "
            "was returned: logits, state = decode_step(model, state, tokens)"
        )
    if tokens.shape != state.lengths.shape:
        raise ValueError(f"tokens has shape {tokens.shape}; each of the {state.lengths.shape[0]} rows needs one")
    state = _jitted_step(tokens.shape[0])(freeze(model), state, tokens)
    # The state's own are written over by the next step. Were the copy a result of the step, XLA would use its memory
    # for intermediate values too, and most of its CUDA graph would change with the address (docs/09).
    return jnp.copy(state.logits), state


def step(
    model: FrozenModel,
    state: DecodeState,
    tokens: Int[Array, "B"],
    *,
    picks: Int[Array, "streams picks"] | None = None,
) -> tuple[Float[Array, "B V"], DecodeState]:
    """`decode_step` without its own jit, to be called from a jitted function of yours.

    Donate the state there, return it before anything else, and give `jax.jit` `keep_unused=True`: else its leaves
    change places in every step (docs/09). The logits are those of the new state.

    picks: one step of a `SelectionTrace`, to attend to in place of what was selected. The selection is computed all
      the same: this is for timing.
    """
    modules, layout = model.module(), state.layout
    active = state.active & (state.lengths < state.capacity)
    positions = state.lengths[:, None]
    next_step = state.step + 1

    x = modules.embed(jnp.where(active, tokens, 0)[:, None])
    replayed = None if picks is None else replayed_ids(picks, state.lengths, layout.config)
    layers, selected, residencies = [], [], []
    for index, (layer, cache) in enumerate(zip(modules.layers, state.layers, strict=True)):
        x, cache, ids, residency = _layer_step(
            layer, x, cache, positions, active, next_step, state.page_table, state.handle, replayed, index, layout
        )
        layers.append(cache)
        selected.append(ids)
        residencies.append(residency)
    tail_slots = [residency.tail_slot for residency in residencies]
    caches = write_full_blocks(
        layers, tail_slots, state.lengths, active, state.page_table, state.handle, after=x, layout=layout
    )
    logits = modules.unembed(modules.final_norm(x))[:, 0]
    logits = jnp.where(active[:, None], logits, state.logits)

    block_ids: Sequence[jax.Array] | jax.Array = selected
    if replayed is not None:
        # Chosen at run time, so that the compiler cannot leave out the selection; of all layers in one kernel.
        block_ids = jnp.where(next_step >= 0, replayed, jnp.stack(selected))
    last = _count(block_ids, [cache.selected for cache in state.layers], residencies)
    # After the counting, so that XLA need not keep copies of what was selected before.
    block_ids, _ = jax.lax.optimization_barrier((block_ids, last.kept))
    caches = tuple(
        dataclasses.replace(cache, selected=jnp.where(active[:, None, None], ids, cache.selected))
        for cache, ids in zip(caches, block_ids, strict=True)
    )
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


def _step_in_place(model: FrozenModel, state: DecodeState, tokens: jax.Array) -> DecodeState:
    return step(model, state, tokens)[1]


@functools.cache
def _jitted_step(rows: int) -> Callable[..., DecodeState]:
    return jit_in_place(_step_in_place, donate_argnames="state", compiler_options=step_options(rows))


def selected_blocks(
    q: Float[Array, "B 1 N H"],
    cache: LayerCache,
    lengths: Int[Array, "B"],
    active: Bool[Array, "B"],
    layout: CacheLayout,
) -> Int[Array, "B K C"]:
    """Block ids that the token at position `lengths` attends to; nothing for rows that are not active."""
    config = layout.config
    positions = jnp.where(active, lengths, -1)  # at a negative position, nothing is selected
    if layout.attention == "dense":
        every = jnp.arange(layout.n_blocks, dtype=jnp.int32)
        ids = jnp.where(every <= (positions // config.block_size)[:, None, None], every, NO_BLOCK)
        return jnp.broadcast_to(ids, cache.selected.shape)
    return select(
        q,
        cache.pooled_k,
        cache.block_rank,
        positions[:, None],
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
    replayed: jax.Array | None,
    index: int,
    layout: CacheLayout,
) -> tuple[jax.Array, LayerCache, jax.Array, Residency]:
    config: NosaConfig = layout.config
    lengths = positions[:, 0]
    attention = layer.attention
    assert isinstance(attention, MergedAttention)  # as `freeze` makes it
    projected = attention.projected(layer.attention_norm(x))[:, 0]
    head = EvictionHead(*(w[...].astype(jnp.float32) for w in (attention.delta_weight_kkh, attention.a_k)))
    q, k, v, cache = append_projections(cache, projected, head, lengths, active, layout)
    block_ids = selected_blocks(q[:, None], cache, lengths, active, layout)
    selected = block_ids
    if replayed is not None:
        selected, block_ids = jax.lax.optimization_barrier((selected, replayed[index]))  # what follows comes after it
    cis = cache.cis if config.uses_eviction_head(layout.attention) else None
    # The slots go through one chain of in-place updates: these, and after the last layer `write_full_blocks`.
    where = (k, v, lengths, page_table, handle, next_step)
    if layout.overlap:
        heads, cache, residency = attend_while_fetching(q, cache, cis, block_ids, *where, layer=index, layout=layout)
    else:
        cache, residency = bring_in(cache, block_ids, *where, layer=index, layout=layout)
        heads = decode_attention(q, cache.slots, cis, residency.slot_ids, block_ids, lengths + 1)
    return layer.finish(x, heads[:, None]), cache, selected, residency


def _count(
    block_ids: Sequence[jax.Array] | jax.Array, before: Sequence[jax.Array], residencies: Sequence[Residency]
) -> StepCounts:
    """Counts of all layers at once; in each layer they would be kernels of their own."""
    ids = block_ids if isinstance(block_ids, jax.Array) else jnp.stack(block_ids)
    chosen = ids != NO_BLOCK
    kept = chosen & (ids[..., :, None] == jnp.stack(before)[..., None, :]).any(axis=-1)
    return StepCounts(
        hits=jnp.stack([residency.hits for residency in residencies]),
        misses=jnp.stack([residency.misses for residency in residencies]),
        selected=chosen.sum(axis=-1, dtype=jnp.int32),
        kept=kept.sum(axis=-1, dtype=jnp.int32),
    )
