"""Two-stage pooling in plain jnp."""

import jax
import jax.numpy as jnp


def stride_sums(x: jax.Array, stride: int) -> jax.Array:
    """Float32 sums over consecutive runs of `stride` tokens: [B, S, ...] to [B, S // stride, ...].

    Tokens are added one by one in their order. A decoder that adds each token as it comes gets the same bits.
    """
    count = x.shape[1] // stride
    runs = x[:, : count * stride].reshape(x.shape[0], count, stride, *x.shape[2:]).astype(jnp.float32)
    total = runs[:, :, 0]
    for offset in range(1, stride):
        total = total + runs[:, :, offset]
    return total


def window_means(sums: jax.Array, window: int, stride: int) -> jax.Array:
    """Float32 means of the complete windows, from stride sums: [B, n, ...] to [B, W, ...]."""
    runs = window // stride
    count = max(0, sums.shape[1] - runs + 1)
    total = sums[:, :count]
    for offset in range(1, runs):
        total = total + sums[:, offset : offset + count]
    return total / window


def pool_windows(x: jax.Array, *, window: int, stride: int) -> jax.Array:
    """Means over complete windows, KV heads first: [B, S, K, ...] to [B, K, W, ...], in the dtype of x."""
    return jnp.moveaxis(window_means(stride_sums(x, stride), window, stride), 1, 2).astype(x.dtype)


def pool_blocks(windows: jax.Array, *, n_blocks: int, windows_per_block: int) -> jax.Array:
    """Maxima over the windows that touch each block: [..., W] to [..., M]; -inf where a block has none."""
    r = windows_per_block
    covered = n_blocks * r
    windows = windows[..., :covered]
    lead = [(0, 0)] * (windows.ndim - 1)
    windows = jnp.pad(windows, [*lead, (1, covered - windows.shape[-1])], constant_values=-jnp.inf)
    own = windows[..., 1:].reshape(*windows.shape[:-1], n_blocks, r).max(axis=-1)
    before = windows[..., :covered:r]  # the last window of the previous block reaches into this one
    return jnp.maximum(own, before)
