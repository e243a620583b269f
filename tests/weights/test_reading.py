"""Checkpoints in the published layout become the right parameters, or an error that names what is wrong (W1, W2)."""

import inspect
import json
import os
import re
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nosa_jax import NosaLM
from nosa_jax.checkpoint import export_model, load_model
from nosa_jax.errors import InputError
from nosa_jax.infer.frozen import freeze
from nosa_jax.weights import find_model
from tests.oracle.test_model import run
from tests.oracle.weights import model_with, random_weights
from tests.weights.cases import DTYPES, SMALL, assert_same_bits, params_of, write_checkpoint, write_config

WEIGHTS = random_weights(SMALL, 1)
SOME = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """A folder with one model as `safetensors` and as `orbax`."""
    folder = tmp_path_factory.mktemp("formats")
    write_checkpoint(folder / "safetensors", WEIGHTS)
    export_model(folder / "orbax", model_with(SMALL, WEIGHTS))
    return folder


def refusal(folder, **options) -> str:
    with pytest.raises(InputError) as caught:
        NosaLM.from_pretrained(folder, **options)
    return str(caught.value)


@pytest.mark.parametrize("files", [1, 3])
def test_w2_parameters_are_those_of_an_independent_reading(tmp_path, files) -> None:
    """Every matrix is random, so anything transposed wrongly differs; q_proj and o_proj are not square here."""
    model = NosaLM.from_pretrained(write_checkpoint(tmp_path, WEIGHTS, files=files))
    assert model.config == SMALL
    assert_same_bits(model, model_with(SMALL, WEIGHTS))
    assert "torch" not in sys.modules


def test_w2_square_matrix_of_asymmetric_values(tmp_path) -> None:
    """q_proj of width 32 is square: its row of ones must reach one feature of the query, from every input."""
    config = SMALL.replace(embed_dim=32)
    weights = random_weights(config, 1)
    weights[SOME] = np.zeros((32, 32), np.float32)
    weights[SOME][9] = np.arange(32)
    model = NosaLM.from_pretrained(write_checkpoint(tmp_path, weights, hidden_size=32))
    q = params_of(model)["layers.1.attention.q_weight_dnh"]
    np.testing.assert_array_equal(q[:, 1, 1], np.arange(32))  # output 9 is dimension 1 of head 1
    assert np.count_nonzero(q) == 31


@pytest.mark.parametrize("dtype", DTYPES)
def test_w2_dtype_of_the_files_is_kept(tmp_path, dtype) -> None:
    folder = write_checkpoint(tmp_path, WEIGHTS, dtype=dtype, torch_dtype=dtype)
    model = NosaLM.from_pretrained(folder)
    assert model.config.dtype == model.config.param_dtype == dtype
    for name, array in params_of(model).items():
        assert array.dtype == DTYPES[dtype], name
    expected = {n: a.astype(DTYPES[dtype]).astype(np.float32) for n, a in WEIGHTS.items()}
    assert_same_bits(NosaLM.from_pretrained(folder, dtype="float32"), model_with(SMALL, expected))


def test_w2_shards_of_mixed_dtypes_keep_theirs(tmp_path) -> None:
    """bf16, fp16 and fp32 in three files; converting to one is explicit, and rounds as NumPy does."""
    folder = write_checkpoint(tmp_path, WEIGHTS, files=3, torch_dtype="bfloat16")
    kinds = {}
    for file, dtype in zip(sorted(folder.glob("*.safetensors")), ("bfloat16", "float16", "float32"), strict=True):
        arrays = {n: a.astype(DTYPES[dtype]) for n, a in load_file(file).items()}
        kinds |= dict.fromkeys(arrays, dtype)
        save_file(arrays, file)
    model = NosaLM.from_pretrained(folder)
    assert {str(a.dtype) for a in params_of(model).values()} == set(DTYPES)
    rounded = {n: a.astype(DTYPES[kinds[n]]).astype(np.float32) for n, a in WEIGHTS.items()}
    assert_same_bits(NosaLM.from_pretrained(folder, dtype="float32"), model_with(SMALL, rounded))
    logits, _ = run(model, jnp.arange(20)[None], "nosa")
    assert logits.dtype == jnp.float32
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("unnamed", [..., None])
def test_dtype_that_the_config_does_not_name_is_that_of_most_weights(tmp_path, unnamed) -> None:
    model = NosaLM.from_pretrained(write_checkpoint(tmp_path, WEIGHTS, dtype="float16", torch_dtype=unnamed))
    assert model.config.dtype == model.config.param_dtype == "float16"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["absent", "same", "different"])
