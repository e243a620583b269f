"""Rotary position embedding, with LongRoPE factors where a config has them."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nosa_jax.config import NosaConfig

_LOW_BITS = 10  # a position of up to 32 - 10 bits times the low part of a step fits 32 bits


def inverse_frequencies(config: NosaConfig) -> np.ndarray:
    """Radians per position of each pair of dimensions, float64 [H/2]: 1 / (factor_i * theta^(2i/H)) (LongRoPE)."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    factors = np.ones_like(exponent) if config.rope_factors is None else np.asarray(config.rope_factors)
    return 1.0 / (factors * config.rope_theta**exponent)


def rope_angles(positions: Int[Array, "B T"], config: NosaConfig) -> Float[Array, "B T half"]:
    """Angles of each pair of dimensions in radians, within (-π, π].

    Their error is 3e-7 up to 131,072 tokens and 3e-6 at 2**22, the largest position that a config allows.
    The product of position and frequency is taken modulo a full turn in fixed-point integers: in float32 it would be
    off by 0.01 at 100,000 tokens.
    """
    turns = inverse_frequencies(config) / (2 * np.pi) % 1.0
    fixed = np.round(turns * 2.0 ** (32 + _LOW_BITS)).astype(np.uint64)
    high = jnp.asarray(fixed >> np.uint64(_LOW_BITS) & np.uint64(0xFFFFFFFF), jnp.uint32)
    low = jnp.asarray(fixed & np.uint64(2**_LOW_BITS - 1), jnp.uint32)
    at = positions[..., None].astype(jnp.uint32)
    phase = at * high + (at * low >> _LOW_BITS)  # wraps around at a full turn
    return jax.lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2**32)


def rope_tables(
    positions: Int[Array, "B T"], config: NosaConfig
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosines and sines of `rope_angles`, times the config's attention factor; float32."""
    angles = rope_angles(positions, config)
    return jnp.cos(angles) * config.rope_attention_factor, jnp.sin(angles) * config.rope_attention_factor


def rotate(
    x: Float[Array, "B T heads H"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T heads H"]:
    """Rotate each pair of dimensions i, i + H/2 by the angle with these cosines and sines, in float32."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def apply_rope(
    x: Float[Array, "B T heads H"], positions: Int[Array, "B T"], config: NosaConfig
) -> Float[Array, "B T heads H"]:
    """Rotate queries or keys by their absolute positions, pairing dimension i with i + H/2.

    Args:
      x: queries or keys.
      positions: absolute positions in tokens.
      config: gives theta, the LongRoPE factors and the attention factor that scales cos and sin.

    Returns: same shape and dtype; the rotation is computed in float32.
    """
    return rotate(x, *rope_tables(positions, config))
