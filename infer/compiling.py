"""How XLA is to compile a decode step."""

from typing import Any

import jax

MANY_ROWS = 32


def step_options(rows: int) -> dict[str, Any] | None:
    """XLA's options by name for decode steps of so many rows; None for its defaults.

    With many rows the products of hidden states and weights are left to cuBLAS. XLA picks Triton's by timing each
    product on its own, with a part of the weights in the cache; within a step of 64 rows of the 8B shape on an H200,
    cuBLAS took 13 us less a layer, and at 16 rows 7 us more (docs/09).
    """
    if jax.default_backend() != "gpu" or rows < MANY_ROWS:
        return None
    return {"xla_gpu_enable_triton_gemm": False}
