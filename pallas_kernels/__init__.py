"""The array operations of NOSA: pooling, scores, selection and attention over selected blocks.

One folder per operation: `reference.py` is the definition in plain jnp (the oracle, float32, small inputs),
`xla.py` the version whose memory is bounded for long inputs where the two differ, `api.py` the public function
that chooses between them by `implementation=`.
"""

from nosa_jax.pallas_kernels.decode_attention.api import (
    decode_attention,
    decode_attention_partial,
)
from nosa_jax.pallas_kernels.decode_attention.merge import Partial, merge_partials
from nosa_jax.pallas_kernels.dense_attention.api import dense_attention
from nosa_jax.pallas_kernels.dispatch import IMPLEMENTATIONS, Implementation, default_implementation
from nosa_jax.pallas_kernels.pooled_scores.api import pooled_scores
from nosa_jax.pallas_kernels.pooling.api import pool_blocks, pool_windows
from nosa_jax.pallas_kernels.select_blocks.api import NO_BLOCK, select_blocks
from nosa_jax.pallas_kernels.sparse_attention.api import sparse_attention

__all__ = [
    "IMPLEMENTATIONS",
    "NO_BLOCK",
    "Implementation",
    "Partial",
    "decode_attention",
    "decode_attention_partial",
    "default_implementation",
    "dense_attention",
    "merge_partials",
    "pool_blocks",
    "pool_windows",
    "pooled_scores",
    "select_blocks",
    "sparse_attention",
]
