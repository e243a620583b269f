"""A model as config.json and safetensors files under the reference's names."""

import json
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from nosa_jax.checkpoint import split_model
from nosa_jax.errors import InputError
from nosa_jax.folders import write_folder
from nosa_jax.model import NosaLM
from nosa_jax.tokenizer import Tokenizer
from nosa_jax.tokenizer_files import write_tokenizer
from nosa_jax.weights.config_json import CONFIG_FILE, config_to_json
from nosa_jax.weights.files import INDEX_FILE
from nosa_jax.weights.names import Tensor, checkpoint_tensors


def save_pretrained(
    model: NosaLM, folder: str | Path, tokenizer: Tokenizer | None = None, *, max_shard_size: int | str = "5GB"
) -> Path:
    """Write a model for `from_pretrained` and for other software; see `NosaLM.save_pretrained`.

    Arrays are gathered from their devices one file at a time, so host memory holds one file's worth.
    """
    _, params = split_model(model)
    tensors = checkpoint_tensors(model.config)

    def write(target: Path) -> None:
        abstract = {t.name: jax.ShapeDtypeStruct(t.shape, params[t.parameter].dtype) for t in tensors.values()}
        split = _split(abstract, max_shard_size)
        for file, names in split.filename_to_tensors.items():
            arrays = {name: _as_stored(tensors[name], params[tensors[name].parameter]) for name in names}
            try:
                save_file(arrays, target / file, metadata={"format": "np"})
            except SafetensorError as error:  # the library's own name for a write that failed
                raise OSError(f"{file!r} cannot be written: {error}") from error
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        values = config_to_json(model.config)
        if tokenizer is not None:
            write_tokenizer(target, tokenizer)
            values |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.stop_ids) or None}
        (target / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    return write_folder(folder, write)


def _split(abstract: dict[str, jax.ShapeDtypeStruct], max_shard_size: int | str) -> huggingface_hub.StateDictSplit:
    try:
        return huggingface_hub.split_state_dict_into_shards_factory(
            abstract,
            get_storage_size=lambda t: int(np.prod(t.shape, dtype=np.int64)) * t.dtype.itemsize,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except (ValueError, TypeError) as error:
        raise InputError(f'max_shard_size={max_shard_size!r} is no size; give bytes or a text like "5GB".') from error


def _as_stored(tensor: Tensor, param: jax.Array) -> np.ndarray:
    """The parameter in the file's layout, contiguous."""
    array = np.asarray(param)
    flat = array.reshape(tensor.shape[::-1]).T if tensor.transposed else array.reshape(tensor.shape)
    return np.ascontiguousarray(flat)