def test_w1_tied_flag_and_output_matrix(tmp_path, tied, head) -> None:
    weights = {n: a for n, a in WEIGHTS.items() if n != "lm_head.weight"}
    if head == "same":
        weights["lm_head.weight"] = WEIGHTS["model.embed_tokens.weight"]
    elif head == "different":
        weights["lm_head.weight"] = WEIGHTS["lm_head.weight"]
    folder = write_checkpoint(tmp_path, weights, tie_word_embeddings=tied)
    if not tied and head == "absent":
        message = refusal(folder)
        assert "'lm_head.weight' is missing" in message
        assert "tie_word_embeddings=false" in message
    elif tied and head == "different":
        message = refusal(folder)
        assert "'lm_head.weight' differs from 'model.embed_tokens.weight'" in message
        assert "Set tie_word_embeddings to false" in message
    else:
        model = NosaLM.from_pretrained(folder)
        assert model.config.tie_embeddings is tied
        assert ("lm_head_dv" in params_of(model)) is not tied


def test_plain_checkpoint_gets_an_eviction_head_and_says_so(tmp_path) -> None:
    """A Llama checkpoint gives its own logits with full attention, and its eviction head can learn."""
    plain = {n: a for n, a in WEIGHTS.items() if "delta" not in n and not n.endswith(".A")}
    folder = write_checkpoint(tmp_path, plain, sparse_config=...)
    with pytest.warns(UserWarning, match=r"has no eviction head.*A = 0, delta drawn with seed 3"):
        model = NosaLM.from_pretrained(folder, seed=3)
    assert model.config.attention == "dense"
    params = params_of(model)
    assert not params["layers.0.attention.a_k"].any()
    deltas = [params[f"layers.{i}.attention.delta_weight_kkh"] for i in range(2)]
    assert all(d.std() > 0.01 for d in deltas)
    assert not np.array_equal(*deltas)
    tokens = jnp.arange(40)[None]
    logits, _ = run(model, tokens, model.config.attention)
    np.testing.assert_array_equal(logits, run(model_with(SMALL, WEIGHTS), tokens, "dense")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again, switched = NosaLM.from_pretrained(folder, seed=3), NosaLM.from_pretrained(folder, attention="nosa")
    assert_same_bits(again, model)
    assert switched.config.attention == "nosa"


def test_an_eviction_head_in_some_layers_only_is_not_completed(tmp_path) -> None:
    weights = {n: a for n, a in WEIGHTS.items() if n != "model.layers.1.self_attn.A"}
    message = refusal(write_checkpoint(tmp_path, weights))
    assert "'model.layers.1.self_attn.A' is missing" in message
    assert "nothing is made up" in message


def test_tables_that_old_files_hold_are_not_weights(tmp_path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    NosaLM.from_pretrained(write_checkpoint(tmp_path, WEIGHTS | extra))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({SOME: None}, [f"'{SOME}' is missing", "1 in all"]),
        (
            {"model.layers.2.mlp.up_proj.weight": np.ones((40, 24))},
            ["'model.layers.2.mlp.up_proj.weight'", "not in this"],
        ),
        ({"model.layers.0.self_attn.q_proj.bias": np.ones(32)}, ["q_proj.bias", "not in this model"]),
        ({SOME: np.ones((24, 32))}, [SOME, "[24, 32]", "[32, 24]", "head_dim=8"]),
        ({SOME: np.ones((48, 24))}, [SOME, "[48, 24]", "num_attention_heads=4"]),
    ],
)
def test_w2_tensor_that_does_not_fit_is_named(tmp_path, changes, words) -> None:
    weights = {n: a for n, a in (WEIGHTS | changes).items() if a is not None}
    message = refusal(write_checkpoint(tmp_path, weights))
    for word in (*words, str(tmp_path)):
        assert word in message


def test_weights_of_another_architecture(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, {"transformer.h.0.attn.c_attn.weight": np.ones((24, 72))})
    message = refusal(folder)
    assert "another architecture" in message
    assert "transformer.h.0.attn.c_attn.weight" in message


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
def test_w2_dtype_that_is_no_weight_s(tmp_path, dtype) -> None:
    folder = write_checkpoint(tmp_path, WEIGHTS)
    save_file(load_file(folder / "model.safetensors") | {SOME: np.ones((32, 24), dtype)}, folder / "model.safetensors")
    message = refusal(folder)
    assert f"'{SOME}' has dtype" in message
    assert "BF16, F16, F32" in message


