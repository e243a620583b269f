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


@pytest.mark.parametrize(
    ("attention", "layers"), [("nosa", 1), pytest.param("nosa", 4, marks=pytest.mark.slow),
                              pytest.param("dense", 4, marks=pytest.mark.slow)]
)  # fmt: skip
def test_16k_token_training_step_stays_far_below_all_scores(attention, layers):
    """A few chunks of logits and activations per token, however many layers; all scores at once would be 4 GiB."""
    config = NosaConfig.tiny(num_layers=layers)
    skeleton, params = abstract_model(config)

    def loss(params, tokens):
        hidden = skeleton.merge(params).hidden_states(tokens, attention, remat=True)
        return jnp.square(hidden).mean()

    used = temporaries(jax.grad(loss), params, jax.ShapeDtypeStruct((1, TOKENS), jnp.int32))
    per_layer = 6 * 4 * TOKENS * config.embed_dim  # float32 vectors of the model's width
    print(f"{attention}, {layers} layers: {used / MIB:.0f} MiB of temporaries")
    assert used < 512 * MIB + layers * per_layer
