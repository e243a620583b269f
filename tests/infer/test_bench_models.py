"""Shapes to time: presets, config files without weights, checkpoints."""

import json

import pytest

from nosa_jax import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.infer.bench_models import load, model_config
from nosa_jax.weights.config_json import config_to_json

SHAPE = NosaConfig.tiny(
    num_layers=2, embed_dim=64, ffn_dim=96, vocab_size=300, dtype="bfloat16", param_dtype="bfloat16"
)


@pytest.mark.parametrize("values", [config_to_json(SHAPE), SHAPE.to_dict()], ids=["released", "own"])
def test_a_config_file_without_weights_is_a_shape(tmp_path, values):
    """As a file of any name or as config.json of a folder; its weights are random and said to be."""
    (tmp_path / "model").mkdir()
    for file, name in ((tmp_path / "mine.json", None), (tmp_path / "model" / "config.json", tmp_path / "model")):
        file.write_text(json.dumps(values))
        name = str(name or file)
        config = model_config(name)
        assert config == SHAPE
        assert model_config(name, layers=1) == SHAPE.replace(num_layers=1)
    model, weights = load(name, model_config(name, layers=1))
    assert weights == "random weights"
    assert model.config == SHAPE.replace(num_layers=1)


def test_a_released_config_without_a_table_of_sizes_is_nosa(tmp_path):
    """No weights say whether there is an eviction head: the shape is of the attention that is measured here."""
    values = config_to_json(SHAPE)
    del values["sparse_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert model_config(str(tmp_path)).attention == "nosa"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json' cannot be read: Expecting"),
        ("[1]", r"config\.json' must hold a table"),
        ("{}", r"config\.json': num_attention_heads is missing"),
        (json.dumps(config_to_json(SHAPE) | {"num_hidden_layers": 0}), r"config\.json': num_hidden_layers is 0"),
        (
            json.dumps(SHAPE.to_dict() | {"num_layers": 0}),
            r"config\.json': num_layers=0 must be an integer of at least",
        ),
        (json.dumps(SHAPE.to_dict() | {"colour": 1}), r"config\.json': unknown config keys: colour"),
        (json.dumps({"num_layers": 1}), r"config\.json': missing config keys: .*embed_dim"),
    ],
)
def test_an_invalid_config_is_refused_with_file_and_fault(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    for name in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(InputError, match=message):
            model_config(str(name))


def test_what_is_no_shape_is_refused(tmp_path):
    """A file that is not there, weights in a form that is not read, a folder without a config."""
    with pytest.raises(InputError, match=r"none\.json'?: there is no such config file"):
        model_config(str(tmp_path / "none.json"))
    with pytest.raises(InputError, match=r"holds no complete checkpoint"):
        model_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(SHAPE)))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"weights in 'model\.bin', a format that runs code"):
        model_config(str(tmp_path))
    with pytest.raises(InputError, match=r"--layers 1 is for nosa_8b, .* a checkpoint has its own"):
        model_config(str(tmp_path), layers=1)
    with pytest.raises(InputError, match=r"--layers 0 must be at least 1"):
        model_config("tiny", layers=0)
