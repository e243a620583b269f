"""Query-aware block scores as Mosaic GPU kernels: which of the two runs, and what they do not take."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels.pooled_scores.decode import decode_scores
from nosa_jax.pallas_kernels.pooled_scores.prefill import COLUMNS, prefill_scores

DECODE_QUERIES = 4  # queries per sequence up to which the keys are read once per query, by many programs
HEAD_DIMS = (64, 96, 128, 192, 256)
ROWS = 8  # blocks: TMA reads tiles of eight rows
MAX_PHASES = 16  # windows per block; each is unrolled


def unsupported(q: jax.Array, pooled_k: jax.Array, *, n_blocks: int, block_size: int, stride: int) -> str | None:
    """Why the kernels do not take these arguments, or None if they do."""
    n_kv, n_windows = pooled_k.shape[1:3]
    n_heads, head_dim = q.shape[2:]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {q.dtype}; wgmma multiplies bfloat16 or float16"
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if n_heads // n_kv > COLUMNS:
        return f"{n_heads // n_kv} query heads per KV head exceed its limit of {COLUMNS}"
    if block_size // stride > MAX_PHASES:
        return f"{block_size // stride} windows per block ({block_size=}, {stride=}) exceed its limit of {MAX_PHASES}"
    if not (q.size and n_windows and n_blocks):
        return f"queries of shape {q.shape}, {n_windows} windows and {n_blocks} blocks leave nothing to compute"
    return None


@functools.partial(jax.jit, static_argnames=("n_blocks", "block_size", "window", "stride", "interpret"))
def pooled_scores(
    q: jax.Array,
    pooled_k: jax.Array,
    positions: jax.Array,
    *,
    n_blocks: int,
    block_size: int,
    window: int,
    stride: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Block scores [B, T, K, M] in float32; as the reference. Jitted, so that many layers compile one kernel.

    The windows should fill a multiple of eight blocks; otherwise the pooled keys are copied to pad them.
    """
    batch, n_kv, n_windows, head_dim = pooled_k.shape
    phases = block_size // stride
    keys = pooled_k.astype(q.dtype)
    if n_windows % (ROWS * phases):
        keys = jnp.pad(keys, ((0, 0), (0, 0), (0, -n_windows % (ROWS * phases)), (0, 0)))
    run = decode_scores if q.shape[1] <= DECODE_QUERIES else prefill_scores
    return run(
        q,
        keys.reshape(batch * n_kv, -1, phases * head_dim),
        positions,
        n_blocks=n_blocks,
        phases=phases,
        n_windows=n_windows,
        window=window,
        stride=stride,
        interpret=interpret,
    )
