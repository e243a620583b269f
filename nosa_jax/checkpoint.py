"""Model checkpoints in orbax format: parameters by name, with the config and the tokenizer beside them.

A checkpoint is a folder with the items `params` (one array per parameter, named like `layers.0.attention.a_k`)
and `meta` (JSON: config, tokenizer, what the writer adds). A training run writes the same two items at every saved
step, beside its optimizer state, so every reader here takes an exported checkpoint, a step or a whole run.
Storage: https://orbax.readthedocs.io (v1 API).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from flax import nnx
from orbax.checkpoint import v1 as ocp

from nosa_jax.abandoned_reads import ignore_abandoned_reads
from nosa_jax.config import ComputeDtype, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.folders import write_folder
from nosa_jax.model import NosaLM
from nosa_jax.tokenizer import Tokenizer, tokenizer_from_dict

FORMAT = 1
"""Version of the layout of `meta`."""

Placement = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
"""From a parameter's name and shape to where it shall lie."""

Params = dict[str, Any]
"""Parameters by dotted name; leaves are arrays or `jax.ShapeDtypeStruct`."""


@dataclass(frozen=True)
class Skeleton:
    """A model without its parameters: merge it with parameters by name to get the module back.

    Pure functions carry parameters as a flat dictionary, so that freezing, masks, checkpoints and error messages
    all speak of the same names.
    """

    graphdef: Any
    rest: Any  # variables that are not parameters
    treedef: Any
    names: tuple[str, ...]

    def merge(self, params: Mapping[str, Any]) -> NosaLM:
        """The module with these parameters. Raises KeyError for a name that is missing."""
        state = jax.tree.unflatten(self.treedef, [params[name] for name in self.names])
        return nnx.merge(self.graphdef, state, self.rest)


def split_model(model: NosaLM) -> tuple[Skeleton, Params]:
    """Take a module apart; `Skeleton.merge` undoes it."""
    graphdef, state, rest = nnx.split(model, nnx.Param, ...)
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = tuple(
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path, _ in paths_and_leaves
    )
    leaves = [leaf for _, leaf in paths_and_leaves]
    return Skeleton(graphdef, rest, treedef, names), dict(zip(names, leaves, strict=True))


def abstract_model(config: NosaConfig) -> tuple[Skeleton, Params]:
    """Names, shapes and dtypes of a config's parameters without allocating one."""
    return split_model(nnx.eval_shape(lambda: NosaLM(config, rngs=nnx.Rngs(0))))


def checkpoint_context() -> ocp.Context:
    """The orbax context of every checkpoint of this package: `meta` is kept as JSON."""
    context = ocp.Context()
    registry = ocp.handlers.local_registry(include_global_registry=True)
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="meta")
    context.checkpointables.registry = registry
    return context


def make_meta(config: NosaConfig, tokenizer: Tokenizer | None, **more: Any) -> dict[str, Any]:
    """The `meta` item: format, config, tokenizer and what the caller adds (plain JSON values)."""
    return {
        "format": FORMAT,
        "config": config.to_dict(),
        "tokenizer": None if tokenizer is None else tokenizer.to_dict(),
        **more,
    }


def require_readable_name(path: str | Path) -> None:
    """Raise InputError where what orbax writes could not be read back: in a path it takes [...] for a pattern."""
    name = str(Path(path).absolute())
    if "[" in name:
        raise InputError(
            f"{name!r} has a bracket in its name: orbax could not read a checkpoint back. Use another folder."
        )


def export_model(
    path: str | Path, model: NosaLM, tokenizer: Tokenizer | None = None, metadata: dict[str, Any] | None = None
) -> Path:
    """Write parameters, config and tokenizer, without optimizer state, for `load_model` and inference.

    The folder appears whole or not at all. Raises InputError where `path` already holds something or has a bracket in
    its name, and OSError where it cannot be written.
    """
    require_readable_name(path)
    _, params = split_model(model)
    # A model read from files of several dtypes keeps them; the config knows only one.
    own = {name: str(p.dtype) for name, p in params.items() if str(p.dtype) != model.config.param_dtype}
    meta = make_meta(model.config, tokenizer, metadata=metadata or {}, **({"dtypes": own} if own else {}))

    def write(folder: Path) -> None:
        made = folder / "made"  # by orbax, which leaves unfinished folders beside it
        try:
            with checkpoint_context():
                saving = ocp.save_checkpointables_async(made, {"params": params, "meta": meta})
                try:
                    saving.result()
                except KeyboardInterrupt:  # threads go on writing: let them end, or removing the folder would fail
                    with suppress(Exception):
                        saving.result()
                    raise
        except (ValueError, RuntimeError) as error:  # the storage layer's names for a write that failed
            raise OSError(f"{str(path)!r} cannot be written: {error}") from error
        for item in made.iterdir():
            item.rename(folder / item.name)
        made.rmdir()

    return write_folder(path, write)


