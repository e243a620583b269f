"""NOSA, native and offloadable sparse attention (arXiv 2510.13602), in JAX.

`NosaConfig` and `NosaLM` define the model, `nosa_jax.train` trains it, and `nosa_jax.infer` decodes with the KV
cache in host memory. Subpackages are imported on their own: importing `nosa_jax` needs no GPU and no extension. What is
named here is imported when it is first used, so that the commands begin at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nosa_jax.config import AttentionKind, EvictionVariant, NosaConfig, SelectionBudget
    from nosa_jax.model import NosaLM

__all__ = ["AttentionKind", "EvictionVariant", "NosaConfig", "NosaLM", "SelectionBudget"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module("nosa_jax.model" if name == "NosaLM" else "nosa_jax.config")
    globals()[name] = getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
