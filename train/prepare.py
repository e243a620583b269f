"""Everything that is checked and made ready before a run writes its first byte."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from nosa_jax.checkpoint import (
    Params,
    Skeleton,
    abstract_model,
    find_checkpoint,
    is_checkpoint,
    make_meta,
    read_meta,
    require_readable_name,
    require_same_config,
    saved_config,
    split_model,
)
from nosa_jax.config import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.tokenizer import Tokenizer, load_tokenizer
from nosa_jax.train.config import MAY_DIFFER, TrainConfig
from nosa_jax.train.corpus import Corpus, build_corpus
from nosa_jax.train.metrics import CURVE_FILE, METRICS_FILE, TENSORBOARD_DIR
from nosa_jax.train.optimizer import learning_rate, make_optimizer, trainable_names
from nosa_jax.train.sharding import tree_shardings
from nosa_jax.train.step import TrainState, init_state, state_from_params
from nosa_jax.weights import ModelSource, find_model
from nosa_jax.weights.config_json import CONFIG_FILE

CHECKPOINTS_DIR = "checkpoints"
# Fields of a config that trained weights have been made for.
_FIXED_BY_WEIGHTS = frozenset(
    {"vocab_size", "embed_dim", "ffn_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "tie_embeddings",
     "rms_norm_eps", "rope_theta", "rope_factors", "rope_attention_factor", "scale_emb", "scale_depth",
     "dim_model_base"}
)  # fmt: skip
_REMAT_FROM_TOKENS = 2048
_REMAT_FROM_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class Setup:
    """The checked parts of a run."""

    config: TrainConfig
    model_config: NosaConfig
    tokenizer: Tokenizer
    corpus: Corpus
    skeleton: Skeleton
    abstract_params: Params
    trainable: frozenset[str]
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    mesh: Mesh

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, trained or not."""
        return sum(int(np.prod(p.shape)) for p in self.abstract_params.values())

    def remat(self, seq_len: int) -> bool:
        """Whether a phase recomputes activations; see `TrainConfig.remat`."""
        if self.config.remat is not None:
            return self.config.remat
        return seq_len >= _REMAT_FROM_TOKENS or self.num_parameters >= _REMAT_FROM_PARAMETERS

    def meta(self, data: dict[str, Any]) -> dict[str, Any]:
        """The JSON item of a checkpoint; `data` is the position in the batches."""
        return make_meta(
            self.model_config,
            self.tokenizer,
            train=self.config.to_dict(),
            corpus=self.corpus.fingerprint,
            data=data,
            versions={"jax": jax.__version__},
        )

    def require_same_run(self, meta: dict[str, Any], where: str) -> None:
        """Raise InputError where going on from a checkpoint would not continue the run that wrote it."""
        require_same_config(self.model_config, saved_config(meta, Path(where)), where)
        if meta.get("tokenizer") != self.tokenizer.to_dict():
            raise InputError(f"{where!r} was trained with another tokenizer. Give the same one, or another out folder.")
        now, then = self.config.to_dict(), meta.get("train") or {}
        names = sorted((set(now) | set(then)) - MAY_DIFFER)
        if differing := [f"{n} was {then.get(n)!r}, is {now.get(n)!r}" for n in names if now.get(n) != then.get(n)]:
            raise InputError(
                f"{where!r} was trained with other settings: {'; '.join(differing)}. Resume with the same ones, or "
                "start another run from its weights with --init-from."
            )
        if meta.get("corpus") != self.corpus.fingerprint:
            raise InputError(
                f"{where!r} was trained on other text: the corpus has changed since (files, their contents, max_bytes, "
                "or the Python whose standard library is read). Restore it, or start another run with --init-from."
            )

    def initial_state(self) -> TrainState:
        """Step 0: random weights, or those of `init_from`."""
        config, layout = self.config, self.config.parameters
        if config.init_from is None:
            return init_state(self.model_config, self.optimizer, self.trainable, config.seed, self.mesh, layout)
        source = _require_same_arrays(config, self.model_config)
        _, params = split_model(source.load(seed=config.seed))
        wanted = self.model_config.param_dtype
        if config.preset == "checkpoint":
            params = {name: value.astype(wanted) for name, value in params.items()}
        elif other := [n for n, p in params.items() if str(p.dtype) != wanted]:
            raise InputError(
                f"init_from={config.init_from!r} holds several dtypes: {other[0]!r} is {params[other[0]].dtype}, not "
                f"{wanted}. Convert it with nosa-export --dtype {wanted}, or give --preset checkpoint."
            )
        key_data = jax.random.key_data(jax.random.key(config.seed))
        state = state_from_params(params, self.optimizer, self.trainable, key_data)
        return jax.device_put(state, tree_shardings(state, self.mesh, layout))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore into."""
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        state = jax.eval_shape(
            lambda params, key: state_from_params(params, self.optimizer, self.trainable, key),
            self.abstract_params,
            key,
        )
        shardings = tree_shardings(state, self.mesh, self.config.parameters)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def prepare(config: TrainConfig, model_config: NosaConfig | None, mesh: Mesh) -> Setup:
    """Check a run's settings against each other and read its text; nothing is written.

    Raises InputError naming the value, its limit and the way out.
    """
    require_readable_name(config.out)
    _require_no_checkpoint(config.out)
    model_config = config.model_config(_model_of_checkpoint(config)) if model_config is None else model_config
    for phase in config.phases:
        if phase.seq_len > model_config.max_context:
            raise InputError(
                f"seq_len={phase.seq_len} of the {phase.attention} phase is longer than the model's "
                f"max_context={model_config.max_context} tokens. Shorten it or raise max_context."
            )
        if phase.batch % (mesh.size * config.optimizer.accumulate):
            raise InputError(
                f"batch={phase.batch} of the {phase.attention} phase must be a multiple of {mesh.size} devices x "
                f"accumulate={config.optimizer.accumulate}."
            )
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise InputError(
            f"the tokenizer {config.tokenizer!r} has {tokenizer.vocab_size} tokens, but the model has "
            f"vocab_size={model_config.vocab_size}. Give --override "
            f"vocab_size={tokenizer.vocab_size} or another tokenizer."
        )
    if config.init_from is not None and not config.resume:
        _require_same_arrays(config, model_config)
    if config.export is not None:
        require_readable_name(config.export)
        _require_export(config.export, config.out)
    skeleton, abstract = abstract_model(model_config)
    trainable = trainable_names(skeleton.names, config.train_only, config.freeze)
    corpus = build_corpus(
        config.data,
        tokenizer,
        validation=config.validation,
        text_field=config.text_field,
        max_bytes=config.max_bytes,
    )
    return Setup(
        config, model_config, tokenizer, corpus, skeleton, abstract, trainable,
        make_optimizer(config.optimizer, config.total_steps), learning_rate(config.optimizer, config.total_steps), mesh,
    )  # fmt: skip


def has_steps(config: TrainConfig) -> bool:
    """Whether the run's folder holds checkpoints already."""
    steps = Path(config.out) / CHECKPOINTS_DIR
    try:
        return any(p.name.isdecimal() for p in steps.iterdir())
    except OSError:  # not there yet; what cannot be read or written is `open_folder`'s to report
        return False


