"""A model at rest, in whatever format: its config and tokenizer at once, its weights when they are asked for."""

import dataclasses
import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from jax.typing import DTypeLike

from nosa_jax.checkpoint import (
    Params,
    Placement,
    abstract_model,
    find_checkpoint,
    is_checkpoint,
    load_model,
    on_first_device,
    read_meta,
    saved_config,
    saved_tokenizer,
    split_model,
)
from nosa_jax.config import ComputeDtype, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.json_files import read_json
from nosa_jax.model import DELTA_INITIALIZER, NosaLM
from nosa_jax.tokenizer import Tokenizer
from nosa_jax.tokenizer_files import read_tokenizer
from nosa_jax.weights.config_json import CONFIG_FILE, config_from_json, stored_dtype
from nosa_jax.weights.files import StoredTensor, stored_tensors
from nosa_jax.weights.hub import checkpoint_folder
from nosa_jax.weights.names import Tensor, has_eviction_head, tied_head
from nosa_jax.weights.reader import common_dtype, read_parameters, require_same_tensor, require_tensors

_FORMS = "a run's folder, an exported checkpoint, or a folder with config.json and safetensors files"

# Fields of a config that decide which parameters there are.
_SHAPES = frozenset(
    {"vocab_size", "embed_dim", "ffn_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "tie_embeddings"}
)


@dataclass(frozen=True)
class OrbaxModel:
    """A checkpoint as `nosa_jax.checkpoint` writes it."""

    folder: Path

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """What the writer noted: config, tokenizer, position in training."""
        return read_meta(self.folder)

    @functools.cached_property
    def config(self) -> NosaConfig:
        """As saved."""
        return saved_config(self.meta, self.folder)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """As saved."""
        return saved_tokenizer(self.meta, self.folder)

    def load(
        self,
        *,
        dtype: DTypeLike | None = None,
        place: Placement | None = None,
        seed: int = 0,
        **changes: Any,
    ) -> NosaLM:
        """Read the weights; see `NosaLM.from_pretrained`. seed is not needed, since every parameter is there."""
        kind = None if dtype is None else _compute_dtype(dtype)
        if kind is not None:
            changes |= {"dtype": kind, "param_dtype": kind}
        _require_no_shapes(changes)
        config = _changed(self.config, changes)  # refused before anything is read
        model, _, _ = load_model(self.folder, dtype=kind, place=place)
        return _assembled(config, split_model(model)[1]) if changes else model


@dataclass(frozen=True)
class SafetensorsModel:
    """A checkpoint as the reference publishes it."""

    folder: Path

    @functools.cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """What the files' headers say."""
        return stored_tensors(self.folder)

    @functools.cached_property
    def config(self) -> NosaConfig:
        """Of config.json, with the dtype that most of the weights have."""
        return self.config_with()

    def config_with(self, **changes: Any) -> NosaConfig:
        """The config with some fields set by the caller. Raises InputError naming what cannot be used."""
        _require_no_shapes(changes)
        file = self.folder / CONFIG_FILE
        values, has_head = read_json(file), has_eviction_head(self.stored)
        try:
            config = config_from_json(values, has_eviction_head=has_head, **changes)
        except InputError as error:
            if changes and (own := _usable(values, has_head)):
                _changed(own, changes)  # the file alone can be used, so it is not what is wrong
            raise InputError(f"{str(file)!r}: {error}") from error
        dtype = common_dtype(self._tensors(config).values(), self.stored)
        own_dtype = {"dtype": dtype} if stored_dtype(values) is None else {}
        return dataclasses.replace(config, **({"param_dtype": dtype} | own_dtype | changes))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Of tokenizer.json and the files beside it."""
        return read_tokenizer(self.folder)

    def load(
        self,
        *,
        dtype: DTypeLike | None = None,
        place: Placement | None = None,
        seed: int = 0,
        **changes: Any,
    ) -> NosaLM:
        """Read the weights; see `NosaLM.from_pretrained`."""
        place = place or on_first_device
        if dtype is not None:
            changes |= dict.fromkeys(("dtype", "param_dtype"), _compute_dtype(dtype))
        config = self.config_with(**changes)
        tensors = self._tensors(config)
        spare = tied_head(config)
        if spare is not None and spare.name in self.stored:
            require_same_tensor(tensors["model.embed_tokens.weight"], spare, self.stored)
        kind = None if dtype is None else np.dtype(config.param_dtype)
        params = read_parameters(tensors.values(), self.stored, place=place, dtype=kind)
        if not has_eviction_head(self.stored):
            warnings.warn(
                f"{str(self.folder)!r} has no eviction head (self_attn.delta and self_attn.A). It starts as in "
                f"training from nothing: A = 0, delta drawn with seed {seed}. The model attends as "
                f"{config.attention!r}; train it further with attention 'nosa' before decoding with it.",
                stacklevel=3,
            )
            params |= _fresh_eviction_heads(config, place, seed)
        return _assembled(config, params)

    def _tensors(self, config: NosaConfig) -> dict[str, Tensor]:
        try:
            return require_tensors(config, self.stored)
        except InputError as error:
            raise InputError(f"{str(self.folder)!r}: {error}") from error


ModelSource = OrbaxModel | SafetensorsModel
"""A checkpoint that was found and described, and not read yet."""


def find_model(path_or_id: str | Path, *, step: int | None = None, revision: str | None = None) -> ModelSource:
    """Find a model: a folder with config.json and safetensors files, a checkpoint or run of this package, or a hub id.

    step: which checkpoint of a training run; None takes the latest.
    Raises InputError where there is none, or where its description cannot be used.
    """
    folder = checkpoint_folder(path_or_id, revision)
    if (folder / CONFIG_FILE).is_file() and not is_checkpoint(folder):
        if step is not None:
            raise InputError(f"{str(folder)!r} is a single checkpoint, so {step=} cannot be chosen; leave step out.")
        return SafetensorsModel(folder)
    if any(folder.glob("*.safetensors")):
        raise InputError(f"{str(folder)!r} has safetensors files but no {CONFIG_FILE}. Copy the whole checkpoint.")
    return OrbaxModel(find_checkpoint(folder, step, forms=_FORMS))


def _fresh_eviction_heads(config: NosaConfig, place: Placement, seed: int) -> Params:
    """`A` = 0, so that nothing changes at first, and `delta` drawn at random.

    A `delta` of zero would never learn: its scores would be equal for all tokens, which attention cannot tell from no
    scores, so that `A` would have no gradient, and without `A` neither has `delta`.
    """
    kv_heads = config.num_kv_heads
    params: Params = {}
    for layer, key in enumerate(jax.random.split(jax.random.key(seed), config.num_layers)):
        delta = DELTA_INITIALIZER(key, (kv_heads, kv_heads, config.head_dim), config.param_dtype)
        a = np.zeros(kv_heads, config.param_dtype)
        for name, value in (("delta_weight_kkh", delta), ("a_k", a)):
            name = f"layers.{layer}.attention.{name}"
            params[name] = jax.device_put(value, place(name, value.shape))
    return params


def _assembled(config: NosaConfig, params: Params) -> NosaLM:
    return abstract_model(config)[0].merge(params)


def _compute_dtype(dtype: DTypeLike) -> ComputeDtype:
    """The name of a dtype that a model can have, from whatever names one, like `jnp.bfloat16`. Raises InputError."""
    kinds: dict[str, ComputeDtype] = {kind: kind for kind in get_args(ComputeDtype)}
    try:
        return kinds[np.dtype(dtype).name]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"dtype={dtype!r} must be one of {', '.join(kinds)}.") from error


def _usable(values: dict[str, Any], has_eviction_head: bool) -> NosaConfig | None:
    """The config of a config.json by itself; None where it cannot be used."""
    try:
        return config_from_json(values, has_eviction_head=has_eviction_head)
    except InputError:
        return None


def _changed(config: NosaConfig, changes: dict[str, Any]) -> NosaConfig:
    try:
        return config.replace(**changes)
    except (ValueError, TypeError) as error:
        raise InputError(f"the config cannot be changed so: {error}") from error


def _require_no_shapes(changes: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(NosaConfig)}
    if unknown := sorted(set(changes) - known):
        raise InputError(
            f"{unknown[0]!r} is no option of from_pretrained; dtype= converts the weights, the fields of NosaConfig "
            "change the rest (attention, max_context, ...)."
        )
    if shapes := sorted(set(changes) & _SHAPES):
        raise InputError(f"{shapes[0]!r} is given by the stored weights and cannot be changed.")
    if "param_dtype" in changes and changes.get("dtype") != changes["param_dtype"]:
        raise InputError("param_dtype is given by the stored weights; convert with dtype, which sets both.")
