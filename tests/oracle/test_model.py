"""The JAX model against the float64 decoder: logits, selected blocks and gradients of small random models."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nosa_jax.checkpoint import abstract_model, split_model
from nosa_jax.config import NosaConfig
from nosa_jax.infer.bench_models import read_config
from tests.oracle import decoder
from tests.oracle.compare import assert_close
from tests.oracle.weights import checkpoint_shapes, model_with, random_weights, to_checkpoint

SMALL = NosaConfig(
    vocab_size=61, embed_dim=32, ffn_dim=48, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, block_size=8,
    pool_window=8, pool_stride=4, sink_blocks=1, local_blocks=2, query_blocks=2, evict_blocks=3, dtype="float32",
)  # fmt: skip
LONG_ROPE = SMALL.replace(
    num_heads=4, num_kv_heads=4, head_dim=6, rope_factors=(1.0, 1.7, 3.2), rope_attention_factor=1.2, rope_theta=500.0,
    tie_embeddings=True, block_size=6, pool_window=6, pool_stride=3, num_layers=1,
)  # fmt: skip
ONE_KV_HEAD = SMALL.replace(num_heads=3, num_kv_heads=1, head_dim=10, pool_window=4, pool_stride=2, num_layers=1)


def tokens_for(config, seed, batch=2, length=117):
    return np.random.default_rng(seed).integers(0, config.vocab_size, size=(batch, length)).astype(np.int32)


@nnx.jit(static_argnums=2)
def run(model, tokens, attention):
    hidden, blocks = model.hidden_states_and_blocks(tokens, attention)
    return model.unembed(hidden), blocks


@pytest.mark.parametrize("attention", ["dense", "infllmv2", "dma", "nosa"])
@pytest.mark.parametrize("config", [SMALL, LONG_ROPE, ONE_KV_HEAD], ids=["group3", "longrope", "group3-one-kv-head"])
def test_logits_and_selected_blocks_match_oracle(config, attention):
    weights, tokens = random_weights(config, 1), tokens_for(config, 2)
    logits, blocks = run(model_with(config, weights), tokens, attention)
    expected, traces = decoder.forward(config, weights, tokens, attention)
    for ids, trace in zip(blocks, traces, strict=True):
        if attention == "dense":
            assert ids is None
        else:
            np.testing.assert_array_equal(ids, trace.ids)
    assert logits.dtype == jnp.float32
    assert_close(logits, expected, 1e-5)


@pytest.mark.parametrize("eviction", ["dma", "none"])
def test_eviction_variants(eviction):
    """`dma` ranks exp(cis), which keeps the order of pooled windows only roughly; `none` ranks all blocks equal."""
    config = SMALL.replace(eviction=eviction, num_layers=1)
    weights, tokens = random_weights(config, 3), tokens_for(config, 4, batch=1)
    logits, (ids,) = run(model_with(config, weights), tokens, "nosa")
    expected, (trace,) = decoder.forward(config, weights, tokens, "nosa")
    np.testing.assert_array_equal(ids, trace.ids)
    assert_close(logits, expected, 1e-5)


def test_a_of_zero_is_plain_sparse_attention():
    weights, tokens = random_weights(SMALL, 5), tokens_for(SMALL, 6)
    weights |= {name: 0 * value for name, value in weights.items() if name.endswith(".A")}
    config = SMALL.replace(eviction="none")
    logits, blocks = run(model_with(SMALL, weights), tokens, "nosa")
    plain, plain_blocks = run(model_with(config, weights), tokens, "nosa")
    jax.tree.map(np.testing.assert_array_equal, blocks, plain_blocks)
    np.testing.assert_allclose(logits, plain, atol=1e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_match_finite_differences_of_the_oracle(remat):
    """Directional derivatives of the mean next-token loss, parameter by parameter, selection included in both."""
    config = SMALL.replace(num_layers=2, num_heads=4)
    weights, tokens = random_weights(config, 7), tokens_for(config, 8, batch=1, length=81)
    skeleton, params = split_model(model_with(config, weights))

    @jax.jit
    @jax.grad
    def gradient(params):
        model = skeleton.merge(params)
        logits = model.unembed(model.hidden_states(jnp.asarray(tokens), "nosa", remat=remat))
        chosen = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return (jax.nn.logsumexp(logits[:, :-1], -1) - chosen).mean()

    def exact_loss(weights):
        logits, _ = decoder.forward(config, weights, tokens, "nosa")
        logits = logits[:, :-1]
        chosen = np.take_along_axis(logits, tokens[:, 1:, None].astype(int), -1)[..., 0]
        return (np.log(np.exp(logits).sum(-1)) - chosen).mean()

    grads = to_checkpoint(config, gradient(params))
    rng = np.random.default_rng(9)
    checked = sorted(weights) if not remat else ["model.layers.0.self_attn.delta.weight", "model.layers.1.self_attn.A"]
    for name in checked:
        direction = rng.normal(size=weights[name].shape)
        direction /= np.linalg.norm(direction)
        step = 1e-5
        ends = [exact_loss(weights | {name: weights[name] + sign * step * direction}) for sign in (1.0, -1.0)]
        expected = (ends[0] - ends[1]) / (2 * step)
        assert abs((grads[name] * direction).sum() - expected) < 2e-5 * max(1.0, np.linalg.norm(grads[name])), name
        assert np.linalg.norm(grads[name]) > 0, name


SHAPE_3B = Path(__file__).parents[2] / "benchmarks" / "shape_3b.json"


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (NosaConfig.nosa_1b(), 1_622_179_896),
        (NosaConfig.nosa_8b(), 8_185_270_336),
        (read_config(SHAPE_3B), 3_354_192_448),
    ],
    ids=["published 1b", "published 8b", "3b between them"],
)
def test_parameter_counts(config, count):
    """Shapes alone: nothing is allocated."""
    skeleton, params = abstract_model(config)
    assert sum(x.size for x in params.values()) == count
    assert sum(np.prod(shape) for shape in checkpoint_shapes(config).values()) == count
    logits = jax.eval_shape(lambda p, t: skeleton.merge(p)(t), params, jax.ShapeDtypeStruct((2, 8), jnp.int32))
    assert (logits.shape, logits.dtype) == ((2, 8, config.vocab_size), jnp.float32)