def open_folder(config: TrainConfig) -> Path:
    """Make the run's folder. Raises InputError where it cannot be written or holds a run that is not to be resumed."""
    out = Path(config.out).absolute()
    steps = out / CHECKPOINTS_DIR
    if not config.resume and has_steps(config):
        raise InputError(
            f"out={config.out!r} already holds the checkpoints of a run. Add --resume to go on with it, or give "
            "another folder."
        )
    try:
        steps.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(_unwritable(config.out, error.strerror or str(error))) from error
    if not os.access(steps, os.W_OK | os.X_OK) or not os.access(out, os.W_OK | os.X_OK):
        raise InputError(_unwritable(config.out, "permission denied"))
    return out


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Hold the run's folder for this process. Raises InputError where another one is training there."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is training in {str(out)!r}. Wait for it or give another folder."
            ) from error
        yield


def _unwritable(out: str, reason: str) -> str:
    return f"out={out!r} cannot be written: {reason}. Give a folder on a disk that you may write to."


def _require_no_checkpoint(out: str) -> None:
    """Raise InputError where `find_model` would read a checkpoint in the run's folder instead of the run's steps."""
    run = Path(out).absolute()
    try:
        found = [CONFIG_FILE] if (run / CONFIG_FILE).is_file() else []
        found += sorted(p.name for p in run.glob("*.safetensors"))
        found += ["params", "meta"] if is_checkpoint(run) else []
    except OSError:  # what cannot be read or written is `open_folder`'s to report
        return
    if found:
        raise InputError(
            f"out={out!r} holds a checkpoint ({', '.join(found[:3])}), which would be read instead of the run. Give "
            "another folder, or move the checkpoint elsewhere."
        )


def _require_export(export: str, out: str) -> None:
    """Raise InputError where writing the weights to `export` would fail, or spoil the run's own folder."""
    path, run = Path(os.path.realpath(export)), Path(os.path.realpath(out))
    own = [run / name for name in (CHECKPOINTS_DIR, TENSORBOARD_DIR, METRICS_FILE, CURVE_FILE)]
    if path == run or path in run.parents or any(path == p or p in path.parents for p in own):
        raise InputError(
            f"export={export!r} is the folder of the run out={out!r}, one above it, or among the run's own files. "
            f"Give a folder of its own, like {str(Path(out) / 'export')!r}."
        )
    parent = next(p for p in path.parents if os.path.exists(p))
    if not parent.is_dir() or not os.access(parent, os.R_OK | os.W_OK | os.X_OK):
        raise InputError(
            f"export={export!r} cannot be written: {str(parent)!r} is no folder that you may write to. Give another "
            "path."
        )
    try:
        taken = os.path.lexists(path) and any(path.iterdir())
    except OSError:  # a file, or a folder that may not be read
        taken = True
    if taken:
        raise InputError(f"export={export!r} already exists and is not an empty folder. Give another path.")


def _model_of_checkpoint(config: TrainConfig) -> NosaConfig | None:
    """The config that the preset "checkpoint" means; None for other presets. Raises InputError where there is none."""
    if config.preset != "checkpoint":
        return None
    if config.resume and has_steps(config):  # the weights that the run began with may be gone
        folder = find_checkpoint(config.out)
        return saved_config(read_meta(folder), folder)
    if config.init_from is None:
        raise InputError(
            "preset='checkpoint' takes the model of --init-from, which is not given. Give it a checkpoint, or another "
            "preset."
        )
    return find_model(config.init_from).config.replace(param_dtype="float32", attention="nosa")


def _require_same_arrays(config: TrainConfig, model_config: NosaConfig) -> ModelSource:
    """The weights of `init_from`: how attention selects may differ there; their shapes and their meaning may not.

    Their dtype may with the preset "checkpoint", which converts.
    """
    assert config.init_from is not None
    source = find_model(config.init_from)
    fields = _FIXED_BY_WEIGHTS if config.preset == "checkpoint" else {*_FIXED_BY_WEIGHTS, "param_dtype"}
    require_same_config(model_config, source.config, str(source.folder), fields)
    return source
