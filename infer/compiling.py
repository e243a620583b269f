"""How a decode step is best made on the device at hand, as measured on an H200."""

from typing import Any

import jax

MANY_ROWS = 32
OVERLAPPED_PAIRS = 128


def step_options(rows: int) -> dict[str, Any] | None:
    """XLA's options by name for decode steps of so many rows; None for its defaults.

    With many rows the products of hidden states and weights are left to cuBLAS, whose sums are rounded otherwise than
    those of Triton, which XLA picks by itself. Within a step of 64 rows of the 8B shape on an H200 they took 13 us less
    a layer, at 16 rows 7 us more; between them nothing was compared (docs/09).
    """
    if jax.default_backend() != "gpu" or rows < MANY_ROWS:
        return None
    return {"xla_gpu_enable_triton_gemm": False}


def overlap_pays(pairs: int) -> bool:
    """Whether to attend to resident blocks while others arrive, with so many pairs of a row and a KV head: same bits.

    It splits attention in two and breaks up CUDA graphs: a fixed time in every layer. At 64K tokens of the 8B shape
    (2 KV heads, twice as many slots as selected blocks) it cost 5 % at 16 rows, nothing at 32, and gained 7 % at 64.
    """
    return jax.default_backend() == "gpu" and pairs >= OVERLAPPED_PAIRS
