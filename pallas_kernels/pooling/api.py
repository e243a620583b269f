"""Public pooling functions."""

import jax
from jaxtyping import Array, Float

from nosa_jax.pallas_kernels.pooling import reference


def pool_windows(x: Float[Array, "B S K *rest"], *, window: int, stride: int) -> jax.Array:
    """Mean of every complete window of tokens, per KV head (arXiv 2510.13602, pooling stage 1).

    Window m covers the tokens m*stride .. m*stride+window-1; windows that are not complete do not exist.

    Args:
      x: per-token values, e.g. rotated keys [B, S, K, H] or cis [B, S, K].
      window, stride: tokens; stride divides window.

    Returns: [B, K, W, *rest] in the dtype of x, accumulated in float32, W = max(0, (S - window) // stride + 1).
    """
    return reference.pool_windows(x, window=window, stride=stride)


def pool_blocks(windows: Float[Array, "*lead W"], *, n_blocks: int, windows_per_block: int) -> jax.Array:
    """Maximum of the windows that touch each block (arXiv 2510.13602, pooling stage 2).

    With r windows starting in a block, block b takes the windows r*b-1 .. r*b+r-1 that exist.

    Args:
      windows: per-window scores; -inf marks a window that is not visible. NaN spreads to its blocks.
      n_blocks: M.
      windows_per_block: r, the block size over the pooling stride.

    Returns: [*lead, M]; -inf for a block without a visible window.
    """
    return reference.pool_blocks(windows, n_blocks=n_blocks, windows_per_block=windows_per_block)
