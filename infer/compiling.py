"""How a decode step is best made on the device at hand, as measured on an H200."""

from typing import Any

import jax

from nosa_jax.ffi import has_cuda

MANY_ROWS = 32
OVERLAPPED_PAIRS = 32


def step_options(rows: int, *, replayed: bool = False) -> dict[str, Any] | None:
    """XLA's options by name for decode steps of so many rows; None for its defaults.

    Within a CUDA graph, kernels that need nothing of each other run side by side: the two wide products of an MLP, and
    what counts hits. Steps of 16, 32 and 64 rows of four layers of the 8B shape on an H200 took 1.2 to 1.4 % less with
    it. But where a selection is replayed, nothing needs the one that is computed: it would run beside attention.

    With many rows the products of hidden states and weights are left to cuBLAS, whose sums are rounded otherwise than
    those of Triton, which XLA picks by itself. Within a step of 64 rows they took 13 us less a layer, at 16 rows 5 us
    more; at 32 rows a step of four layers took 5 % less (docs/09).
    """
    if jax.default_backend() != "gpu":
        return None
    options: dict[str, Any] = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE" if replayed else "CONCURRENT"}
    return options if rows < MANY_ROWS else options | {"xla_gpu_enable_triton_gemm": False}


def overlap_pays(pairs: int) -> bool:
    """Whether to attend to resident blocks while others arrive, with so many pairs of a row and a KV head: same bits.

    At 64K tokens of the 8B shape (2 KV heads, twice as many slots as selected blocks) on an H200, a step took 3 % less
    at 16 rows, and its kernels at least 5 % less at 32 and 8 % at 64; fewer rows, which miss fewer blocks, were not
    measured. Without the CUDA library nothing overlaps.
    """
    return has_cuda() and jax.default_backend() == "gpu" and pairs >= OVERLAPPED_PAIRS
