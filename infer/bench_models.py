"""The model that `nosa-bench throughput` times: a preset, a config file alone, or a checkpoint."""

import dataclasses
from pathlib import Path

from nosa_jax.config import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.infer.frozen import FrozenModel, freeze
from nosa_jax.infer.random_contents import random_model
from nosa_jax.json_files import read_json
from nosa_jax.tokenizer import ByteTokenizer, Tokenizer
from nosa_jax.tokenizer_files import read_tokenizer
from nosa_jax.weights import find_model
from nosa_jax.weights.config_json import CONFIG_FILE, config_from_json

PRESETS = ("nosa_8b", "nosa_1b", "tiny")
RANDOM_WEIGHTS = "random weights"

# What a config of this package must have, without the one name that released ones use too.
_OWN_KEYS = {f.name for f in dataclasses.fields(NosaConfig) if f.default is dataclasses.MISSING} - {"vocab_size"}
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")


def config_file(model: str) -> Path | None:
    """The config file that stands for a shape alone: a .json file, or config.json of a folder that has no weights.

    None for whatever else the name means. Raises InputError where the name ends in .json and there is no such file.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        file = path / CONFIG_FILE
        # A checkpoint of this package keeps its parameters in a folder.
        weights = (p for p in path.iterdir() if p.name.endswith(_WEIGHTS) or p.name == "params")
        return file if file.is_file() and not any(weights) else None
    if path.suffix != ".json":
        return None
    if not path.is_file():
        raise InputError(f"--model {model!r}: there is no such config file; give the path of one, or a preset's name")
    return path


def read_config(file: Path) -> NosaConfig:
    """A config.json as released checkpoints have it (docs/08), or the fields of NosaConfig as `to_dict` gives them.

    Raises:
      InputError: it cannot be read, or not be used; names the file and what is wrong with it.
    """
    values = read_json(file)
    try:
        # A shape alone is a model of the attention that this package is about, unless it says otherwise itself.
        return NosaConfig.from_dict(values) if _OWN_KEYS & set(values) else config_from_json(values)
    except (ValueError, TypeError) as error:  # among them InputError
        raise InputError(f"{str(file)!r}: {error}") from error


def model_config(model: str, layers: int | None = None) -> NosaConfig:
    """The config of a model, without its weights.

    Args:
      model: a name of `PRESETS`, what `config_file` takes, or what `find_model` takes.
      layers: so many instead of the shape's own; None leaves them.

    Raises:
      InputError: there is no such model, it cannot be used, or `layers` is given for a checkpoint or below 1.
    """
    file = None if model in PRESETS else config_file(model)
    if model in PRESETS:
        config: NosaConfig = getattr(NosaConfig, model)()
    elif file is not None:
        config = read_config(file)
    elif layers is not None:
        raise InputError(
            f"--layers {layers} is for {', '.join(PRESETS)} and config files without weights; a checkpoint has its own"
        )
    else:
        return find_model(model).config
    if layers is None:
        return config
    if layers < 1:
        raise InputError(f"--layers {layers} must be at least 1")
    return config.replace(num_layers=layers)


def load(model: str, config: NosaConfig) -> tuple[FrozenModel, str]:
    """A model of `model_config`, and in words what its weights are."""
    if model in PRESETS or config_file(model) is not None:
        return random_model(config), RANDOM_WEIGHTS
    return freeze(find_model(model).load()), f"the weights of {model}"


def own_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer that belongs to a model: bytes for "tiny", else what lies beside its config; None without one."""
    if model in PRESETS:
        return ByteTokenizer() if model == "tiny" else None
    file = config_file(model)
    return find_model(model).tokenizer if file is None else read_tokenizer(file.parent)
