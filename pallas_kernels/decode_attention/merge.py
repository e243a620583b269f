"""Attention over parts of a row's tokens, and how the parts become one."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Partial(NamedTuple):
    """Attention over some of a row's tokens, with what is needed to add the others later.

    Attributes:
      out: mean of the values of these tokens, weighted by their own softmax, float32; zeros if there are none.
      lse: log of the sum of exp(logit) over these tokens, float32; -inf if there are none.
    """

    out: Float[Array, "*parts N H"]
    lse: Float[Array, "*parts N"]


def merge_partials(*parts: Partial) -> Partial:
    """Attention over the union of disjoint parts (docs/03): weights w_i = exp(lse_i), out = Σ w_i out_i / Σ w_i.

    Elementwise over a fixed number of parts, in their order, so that it is one small fusion and gives the same bits
    on every run. Merging is associative up to rounding: the result is a part again.

    Args:
      parts: parts of equal shapes, at least one.
    """
    top = parts[0].lse
    for part in parts[1:]:
        top = jnp.maximum(top, part.lse)
    safe = jnp.where(jnp.isneginf(top), 0.0, top)  # no part has a token: all weights are exp(-inf) = 0
    weights = [jnp.exp(part.lse - safe) for part in parts]
    total = sum(weights[1:], weights[0])
    scale = 1.0 / jnp.where(total == 0, 1.0, total)
    terms = [part.out * (weight * scale)[..., None] for part, weight in zip(parts, weights, strict=True)]
    return Partial(sum(terms[1:], terms[0]), jnp.log(total) + safe)
