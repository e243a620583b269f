"""The memory of long sequences is bounded: nothing as large as all queries times all keys ever exists."""

import jax
import jax.numpy as jnp
import pytest

from nosa_jax.checkpoint import abstract_model
from nosa_jax.config import NosaConfig

TOKENS = 16_384
MIB = 2**20


def temporaries(function, *shapes) -> int:
    """Bytes that the compiled function allocates beside its arguments and results; nothing is run."""
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("attention", [pytest.param("dense", marks=pytest.mark.slow), "nosa"])
def test_16k_token_training_step_stays_far_below_all_scores(attention):
    config = NosaConfig.tiny(num_layers=2)
    skeleton, params = abstract_model(config)

    def loss(params, tokens):
        hidden = skeleton.merge(params).hidden_states(tokens, attention, remat=True)
        return jnp.square(hidden).mean()

    used = temporaries(jax.grad(loss), params, jax.ShapeDtypeStruct((1, TOKENS), jnp.int32))
    all_scores = 4 * TOKENS * TOKENS * config.num_heads
    print(f"{attention}: {used / MIB:.0f} MiB of temporaries; all scores would be {all_scores / MIB:.0f} MiB")
    assert used < all_scores / 4
