"""Selections made up to a stated rate of change, for timing kernels without a trained model."""

import jax
import jax.numpy as jnp
import numpy as np


def drifting_selection(
    length: int,
    heads: int,
    *,
    block_size: int,
    sink: int,
    local: int,
    query: int,
    evict: int,
    changed: float,
    seed: int = 0,
) -> jax.Array:
    """Block ids of a sequence in which on average `changed` picks differ from one token to the next.

    Forced blocks as the budget says; the picks keep their places, and every token replaces each of its `query`
    picks with probability changed / query by a block it does not hold. While there are no more blocks than the budget,
    all are selected.

    Returns: int32 [1, T, K, C], ascending, padded with -1.
    """
    rng = np.random.default_rng(seed)
    total = sink + local + query + evict
    ids = np.full((1, length, heads, total), -1, np.int32)
    for head in range(heads):
        picks: list[int] = []
        replaced = rng.random((length, query)) < changed / query
        draws = rng.random((length, query, 8))
        for position in range(length):
            current = position // block_size
            if current < total:
                ids[0, position, head, : current + 1] = np.arange(current + 1)
                continue
            low, high = sink, current - local  # candidates: low .. high
            if not picks:
                picks = list(range(low, low + query + evict))
            held = set(picks)
            for place in np.flatnonzero(replaced[position]):
                for draw in draws[position, place]:
                    block = low + int(draw * (high + 1 - low))
                    if block not in held:
                        held.remove(picks[place])
                        held.add(block)
                        picks[place] = block
                        break
            ids[0, position, head] = [*range(sink), *sorted(picks), *range(high + 1, current + 1)]
    return jnp.asarray(ids)


def union_size(ids: jax.Array, tokens: int) -> float:
    """Mean number of distinct blocks that `tokens` neighbouring tokens select."""
    numbers = np.asarray(ids)[:, : ids.shape[1] // tokens * tokens]
    batch, _, heads, count = numbers.shape
    grouped = np.sort(np.moveaxis(numbers.reshape(batch, -1, tokens, heads, count), 2, 3).reshape(-1, tokens * count))
    distinct = (np.diff(grouped, axis=1) != 0).sum(axis=1) + 1
    return float(np.mean(distinct - (grouped[:, 0] < 0)))
