"""Rotary position embedding, with LongRoPE factors where a config has them."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nosa_jax.config import NosaConfig


def inverse_frequencies(config: NosaConfig) -> np.ndarray:
    """Radians per position of each pair of dimensions, float32 [H/2]: 1 / (factor_i * theta^(2i/H)) (LongRoPE)."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    factors = np.ones_like(exponent) if config.rope_factors is None else np.asarray(config.rope_factors)
    return (1.0 / (factors * config.rope_theta**exponent)).astype(np.float32)


def apply_rope(
    x: Float[Array, "B T heads H"], positions: Int[Array, "B T"], config: NosaConfig
) -> Float[Array, "B T heads H"]:
    """Rotate queries or keys by their absolute positions, pairing dimension i with i + H/2.

    Args:
      x: queries or keys.
      positions: absolute positions in tokens.
      config: gives theta, the LongRoPE factors and the attention factor that scales cos and sin.

    Returns: same shape and dtype; angles and rotation are float32.
    """
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)
    cos = (jnp.cos(angles) * config.rope_attention_factor)[:, :, None]
    sin = (jnp.sin(angles) * config.rope_attention_factor)[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
