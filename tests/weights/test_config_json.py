"""config.json to NosaConfig: released ones, other Llamas and MiniCPMs, and what is refused by the name of its key."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.errors import InputError
from nosa_jax.rope import inverse_frequencies
from nosa_jax.weights.config_json import config_from_json, config_to_json
from tests.oracle.test_model import run
from tests.oracle.weights import model_with, random_weights
from tests.weights.cases import CONFIG_JSON, SMALL, write_checkpoint

FACTORS = [1.0, 1.5, 2.5, 4.0]


def parse(**changes) -> NosaConfig:
    return config_from_json({k: v for k, v in (CONFIG_JSON | changes).items() if v is not ...})


def test_released_shapes_have_the_published_budget() -> None:
    """Dimensions of the 8B checkpoint; its selection is fixed in the authors' code, so its config does not say it."""
    factors = [1 + i / 64 for i in range(64)]
    values = CONFIG_JSON | {
        "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 73448, "torch_dtype": "bfloat16",
        "max_position_embeddings": 32768,
        "rope_scaling": {"rope_type": "longrope", "short_factor": factors, "long_factor": factors,
                         "attention_factor": 1.0, "original_max_position_embeddings": 32768},
    }  # fmt: skip
    del values["sparse_config"]
    config = config_from_json(values)
    assert config == NosaConfig.nosa_8b(
        rope_factors=tuple(factors), param_dtype="bfloat16", max_context=32768, attention="nosa"
    )
    assert (config.budget.sink, config.budget.local, config.budget.query, config.budget.evict) == (1, 17, 15, 31)


def test_defaults_of_keys_that_old_configs_lack() -> None:
    config = parse(
        num_key_value_heads=..., head_dim=..., hidden_size=32, rms_norm_eps=..., rope_theta=..., rope_scaling=...,
        tie_word_embeddings=..., max_position_embeddings=..., attention_bias=..., torch_dtype=...,
    )  # fmt: skip
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.rope_theta) == (4, 8, 1e-6, 10_000.0)
    assert not config.tie_embeddings
    assert config.max_context == 131_072


def test_newer_spelling_of_rope_and_dtype() -> None:
    config = parse(
        rope_scaling=..., rope_theta=..., torch_dtype=..., dtype="bfloat16",
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    )  # fmt: skip
    assert (config.rope_theta, config.rope_factors, config.dtype) == (500.0, (4.0,) * 4, "bfloat16")


def test_null_is_the_same_as_missing() -> None:
    config = parse(
        tie_word_embeddings=None, max_position_embeddings=None, torch_dtype=None, dtype="float16", rope_theta=None,
        rope_scaling=longrope(original_max_position_embeddings=128, rope_theta=None),
    )  # fmt: skip
    assert (config.tie_embeddings, config.max_context, config.dtype) == (False, 131_072, "float16")
    assert (config.rope_theta, config.rope_attention_factor) == (10_000.0, 1.0)
    assert parse(**minicpm(tie_word_embeddings=None)).tie_embeddings


def longrope(**changes):
    return {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS} | changes


def test_longrope_attention_factor_given_or_computed() -> None:
    assert parse(rope_scaling=longrope(attention_factor=1.25)).rope_attention_factor == 1.25
    assert parse(rope_scaling=longrope()).rope_attention_factor == 1.0
    extended = parse(rope_scaling=longrope(original_max_position_embeddings=128))
    assert extended.rope_attention_factor == math.sqrt(1 + math.log(512 / 128) / math.log(128))
    assert extended.rope_factors == tuple(FACTORS)
    older = parse(rope_scaling=longrope() | {"type": "longrope"}, original_max_position_embeddings=128)
    assert older.rope_attention_factor == extended.rope_attention_factor


def test_longrope_lists_that_differ_are_used_within_the_original_context_only() -> None:
    lists = longrope(long_factor=[9.0] * 4, original_max_position_embeddings=128)
    with pytest.raises(InputError, match=r"rope_scaling\.long_factor differs.*max_context=128 or less"):
        parse(rope_scaling=lists)
    values = CONFIG_JSON | {"rope_scaling": lists}
    assert config_from_json(values, max_context=128).rope_factors == tuple(FACTORS)


