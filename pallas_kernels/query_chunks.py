"""Run a function over chunks of query positions, so that its temporaries do not grow with their number."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def map_query_chunks(
    fn: Callable[..., Any], per_query: tuple[jax.Array, ...], chunk: int, *, remat: bool = False
) -> Any:
    """`fn(*per_query)`, evaluated for `chunk` query positions at a time.

    Args:
      fn: takes arrays [B, t, ...] and returns a pytree of them; rows must not depend on each other.
      per_query: arrays [B, T, ...]; the last chunk is padded by repeating the final row.
      chunk: query positions per evaluation.
      remat: recompute a chunk in the backward pass instead of keeping its intermediates.

    Returns: the pytree that fn returns, with arrays [B, T, ...].
    """
    if remat:
        fn = jax.checkpoint(fn, prevent_cse=False)
    length = per_query[0].shape[1]
    if length <= chunk:
        return fn(*per_query)
    n_chunks = -(-length // chunk)
    padding = n_chunks * chunk - length

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], n_chunks, chunk, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], n_chunks * chunk, *x.shape[3:])[:, :length]

    return jax.tree.map(join, lax.map(lambda rows: fn(*rows), tuple(split(x) for x in per_query)))
