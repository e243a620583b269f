"""Loading takes little memory beyond the weights, and the full-size models have the published tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from nosa_jax import NosaConfig
from nosa_jax.checkpoint import abstract_model, on_first_device
from nosa_jax.weights.files import stored_tensors
from nosa_jax.weights.names import by_parameter, checkpoint_tensors
from nosa_jax.weights.reader import read_parameters
from tests.oracle.weights import checkpoint_shapes, names_of
from tests.weights.cases import write_checkpoint

MIB = 2**20


def test_peak_memory_is_within_the_bound_of_the_largest_shard(tmp_path) -> None:
    """Above the parameters: at most 1.3 times the largest file, here with a single matrix in a file, the worst case."""
    width, hidden, vocab = 1024, 8192, 16_384
    config = dict(
        hidden_size=width, intermediate_size=hidden, vocab_size=vocab, num_hidden_layers=2, torch_dtype="bfloat16"
    )
    shapes = checkpoint_shapes(
        NosaConfig.tiny(
            embed_dim=width, ffn_dim=hidden, vocab_size=vocab, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
        )
    )
    rng = np.random.default_rng(0)
    weights = {n: rng.integers(0, 2**14, shape, np.uint16).view(ml_dtypes.bfloat16) for n, shape in shapes.items()}
    folder = write_checkpoint(tmp_path / "big", weights, files=len(weights), dtype="bfloat16", **config)
    largest = max(p.stat().st_size for p in folder.glob("*.safetensors"))
    script = Path(__file__).with_name("measure_peak.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for measured in json.loads(done.stdout):
        above = measured["peak"] - measured["before"] - measured["parameters"]
        assert measured["parameters"] > 100 * MIB
        assert above < 1.3 * largest, (
            f"{above / MIB:.1f} MiB above the parameters, largest file {largest / MIB:.1f} MiB"
        )


@pytest.mark.parametrize("config", [NosaConfig.nosa_1b(), NosaConfig.nosa_8b()], ids=["1b", "8b"])
def test_full_size_tensors_are_the_parameters(config) -> None:
    """Names, shapes and layouts of every tensor against an independent list and the model itself; nothing allocated."""
    tensors = checkpoint_tensors(config)
    assert {n: t.shape for n, t in tensors.items()} == checkpoint_shapes(config)
    _, params = abstract_model(config)
    assert {t.parameter: t.parameter_shape for t in tensors.values()} == {n: p.shape for n, p in params.items()}
    assert {n: (t.parameter, t.transposed) for n, t in tensors.items()} == {
        n: (parameter, transposed and len(tensors[n].shape) == 2)
        for n, (parameter, transposed) in names_of(config).items()
    }
    assert sum(int(np.prod(t.shape)) for t in tensors.values()) == sum(p.size for p in params.values())


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(NosaConfig.nosa_1b(param_dtype="bfloat16"), id="1b"),
        pytest.param(NosaConfig.nosa_8b(param_dtype="bfloat16"), id="8b", marks=pytest.mark.slow),
    ],
)
def test_full_size_layer_loads_from_shards(tmp_path, config) -> None:
    """Every tensor of one layer of the true size, over two files."""
    tensors = {n: t for n, t in checkpoint_tensors(config).items() if n.startswith("model.layers.5.")}
    base = np.random.default_rng(0).integers(0, 2**15, 2**20, np.uint16)

    def made(index: int, shape: tuple[int, ...]) -> np.ndarray:
        """Cheap to make, and no two rows or columns alike."""
        flat = np.resize(base, int(np.prod(shape))) ^ np.uint16(index)
        return flat.reshape(shape).view(ml_dtypes.bfloat16)

    arrays = {n: made(i, t.shape) for i, (n, t) in enumerate(tensors.items())}
    names = sorted(arrays)
    where = {}
    for i in range(2):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({n: arrays[n] for n in names[i::2]}, tmp_path / file)
        where |= dict.fromkeys(names[i::2], file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    params = read_parameters(tensors.values(), stored_tensors(tmp_path), place=on_first_device)
    _, abstract = abstract_model(config)
    assert len(params) == 11
    for name, tensor in by_parameter(tensors).items():
        assert params[name].shape == abstract[name].shape
        assert params[name].dtype == abstract[name].dtype == jax.numpy.bfloat16
        stored = arrays[tensor.name].view(np.uint16)
        expected = stored.T if tensor.transposed else stored
        np.testing.assert_array_equal(np.asarray(params[name]).view(np.uint16).reshape(expected.shape), expected)