def load_model(
    path: str | Path,
    step: int | None = None,
    dtype: ComputeDtype | None = None,
    config: NosaConfig | None = None,
    place: Placement | None = None,
) -> tuple[NosaLM, Tokenizer | None, dict[str, Any]]:
    """Read a model: `path` is an exported checkpoint, a step's folder, or a training run (`step`: None = latest).

    dtype: convert parameters and activations to it; None keeps what was saved.
    config: what the caller expects. place: each parameter's sharding, on any number of devices; None puts all on the
    first device. Returns (model, tokenizer, meta).
    Raises InputError where nothing can be read, where a field of `config` differs (naming the fields), or where an
    array's name, shape or dtype is not the config's.
    """
    folder = find_checkpoint(path, step)
    meta = read_meta(folder)
    saved = saved_config(meta, folder)
    tokenizer = saved_tokenizer(meta, folder)
    if config is not None:
        require_same_config(config, saved, str(folder))
        if own := meta.get("dtypes"):
            name, kind = next(iter(own.items()))
            raise InputError(
                f"the checkpoint {str(folder)!r} holds several dtypes: {name!r} is {kind}, param_dtype is "
                f"{saved.param_dtype}. Convert it with nosa-export --dtype."
            )
    what = f"the parameters of {str(folder)!r}"
    with reading(what), checkpoint_context():
        read_descriptions(folder / "params")
        stored = ocp.checkpointables_metadata(folder).metadata
    skeleton, abstract = abstract_model(saved)
    with reading(what):
        for name, own_dtype in (meta.get("dtypes") or {}).items():
            abstract[name] = jax.ShapeDtypeStruct(abstract[name].shape, own_dtype)
    require_same_arrays(abstract, stored.get("params"), what)
    place = place or on_first_device
    wanted = {
        name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place(name, v.shape)) for name, v in abstract.items()
    }
    with reading(what), checkpoint_context():
        params = ocp.load_checkpointables(folder, {"params": wanted})["params"]
    if dtype is not None:
        saved = saved.replace(dtype=dtype, param_dtype=dtype)
        skeleton, abstract = abstract_model(saved)
        params = {name: array.astype(abstract[name].dtype) for name, array in params.items()}
    if jax.tree.leaves(skeleton.rest):  # variables that are computed, not learnt: let the module make them
        skeleton, _ = split_model(NosaLM(saved, rngs=nnx.Rngs(0)))
    return skeleton.merge(params), tokenizer, meta


def on_first_device(name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """The placement that puts everything on the first device."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def find_checkpoint(
    path: str | Path, step: int | None = None, forms: str = "a run's folder or an exported checkpoint"
) -> Path:
    """The folder of the checkpoint that `path` and `step` mean; see `load_model`.

    forms: what the caller can read, for its errors. Raises InputError where no checkpoint is there.
    """
    if not str(path):  # it would be the current folder
        raise InputError(f"the checkpoint's name is empty. Give {forms}.")
    root = Path(path).absolute()
    if not root.is_dir():
        raise InputError(f"there is no checkpoint folder {str(root)!r}. Give {forms}.")
    if is_checkpoint(root):
        if step is not None and root.name != str(step):
            raise InputError(f"{str(root)!r} is a single checkpoint, so {step=} cannot be chosen; leave step out.")
        return root
    steps_root = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    steps = {int(p.name): p for p in steps_root.iterdir() if p.name.isdecimal() and is_checkpoint(p)}
    if not steps and any(root.glob("*.safetensors")):
        raise InputError(f"{str(root)!r} is a safetensors checkpoint; NosaLM.from_pretrained reads it.")
    if not steps:
        raise InputError(f"{str(root)!r} holds no complete checkpoint. Give {forms}.")
    if step is not None and step not in steps:
        raise InputError(f"{str(root)!r} has no checkpoint of {step=}; it has {', '.join(map(str, sorted(steps)))}.")
    return steps[max(steps) if step is None else step]


def is_checkpoint(folder: Path) -> bool:
    """Whether both items are there. Unfinished ones have another name: orbax renames a folder when it is complete."""
    return (folder / "params").is_dir() and (folder / "meta").is_dir()


def read_meta(folder: Path) -> dict[str, Any]:
    """The `meta` item of one checkpoint. Raises InputError where it is missing, damaged or of another format."""
    with reading(f"the item 'meta' of {str(folder)!r}"), checkpoint_context():
        meta = ocp.load_checkpointables(folder, {"meta": None})["meta"]
    found = meta.get("format") if isinstance(meta, dict) else None
    if found != FORMAT:
        raise InputError(
            f"{str(folder)!r} has format {found!r}, this version reads {FORMAT}. "
            "Read it with the version of nosa-jax that wrote it."
        )
    return meta


def saved_config(meta: Mapping[str, Any], folder: Path) -> NosaConfig:
    """The model config in a checkpoint's `meta`. Raises InputError where this version cannot use it."""
    values = meta.get("config")
    try:
        if not isinstance(values, dict):
            raise TypeError(f"it is {values!r} instead of a table of fields")
        return NosaConfig.from_dict(values)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"the config in {str(folder)!r} cannot be used: {error}. Give a checkpoint that this version has written."
        ) from error


