"""The attention of one layer over a whole sequence, for training and prefill."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.eviction import ranking_scores
from nosa_jax.pallas_kernels import dense_attention, sparse_attention
from nosa_jax.parallel import over_batch
from nosa_jax.selection import block_ranking, pooled_keys, select

BLOCK_IDS = "block_ids"  # name under which a rematerialisation policy can keep the selection


def sequence_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    cis: Float[Array, "B T K"],
    *,
    config: NosaConfig,
    attention: AttentionKind,
) -> tuple[Float[Array, "B T N H"], Int[Array, "B T K C"] | None]:
    """Causal attention of sequences that start at position 0.

    Args:
      q, k: rotated queries and keys. v: values. cis: eviction scores, zero where the config has no head.
      attention: "dense" attends to everything without bias; "infllmv2" selects without cis; "dma" and "nosa"
        select by their budgets and add cis to the logits (docs/02).

    Returns: the attention output in the dtype of q, and the selected block ids (None for "dense").
    """
    if attention == "dense":
        return over_batch(dense_attention, q, k, v), None
    frozen_q, frozen_k, frozen_cis = jax.lax.stop_gradient((q, k, cis))

    def choose(q: jax.Array, k: jax.Array, cis: jax.Array) -> jax.Array:
        return select(
            q,
            pooled_keys(k, config),
            block_ranking(ranking_scores(cis, config.eviction), config, n_blocks=config.num_blocks(q.shape[1])),
            jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2]),
            config=config,
            attention=attention,
        )

    block_ids = checkpoint_name(over_batch(choose, frozen_q, frozen_k, frozen_cis), BLOCK_IDS)
    bias = cis if config.uses_eviction_head(attention) else None
    attend = partial(sparse_attention, block_size=config.block_size)
    return over_batch(attend, q, k, v, bias, block_ids), block_ids
