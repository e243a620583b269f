"""How a decode step is best made on the device at hand, as measured on an H200."""

from collections.abc import Callable
from typing import Any

import jax

from nosa_jax.ffi import has_cuda

MANY_ROWS = 32
OVERLAPPED_PAIRS = 32


def step_options(rows: int, *, replayed: bool = False) -> dict[str, Any] | None:
    """XLA's options by name for decode steps of so many rows; None for its defaults.

    Within a CUDA graph, kernels that need nothing of each other run side by side: the two wide products of an MLP, and
    what counts hits. Steps of 16, 32 and 64 rows of four layers of the 8B shape took 1.2 to 1.4 % less with it on one
    H200, 0.3 to 0.5 on another. But where a selection is replayed, nothing needs the one that is computed: it would run
    beside attention.

    With many rows the products of hidden states and weights are left to cuBLAS, whose sums are rounded otherwise than
    those of Triton, which XLA picks by itself. Within a step of 64 rows they took 13 us less a layer, at 16 rows 5 us
    more; at 32 rows a step of four layers took 5 % less (docs/09). XLA then must not merge products of the same hidden
    states whose weights are small, as those of the 1B shape: it would copy the weights together in every step.
    """
    if jax.default_backend() != "gpu":
        return None
    options: dict[str, Any] = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE" if replayed else "CONCURRENT"}
    if rows >= MANY_ROWS:
        options |= {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    return options


def jit_in_place(function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """`jax.jit` of a step whose new state lies where the one lay that it was given, leaf by leaf.

    JAX drops arguments that are not read, such as the counts of the last step, and gives the memory of the others to
    the first results of the same shape. Leaves would then change places in every step, and XLA would write their
    addresses into its CUDA graph before each launch (docs/09). So all arguments are kept here; a function must give the
    state first, and the rest of what is donated in the order of its arguments.
    """
    return jax.jit(function, keep_unused=True, **options)


def overlap_pays(pairs: int) -> bool:
    """Whether to attend to resident blocks while others arrive, with so many pairs of a row and a KV head: same bits.

    At 64K tokens of the 8B shape (2 KV heads, twice as many slots as selected blocks) on an H200, a step took 3 % less
    at 16 rows, and its kernels at least 5 % less at 32 and 8 % at 64; fewer rows, which miss fewer blocks, were not
    measured. Without the CUDA library nothing overlaps.
    """
    return has_cuda() and jax.default_backend() == "gpu" and pairs >= OVERLAPPED_PAIRS