def test_w2_missing_shard(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, WEIGHTS, files=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = refusal(folder)
    assert "'model-00002-of-00003.safetensors'" in message
    assert re.search(r"the index has '[\w.]+' and \d+ other", message)


def test_w2_index_and_files_that_disagree(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, WEIGHTS, files=2)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    file = table[SOME]

    def message_with(changed: dict) -> str:
        index.write_text(json.dumps({"weight_map": changed}))
        return refusal(folder)

    assert f"names 'no.such.weight' in '{file}'" in message_with(table | {"no.such.weight": file})
    assert f"'{file}' holds '{SOME}'" in message_with({n: f for n, f in table.items() if n != SOME})
    assert "no file of its own folder" in message_with(table | {SOME: "../other.safetensors"})
    for broken in ([], {"weight_map": 3}):
        index.write_text(json.dumps(broken))
        assert "index.json" in refusal(folder)


@pytest.mark.parametrize("file", ["", ".", "..", "/etc/passwd", "a/b", "a\0b", "z" * 300, "\ud800", "config.json"])
def test_w2_index_that_names_what_is_no_shard(tmp_path, file) -> None:
    """Neither is anything outside the folder opened, nor does a strange name end in another error."""
    folder = write_checkpoint(tmp_path, WEIGHTS, files=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, file)}))
    message = refusal(folder)
    assert "missing" in message or "no file of its own folder" in message or "config.json' cannot be read" in message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_of_lists_within_lists(tmp_path, name) -> None:
    folder = write_checkpoint(tmp_path, WEIGHTS, files=2)
    (folder / name).write_text('{"a": ' + "[" * 100_000)
    assert f"{str(folder / name)!r} cannot be read" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated_file_is_named(tmp_path, keep) -> None:
    folder = write_checkpoint(tmp_path, WEIGHTS)
    file = folder / "model.safetensors"
    os.truncate(file, keep if isinstance(keep, int) else int(file.stat().st_size * keep))
    message = refusal(folder)
    assert message.startswith(f"{str(file)!r} cannot be read")  # config.json is not what is wrong
    assert "copy it again" in message


def test_corrupt_header_is_named(tmp_path) -> None:
    file = write_checkpoint(tmp_path, WEIGHTS) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[12:40] = b"\xff" * 28
    file.write_bytes(data)
    assert f"{str(file)!r} cannot be read" in refusal(tmp_path)


def test_folder_without_usable_weights(tmp_path) -> None:
    write_config(tmp_path)
    message = refusal(tmp_path)
    assert "holds no weights" in message
    assert message.endswith("Copy the whole checkpoint.")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "'pytorch_model.bin', a format that runs code" in refusal(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"x")
    assert "neither 'model.safetensors' nor 'model.safetensors.index.json'" in refusal(tmp_path)


def test_weights_without_their_config(tmp_path) -> None:
    (write_checkpoint(tmp_path, WEIGHTS) / "config.json").unlink()
    assert "has safetensors files but no config.json" in refusal(tmp_path)


def test_arguments_that_the_weights_decide(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, WEIGHTS)
    assert "'num_heads' is given by the stored weights" in refusal(folder, num_heads=2)
    assert "'torch_dtype' is no option of from_pretrained; dtype= converts" in refusal(folder, torch_dtype="float32")
    assert "local_blocks=0" in refusal(folder, local_blocks=0)
    model = NosaLM.from_pretrained(folder, attention="infllmv2", max_context=64, query_blocks=2)
    assert model.config == SMALL.replace(attention="infllmv2", max_context=64, query_blocks=2)


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float64"}, "dtype='float64' must be one of float32, bfloat16, float16."),
        ({"dtype": jnp.int8}, "dtype=<class 'jax.numpy.int8'> must be one of"),
        ({"query_blocks": -1}, "query_blocks=-1 must be an integer of at least 0"),
        ({"max_context": 0}, "max_context=0 must be an integer of at least 1"),
    ],
)
def test_argument_that_cannot_be_is_not_blamed_on_the_files(formats, kind, changes, words) -> None:
    with pytest.raises(InputError) as caught:
        find_model(formats / kind).load(**changes)
    assert words in str(caught.value)
    assert "config.json" not in str(caught.value)


def test_config_json_that_cannot_be_used_is_named_whatever_is_asked_for(tmp_path) -> None:
    write_checkpoint(tmp_path, WEIGHTS, rms_norm_eps=0)
    message = refusal(tmp_path, max_context=64)
    assert message.startswith(f"{str(tmp_path / 'config.json')!r}: rms_norm_eps is 0")


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_dtype_may_be_what_jax_calls_one(formats, kind, dtype) -> None:
    model = find_model(formats / kind).load(dtype=dtype)
    assert model.config == SMALL.replace(dtype="bfloat16", param_dtype="bfloat16")
    assert {str(a.dtype) for a in params_of(model).values()} == {"bfloat16"}


def test_folder_of_another_format_names_the_right_reader(formats, tmp_path) -> None:
    with pytest.raises(InputError, match=r"is a safetensors checkpoint; NosaLM\.from_pretrained reads it"):
        load_model(formats / "safetensors")
    assert refusal(tmp_path).endswith(
        "Give a run's folder, an exported checkpoint, or a folder with config.json and safetensors files."
    )
    with pytest.raises(InputError, match=r"Give a run's folder or an exported checkpoint\.$"):
        load_model(tmp_path)
    with pytest.raises(InputError, match="name is empty"):
        load_model("")


def test_what_load_model_returns_is_no_model_by_itself(formats) -> None:
    """As without the tests' type checker, which would refuse it first."""
    with pytest.raises(InputError, match=r"a tuple is no model; give NosaLM\.from_pretrained\(FOLDER\), or the first"):
        inspect.unwrap(freeze)(load_model(formats / "orbax"))
