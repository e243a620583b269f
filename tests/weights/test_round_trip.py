"""What is written is read back bit for bit, in both formats and between them."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.checkpoint import abstract_model, export_model, load_model, split_model
from nosa_jax.errors import InputError
from nosa_jax.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from nosa_jax.weights import find_model
from nosa_jax.weights.config_json import config_from_json, config_to_json
from tests.oracle.test_model import run
from tests.oracle.weights import checkpoint_shapes, model_with, random_weights
from tests.weights.cases import DTYPES, SMALL, assert_same_bits, params_of

MODEL = model_with(SMALL, random_weights(SMALL, 1))


@st.composite
def config_values(draw) -> dict:
    """Fields of NosaConfig: small models with any group, head size, block geometry, budget, RoPE, scale, dtype."""
    stride = draw(st.sampled_from([2, 3]))
    window = stride * draw(st.integers(1, 2))
    kv_heads, group, half = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    floats = st.floats(0.25, 4.0)
    return dict(
        vocab_size=draw(st.integers(3, 40)),
        embed_dim=draw(st.integers(1, 20)),
        ffn_dim=draw(st.integers(1, 20)),
        num_layers=draw(st.integers(1, 2)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=2 * half,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rope_theta=draw(st.sampled_from([10_000.0, 500_000.0, 123.4])),
        rope_factors=draw(st.none() | st.tuples(*[floats] * half)),
        rope_attention_factor=draw(st.just(1.0) | floats),
        tie_embeddings=draw(st.booleans()),
        scale_emb=draw(st.just(1.0) | floats),
        scale_depth=draw(st.none() | floats),
        dim_model_base=draw(st.none() | floats),
        block_size=2 * stride,
        pool_window=window,
        pool_stride=stride,
        sink_blocks=draw(st.integers(0, 2)),
        local_blocks=draw(st.integers(2, 3)),
        query_blocks=draw(st.integers(0, 2)),
        evict_blocks=draw(st.integers(0, 2)),
        attention=draw(st.sampled_from(["dense", "infllmv2", "dma", "nosa"])),
        eviction=draw(st.sampled_from(["ed_dma", "dma", "none"])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        param_dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        max_context=draw(st.integers(64, 1000)),
    )


def check_round_trip(folder: Path, config: NosaConfig, seed: int) -> None:
    """To safetensors, from there to orbax, and back: equal bits, logits and selected blocks."""
    model = model_with(config, random_weights(config, seed))
    model.save_pretrained(folder / "safetensors", max_shard_size=2000)
    read = NosaLM.from_pretrained(folder / "safetensors")
    assert_same_bits(read, model)
    export_model(folder / "orbax", read)
    again = NosaLM.from_pretrained(folder / "orbax")
    assert_same_bits(again, model)
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (1, 40)).astype(np.int32)
    logits, blocks = run(model, tokens, config.attention)
    for other in (read, again):
        theirs, their_blocks = run(other, tokens, config.attention)
        np.testing.assert_array_equal(theirs, logits)
        for ours, others in zip(blocks, their_blocks, strict=True):
            assert (ours is None) == (others is None)
            if ours is not None:
                np.testing.assert_array_equal(others, ours)


@given(config_values(), st.integers(0, 9))
@settings(max_examples=3)
def test_any_model_exports_and_reimports_to_equal_logits(tmp_path_factory, values, seed) -> None:
    check_round_trip(tmp_path_factory.mktemp("any"), NosaConfig(**values), seed)


@pytest.mark.slow
@given(config_values(), st.integers(0, 9))
@settings(max_examples=25)
def test_many_models_export_and_reimport_to_equal_logits(tmp_path_factory, values, seed) -> None:
    check_round_trip(tmp_path_factory.mktemp("any"), NosaConfig(**values), seed)


@given(config_values())
@settings(max_examples=40)
def test_any_config_survives_but_for_scales_of_one(values) -> None:
    config = NosaConfig(**values)
    again = config_from_json(json.loads(json.dumps(config_to_json(config))))
    for field in ("residual_scale", "logit_divisor", "scale_emb", "rope_attention_factor"):
        assert getattr(again, field) == getattr(config, field), field
    same = {
        "scale_depth": config.scale_depth,
        "dim_model_base": config.dim_model_base,
        "rope_factors": config.rope_factors,
    }
    assert again.replace(**same) == config
    assert set(again.rope_factors or (1.0,)) == set(config.rope_factors or (1.0,))


def test_files_hold_what_the_reference_expects(tmp_path) -> None:
    """Names, shapes and layouts against an independent list; one file, or several with an index and their sizes."""
    weights = random_weights(SMALL, 1)
    MODEL.save_pretrained(tmp_path / "one")
    arrays = load_file(tmp_path / "one" / "model.safetensors")
    assert {n: a.shape for n, a in arrays.items()} == checkpoint_shapes(SMALL)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, weights[name])
    MODEL.save_pretrained(tmp_path / "many", max_shard_size="4KB")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    for file in files:
        part = load_file(tmp_path / "many" / file)
        assert len(part) == 1 or sum(a.nbytes for a in part.values()) <= 4000


def test_mixed_dtypes_go_through_both_formats(tmp_path) -> None:
    """A model read from shards of several dtypes is written with them; training from it asks for one dtype first."""
    params = split_model(MODEL)[1]
    mixed = {n: p.astype(list(DTYPES)[i % 3]) for i, (n, p) in enumerate(params.items())}
    config = SMALL.replace(param_dtype="bfloat16")
    model = abstract_model(config)[0].merge(mixed)
    model.save_pretrained(tmp_path / "safetensors")
    assert_same_bits(NosaLM.from_pretrained(tmp_path / "safetensors"), model)
    export_model(tmp_path / "orbax", model)
    assert_same_bits(NosaLM.from_pretrained(tmp_path / "orbax"), model)
    with pytest.raises(InputError, match="several dtypes"):
        load_model(tmp_path / "orbax", config=config)
    converted = NosaLM.from_pretrained(tmp_path / "orbax", dtype="float16")
    assert {p.dtype for p in params_of(converted).values()} == {np.dtype("float16")}


def test_c2_another_dtype_is_asked_for_explicitly(tmp_path) -> None:
    """Converting happens by name only, and sets what is computed in as well."""
    MODEL.save_pretrained(tmp_path / "m")
    kept, halved = NosaLM.from_pretrained(tmp_path / "m"), NosaLM.from_pretrained(tmp_path / "m", dtype="bfloat16")
    assert kept.config == SMALL
    assert halved.config == SMALL.replace(dtype="bfloat16", param_dtype="bfloat16")
    for name, array in params_of(halved).items():
        np.testing.assert_array_equal(array, np.asarray(jnp.asarray(params_of(kept)[name]).astype("bfloat16")))


def test_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(InputError, match="already exists and is not an empty folder"):
        MODEL.save_pretrained(tmp_path / "taken")
    with pytest.raises(InputError, match="max_shard_size='lots' is no size"):
        MODEL.save_pretrained(tmp_path / "m", max_shard_size="lots")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nosa_jax.weights.writer.write_tokenizer", full)
    with pytest.raises(OSError, match="No space left"):
        MODEL.save_pretrained(tmp_path / "m", ByteTokenizer())
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    (tmp_path / "empty").mkdir()
    MODEL.save_pretrained(tmp_path / "empty")  # an empty folder may be filled


@pytest.mark.parametrize("name", ["a b%41", "c#d?e", "é; &'x"])
def test_folders_of_any_name(tmp_path, name) -> None:
    """In a URL some of these characters would mean something."""
    folder = tmp_path / name
    MODEL.save_pretrained(folder / "safetensors")
    export_model(folder / "orbax", MODEL)
    for kind in ("safetensors", "orbax"):
        assert_same_bits(NosaLM.from_pretrained(folder / kind), MODEL)


def test_change_that_cannot_be_is_refused_before_weights_are_read(tmp_path, monkeypatch) -> None:
    MODEL.save_pretrained(tmp_path / "safetensors")
    export_model(tmp_path / "orbax", MODEL)
    monkeypatch.setattr("nosa_jax.weights.source.read_parameters", None)
    monkeypatch.setattr("nosa_jax.weights.source.load_model", None)
    for kind in ("safetensors", "orbax"):
        with pytest.raises(InputError, match="local_blocks=0 must be an integer"):
            find_model(tmp_path / kind).load(local_blocks=0)


def test_read_only_folder(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(OSError, match="file"):
        MODEL.save_pretrained(blocked / "m")


def word_tokenizer(**settings) -> JsonTokenizer:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": 3, "<|im_end|>": 4} | {f"w{i}": i for i in range(5, 61)}
    spec = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    spec.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    spec.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return JsonTokenizer(spec.to_str(), **settings)


@pytest.mark.parametrize("begins", [True, False])
def test_tokenizer_travels_with_the_model(tmp_path, begins) -> None:
    tokenizer = word_tokenizer(begins=begins, stop_ids=[2, 4], chat_template="{{ messages[0].content }}")
    MODEL.save_pretrained(tmp_path / "m", tokenizer)
    (tmp_path / "o").mkdir()
    export_model(tmp_path / "o", MODEL, tokenizer)
    for read in (
        load_tokenizer(tmp_path / "m"),
        find_model(tmp_path / "m").tokenizer,
        find_model(tmp_path / "o").tokenizer,
    ):
        assert (read.bos_id, read.eos_id, read.stop_ids) == (1 if begins else None, 2, (2, 4))
        assert read.chat_template == tokenizer.chat_template
        assert read.encode("w7 w8 <|im_end|>", bos=True).tolist() == [1] * begins + [7, 8, 4]
        assert read.special_tokens == tokenizer.special_tokens


def test_byte_tokenizer_travels_as_one_that_others_can_use(tmp_path) -> None:
    MODEL.save_pretrained(tmp_path / "m", ByteTokenizer())
    assert isinstance(load_tokenizer(tmp_path / "m"), ByteTokenizer)
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    text = "def f(x):\n\treturn 'é€😀'\x00\x7f  " + "".join(map(chr, range(256)))
    assert other.encode(text).ids == ByteTokenizer().encode(text).tolist()
    assert other.decode(ByteTokenizer().encode(text).tolist()) == text


def test_folder_may_be_moved(tmp_path) -> None:
    MODEL.save_pretrained(tmp_path / "m", max_shard_size="4KB")
    moved = Path(shutil.move(tmp_path / "m", tmp_path / "elsewhere"))
    assert_same_bits(NosaLM.from_pretrained(str(moved)), MODEL)
