"""NOSA, native and offloadable sparse attention (arXiv 2510.13602), in JAX.

`NosaConfig` and `NosaLM` define the model, `nosa_jax.train` trains it, and `nosa_jax.infer` decodes with the KV
cache in host memory. Subpackages are imported on their own: importing `nosa_jax` needs no GPU and no extension.
"""

from nosa_jax.config import AttentionKind, EvictionVariant, NosaConfig, SelectionBudget
from nosa_jax.model import NosaLM

__all__ = ["AttentionKind", "EvictionVariant", "NosaConfig", "NosaLM", "SelectionBudget"]