def saved_tokenizer(meta: Mapping[str, Any], folder: Path) -> Tokenizer | None:
    """The tokenizer in a checkpoint's `meta`, None where it has none. Raises InputError where it cannot be used."""
    values = meta.get("tokenizer")
    if not values:
        return None
    with reading(f"the tokenizer in {str(folder)!r}"):
        return tokenizer_from_dict(values)


def read_descriptions(item: Path) -> None:
    """Read the description of every array of an item, one by one. Raises ValueError where one is damaged.

    Orbax asks for all at once and, at the first failure, closes the event loop that the others still report to; their
    tracebacks would reach stderr from tensorstore's threads.
    """
    if (item / "manifest.ocdbt").exists():
        base = {"driver": "file", "path": f"{item}/"}  # not a URL, in which "#" and "?" would have a meaning
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        for key in store.list().result():
            if key.endswith(b"zarr.json"):
                store.read(key).result()


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever is raised while `what` is read into an InputError that names it."""
    try:
        with ignore_abandoned_reads():
            yield
    except InputError:
        raise
    except Exception as error:  # storage layers and tokenizers raise many kinds
        cause: BaseException = error
        while cause.__cause__ is not None:  # orbax wraps the reason in a list of its handlers
            cause = cause.__cause__
        reason = " ".join(str(cause).partition(" [tensorstore_spec=")[0].split())[:400]
        raise _unreadable(what, reason or type(cause).__name__) from error


def _unreadable(what: str, reason: str) -> InputError:
    return InputError(
        f"{what} cannot be read: {reason}. Its files are missing, damaged or not from nosa-jax: copy the checkpoint "
        "again or give another one."
    )


def require_same_config(
    wanted: NosaConfig, saved: NosaConfig, where: str, fields: Collection[str] | None = None
) -> None:
    """Raise InputError naming every field, or every one of `fields`, in which the two configs differ."""
    ours, theirs = wanted.to_dict(), saved.to_dict()
    names = [name for name in ours if fields is None or name in fields]
    if differing := [f"{k} is {theirs[k]!r}, wanted {ours[k]!r}" for k in names if ours[k] != theirs[k]]:
        raise InputError(
            f"the checkpoint {where!r} has another config: {'; '.join(differing)}. "
            "Use its own config or another checkpoint."
        )


def require_same_arrays(wanted: Mapping[str, Any], stored: Mapping[str, Any] | None, where: str) -> None:
    """Raise InputError where names, shapes or dtypes differ. Orbax itself would cast a dtype without a word.

    stored: the arrays' metadata as orbax gives it: None where it could not read them.
    """
    if stored is None:
        raise _unreadable(where, "the arrays' description is incomplete")
    missing, extra = sorted(set(wanted) - set(stored)), sorted(set(stored) - set(wanted))
    if missing or extra:
        raise InputError(
            f"{where} do not fit: missing {', '.join(missing) or 'nothing'}; "
            f"unexpected {', '.join(extra) or 'nothing'}. Use a checkpoint of this model."
        )
    for name, want in wanted.items():
        have = stored[name]
        if tuple(have.shape) != tuple(want.shape) or np.dtype(have.dtype) != np.dtype(want.dtype):
            raise InputError(
                f"{where} do not fit: {name!r} is stored as {np.dtype(have.dtype)}{list(have.shape)}, wanted "
                f"{np.dtype(want.dtype)}{list(want.shape)}. Convert a model explicitly with load_model(dtype=...)."
            )
