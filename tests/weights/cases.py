"""Checkpoints in the published layout, written without the package's own writer."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from nosa_jax.checkpoint import split_model
from nosa_jax.config import NosaConfig
from nosa_jax.model import NosaLM

SMALL = NosaConfig(
    vocab_size=61, embed_dim=24, ffn_dim=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, block_size=8,
    pool_window=8, pool_stride=4, sink_blocks=1, local_blocks=2, query_blocks=1, evict_blocks=2, dtype="float32",
    max_context=512,
)  # fmt: skip
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}

# What the config.json of a released checkpoint says, at the size of SMALL; `sparse_config` makes up for SMALL's blocks.
CONFIG_JSON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": [2, 5], "head_dim": 8, "hidden_act": "silu", "hidden_size": 24, "initializer_range": 0.02,
    "intermediate_size": 40, "max_position_embeddings": 512, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "torch_dtype": "float32", "transformers_version": "4.46.0", "use_cache": True, "vocab_size": 61,
    "sparse_config": {
        "kernel_size": 8, "kernel_stride": 4, "block_size": 8, "init_blocks": 1, "window_size": 8, "select_blocks": 2,
        "topk": 6,
    },
}  # fmt: skip


def write_config(folder: Path, **changes: Any) -> None:
    """CONFIG_JSON with changes; a value of ... takes the key out."""
    values = {k: v for k, v in (CONFIG_JSON | changes).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(values))


def write_checkpoint(
    folder: Path, weights: dict[str, np.ndarray], *, files: int = 1, dtype: str = "float32", **changes: Any
) -> Path:
    """A folder with config.json and the weights in one file, or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, **changes)
    arrays = {name: np.ascontiguousarray(a, DTYPES[dtype]) for name, a in weights.items()}
    if files == 1:
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = dict(list(arrays.items())[i::files])
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def params_of(model: NosaLM) -> dict[str, np.ndarray]:
    """Parameters by name, on the host."""
    return {name: np.asarray(value) for name, value in split_model(model)[1].items()}


def assert_same_bits(ours: NosaLM, theirs: NosaLM) -> None:
    """Equal names, dtypes and bits."""
    x, y = params_of(ours), params_of(theirs)
    assert x.keys() == y.keys()
    for name in x:
        assert x[name].dtype == y[name].dtype, name
        assert x[name].tobytes() == y[name].tobytes(), name