def test_llama3_frequencies() -> None:
    """As published: wavelengths above 8192 / 1 are divided by 8, below 8192 / 4 kept, between them blended."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    config = parse(rope_scaling=scaling, rope_theta=500_000.0, head_dim=128)
    plain = 1 / 500_000.0 ** (np.arange(0, 128, 2) / 128)
    expected = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    np.testing.assert_allclose(inverse_frequencies(config), expected, rtol=1e-12)
    assert len(set(np.round(inverse_frequencies(config) / plain, 6))) > 3


def minicpm(**changes):
    return {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16} | changes


def test_minicpm_scales_are_those_of_folded_weights(tmp_path) -> None:
    """Embeddings times scale_emb, branches times scale_depth / sqrt(L), logits of states over D / dim_model_base."""
    weights = random_weights(SMALL, 4)
    model = NosaLM.from_pretrained(write_checkpoint(tmp_path, weights, **minicpm()))
    folded = dict(weights)
    folded["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * 12
    folded["lm_head.weight"] = weights["lm_head.weight"] * 16 / 24
    for i in range(2):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.{i}.{name}.weight"
            folded[name] = weights[name] * 1.4 / math.sqrt(2)
    tokens = jnp.arange(50)[None] % 61
    ours, theirs = (run(m, tokens, "nosa")[0] for m in (model, model_with(SMALL, folded)))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-5)
    assert config_from_json(config_to_json(model.config)) == model.config


def test_minicpm_is_tied_unless_it_says_otherwise() -> None:
    assert parse(**minicpm(tie_word_embeddings=...)).tie_embeddings
    assert not parse(**minicpm()).tie_embeddings


def test_config_of_every_kind_survives() -> None:
    configs = [
        NosaConfig.tiny(), NosaConfig.nosa_1b(), NosaConfig.nosa_8b(attention="dense", dtype="float16"), SMALL,
        SMALL.replace(rope_factors=(1.0, 1 / 3, 2.7, 1e3), rope_attention_factor=1.1, tie_embeddings=True),
        SMALL.replace(query_blocks=0, evict_blocks=0, sink_blocks=0, local_blocks=2, eviction="none", attention="dma"),
        SMALL.replace(scale_emb=12.0, scale_depth=1.4, dim_model_base=16.0, eviction="dma", attention="infllmv2"),
    ]  # fmt: skip
    for config in configs:
        assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2"}, ["model_type='qwen2'", "'llama'"]),
        ({"hidden_size": ...}, ["hidden_size is missing"]),
        ({"hidden_size": "24"}, ["hidden_size is '24'", "integer"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
        ({"attention_bias": True}, ["attention_bias=True", "not supported"]),
        ({"mlp_bias": True}, ["mlp_bias=True"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"sliding_window": 4096}, ["sliding_window=4096"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"num_local_experts": 8}, ["num_local_experts=8"]),
        ({"kv_lora_rank": 512}, ["kv_lora_rank=512"]),
        ({"v_head_dim": 16}, ["v_head_dim=16", "head_dim=8"]),
        ({"head_dim": ..., "hidden_size": 30}, ["head_dim is missing", "30", "4"]),
        ({"head_dim": 7}, ["head_dim=7", "even"]),
        ({"num_key_value_heads": 3}, ["num_kv_heads=3"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        ({"rope_theta": -1}, ["rope_theta=-1"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type='yarn'", "longrope"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["rope_scaling.rope_type='dynamic'"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor=None"]),
        ({"rope_scaling": [1]}, ["rope_scaling=[1]"]),
        ({"rope_scaling": longrope(short_factor=[1.0])}, ["rope_scaling.short_factor", "4", "has 1"]),
        ({"rope_scaling": longrope(short_factor=[1.0, 0.0, 1.0, 1.0])}, ["rope_scaling.short_factor", "positive"]),
        ({"scale_emb": 12}, ["scale_emb=12", "model_type='llama'"]),
        (minicpm(scale_depth=...), ["scale_depth is missing", "positive"]),
        (minicpm(sparse_config={"topk": 64, "dense_len": 8192}), ["select_blocks", "Remove sparse_config"]),
        ({"sparse_config": {"dense_len": 8192}}, ["sparse_config.dense_len=8192"]),
        ({"sparse_config": {"use_nope": True}}, ["sparse_config.use_nope=True"]),
        ({"sparse_config": {"colour": 1}}, ["sparse_config.colour"]),
        ({"sparse_config": {"window_size": 100}}, ["sparse_config.window_size=100", "block_size=64"]),
        ({"sparse_config": {"topk": 20}}, ["sparse_config.topk=20", "17 blocks"]),
        ({"sparse_config": {"kernel_size": "32"}}, ["sparse_config.kernel_size='32'"]),
        ({"sparse_config": {"attention": "sparse"}}, ["sparse_config.attention='sparse'", "infllmv2"]),
        ({"sparse_config": 3}, ["sparse_config=3"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings is 'false'", "true or false"]),
        ({"num_attention_heads": 10**30}, ["num_attention_heads is 1000", "below 2**31"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps is 1000", "positive number"]),
        ({"rope_theta": 10**400}, ["rope_theta=1000"]),
        ({"layer_types": [["full_attention"]]}, ["layer_types"]),
        ({"logit_scale": 0.5}, ["logit_scale=0.5"]),
        ({"embedding_multiplier": 12.0}, ["embedding_multiplier=12.0"]),
        ({"use_qk_norm": True}, ["use_qk_norm=True"]),
        (
            {"rope_scaling": ..., "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            ["rope_parameters.partial_rotary_factor=0.5"],
        ),
        (
            {"rope_scaling": ..., "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["rope_parameters.full_attention", "known are rope_type"],
        ),
        ({"rope_scaling": longrope(short_mscale=1.2)}, ["rope_scaling.short_mscale=1.2"]),
    ],
)  # fmt: skip
def test_w2_what_cannot_be_used_is_named(changes, words) -> None:
    with pytest.raises(InputError) as caught:
        parse(**changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_damaged_config_file_is_named(tmp_path, text) -> None:
    write_checkpoint(tmp_path, random_weights(SMALL, 1))
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"config\.json"):
        NosaLM.from_pretrained(tmp_path)
