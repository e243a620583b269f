"""Recording what a model selects while it decodes, as a trace to replay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.infer.decode import decode_step
from nosa_jax.infer.engine import Engine
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.trace import SelectionTrace
from nosa_jax.offload.state import DecodeState


@dataclass(frozen=True)
class Recording:
    """A trace, the misses that the engine counted meanwhile and with how many slots, and the least locality seen.

    misses: mean per layer, row, KV head and step of the second half, as `SelectionTrace.misses` counts.
    """

    trace: SelectionTrace
    misses: float
    slots: int
    min_locality: float


def least_prompt(config: NosaConfig, attention: AttentionKind) -> int:
    """Fewest tokens of a prompt to record from: with fewer blocks than a step selects, it picks fewer than later ones.

    Raises:
      InputError: nothing is picked: "dense", or forced blocks alone.
    """
    budget = config.budget_for(attention)
    if attention == "dense":
        raise InputError("attention 'dense' attends to every block and picks none; record nosa, infllmv2 or dma")
    if budget.query + budget.evict == 0:
        raise InputError("the model's budget has forced blocks alone; there are no picks to record")
    return (budget.total - 1) * config.block_size + 1


def require_recordable(
    config: NosaConfig, prompts: Sequence[np.ndarray], *, tokens: int, attention: AttentionKind
) -> None:
    """What `record_trace` refuses, known without a model's weights. Raises InputError."""
    least = least_prompt(config, attention)
    if tokens < 2:
        raise InputError(f"{tokens=} steps show no change of picks; record at least 2")
    shortest = min(len(prompt) for prompt in prompts)
    if shortest < least:
        raise InputError(
            f"a prompt of {shortest} tokens has fewer blocks of {config.block_size} than the "
            f"{config.budget_for(attention).total} that a step selects; give at least {least} tokens"
        )


def record_trace(
    model: FrozenModel,
    prompts: Sequence[np.ndarray],
    *,
    tokens: int,
    attention: AttentionKind,
    origin: str,
    slots: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Recording:
    """Read prompts, decode greedily, and keep the picks of every step, layer, row and KV head.

    Streams of the trace are layers, within them rows, within them KV heads: a replay with as many of each gives every
    one its own.

    Args:
      prompts: token ids of each row.
      tokens: decode steps.
      attention: the system that selects; "dense" selects nothing.
      origin: in words, what model and text this is.
      slots: of the engine that decodes; None for C. The trace does not depend on it.
      tick: called after each step.

    Raises:
      InputError: a prompt that has fewer blocks than a step selects, for its steps would not pick as many as later
        ones; "dense"; a number of tokens below 2.
    """
    config = model.config
    require_recordable(config, prompts, tokens=tokens, attention=attention)
    budget = config.budget_for(attention)
    longest = max(len(prompt) for prompt in prompts)
    with Engine(
        model,
        max_batch=len(prompts),
        max_context=longest + tokens,
        attention=attention,
        slots=budget.total if slots is None else slots,
    ) as engine:
        state = engine.prefill(list(prompts), max_new_tokens=tokens)
        n_slots, selections, before = engine.layout.n_slots, [], 0
        for index in range(tokens):
            if index == tokens // 2:
                before = int(state.stats().total.misses.sum())
            _, state = decode_step(engine.model, state, state.logits.argmax(axis=-1).astype(jnp.int32))
            selections.append(np.asarray(_selections(state)))  # read at once: the next step takes the state
            tick()
        engine.check()
        stats = state.stats()
    streams = config.num_layers * len(prompts) * config.num_kv_heads
    counted = (int(stats.total.misses.sum()) - before) / (tokens - tokens // 2) / streams
    # Ids ascend: the sink first, the local window last, and what was picked between them.
    picks = np.stack(selections)[..., budget.sink : budget.total - budget.local].reshape(tokens, streams, -1)
    current = (longest + tokens - 1) // config.block_size
    n_candidates = current + 1 - budget.local - budget.sink
    trace = SelectionTrace(picks, budget.sink, n_candidates, origin, attention)
    return Recording(trace, counted, n_slots, float(np.nanmin(stats.min_locality)))


@jax.jit
def _selections(state: DecodeState) -> jax.Array:
    """Selected ids [L, B, K, C] of the latest step."""
    return jnp.stack([layer.selected for layer in state.layers])
