"""Next-token cross entropy that never holds the logits of a whole batch."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from nosa_jax.config import AttentionKind
from nosa_jax.model import NosaLM

MAX_LOGITS = 1 << 25
"""Logits held at a time [elements]: 128 MiB of float32."""


def cross_entropy(
    hidden: Array, targets: Array, mask: Array, unembed: Callable[[Array], Array], max_logits: int = MAX_LOGITS
) -> tuple[Array, Array]:
    """Sum over the unmasked targets of -log softmax(unembed(hidden))[target], and their number, both float32.

    hidden: [B, T, D]; targets: int [B, T]; mask: bool [B, T]. Where [B, T, V] logits would be larger than
    `max_logits`, positions are taken in chunks, forward and (recomputed) backward.
    """
    batch, length = targets.shape
    vocab = jax.eval_shape(unembed, hidden[:, :1]).shape[-1]
    chunk = max(1, max_logits // (batch * vocab))

    def part(hidden: Array, targets: Array, mask: Array) -> Array:
        logits = unembed(hidden).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0))

    count = jnp.sum(mask, dtype=jnp.float32)
    if chunk >= length:
        return part(hidden, targets, mask), count
    chunks = -(-length // chunk)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, chunks * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, chunks, chunk, *x.shape[2:]), 1, 0)

    def body(total: Array, xs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + jax.checkpoint(part)(*xs), None

    total, _ = jax.lax.scan(body, jnp.zeros((), jnp.float32), (split(hidden), split(targets), split(mask)))
    return total, count


def next_token_loss(
    model: NosaLM, tokens: Array, mask: Array, attention: AttentionKind, *, remat: bool, max_logits: int = MAX_LOGITS
) -> tuple[Array, Array]:
    """(sum of the losses of tokens[:, 1:], number of targets); tokens int [B, T+1], mask bool [B, T]."""
    hidden = model.hidden_states(tokens[:, :-1], attention=attention, remat=remat)
    return cross_entropy(hidden, tokens[:, 1:], mask, model.unembed, max_logits)


def mean_loss(eval_step: Callable[[Any, Any], tuple[Array, Array]], params: Any, batches: Iterable[Any]) -> float:
    """Mean loss per target over batches [nats]; perplexity is its exponential. Sums in float64 on the host."""
    total, count = 0.0, 0.0
    for batch in batches:
        part, targets = eval_step(params, batch)
        total, count = total + float(part), count + float(targets)
    return total / count if count else math.nan
