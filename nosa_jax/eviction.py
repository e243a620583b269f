"""The eviction head: a query-agnostic importance score per token and KV head."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from nosa_jax.config import EvictionVariant


def eviction_scores(
    v: Float[Array, "B T K H"], delta_weight_kkh: Float[Array, "K K H"], a_k: Float[Array, "K"]
) -> Float[Array, "B T K"]:
    """cis = A * softplus(delta · V), with the values of all KV heads side by side (arXiv 2510.13602, eviction head).

    Args:
      v: values of every KV head; values carry no position encoding.
      delta_weight_kkh: a linear map from all KV heads' values to one number per KV head.
      a_k: signed scale per KV head. Zero (its initial value) makes every score zero: plain sparse attention.

    Returns: float32 scores, added to the scaled attention logits of their token.
    """
    pre_activation = jnp.einsum(
        "btmh,kmh->btk",
        v.astype(jnp.float32),
        delta_weight_kkh.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    return a_k.astype(jnp.float32) * jax.nn.softplus(pre_activation)


def token_scores(
    v: Float[Array, "B T K H"],
    delta_weight_kkh: Float[Array, "K K H"],
    a_k: Float[Array, "K"],
    variant: EvictionVariant,
) -> Float[Array, "B T K"]:
    """`eviction_scores`, or zeros for the variant without an eviction head."""
    if variant == "none":
        return jnp.zeros(v.shape[:3], jnp.float32)
    return eviction_scores(v, delta_weight_kkh, a_k)


def ranking_scores(cis: Float[Array, "*shape"], variant: EvictionVariant) -> Float[Array, "*shape"]:
    """What block selection pools and ranks: cis itself, or exp(cis) for the original DMA, which loses precision."""
    return jnp.exp(cis) if variant == "dma" else cis
