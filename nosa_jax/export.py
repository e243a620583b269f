"""`python -m nosa_jax.export`, installed as `nosa-export`: a model from one format into another."""

import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nosa_jax.checkpoint import export_model, find_checkpoint, is_checkpoint, require_readable_name
from nosa_jax.config import ComputeDtype
from nosa_jax.errors import InputError
from nosa_jax.folders import write_folder
from nosa_jax.weights.source import ModelSource, OrbaxModel, find_model

_INTERRUPTED = 130  # what shells report for SIGINT
_CHECKPOINTS = "checkpoints"  # of a training run's folder
Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class _Export:
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER|ID")]
    """A training run, one of its steps, an exported checkpoint, a folder with config.json and safetensors files, or a
    repository of the Hugging Face Hub (owner/name)."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NEW-FOLDER")]
    """The folder to make. It appears whole or not at all."""
    dtype: ComputeDtype | None = None
    """Convert the weights. Default: as stored."""
    step: int | None = None
    """Which checkpoint of a run. Default: the latest."""
    revision: str | None = None
    """Branch, tag or commit of a repository. Default: its main branch."""
    seed: int = 0
    """Of the eviction head's start where the source has none."""


@dataclass(frozen=True)
class Safetensors(_Export):
    """Write config.json, safetensors files and the tokenizer's files, for `from_pretrained` and other software."""

    max_shard_size: str = "5GB"
    """Most bytes of one file."""


@dataclass(frozen=True)
class Orbax(_Export):
    """Write an orbax checkpoint: what `nosa-train --init-from` and `nosa-generate` read, on any number of devices."""

    optimizer: Flag = False
    """Keep the optimizer's state and the position in the data, so that `nosa-train --resume` goes on from the copy.
    Only from a training run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Export from the command line. Returns 0; 1 where writing failed; 2 for bad input; 130 when interrupted."""
    for name in ("absl", "asyncio"):  # orbax and its tasks log tracebacks of failures that are reported below
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"nosa-export: {message}", file=sys.stderr)
            wanted = tyro.extras.subcommand_cli_from_dict(
                {"orbax": Orbax, "safetensors": Safetensors}, args=argv, prog="nosa-export"
            )
            path = _export(wanted)
    except SystemExit as request:  # tyro has printed its help or what is wrong with the arguments
        return request.code if isinstance(request.code, int) else 2
    except InputError as error:
        print(f"nosa-export: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"nosa-export: the export could not be written: {error}. Free space or give another folder.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\nnosa-export: interrupted; no unfinished folder was left behind", file=sys.stderr)
        return _INTERRUPTED
    print(path)
    return 0


def _export(wanted: Orbax | Safetensors) -> Path:
    out = Path(wanted.out)
    _require_writable(wanted.out)
    if isinstance(wanted, Orbax):
        require_readable_name(wanted.out)
    source = find_model(wanted.source, step=wanted.step, revision=wanted.revision)
    if isinstance(wanted, Orbax) and wanted.optimizer:
        return _copy_step(wanted, source)
    tokenizer = source.tokenizer
    model = source.load(dtype=wanted.dtype, seed=wanted.seed)
    if isinstance(wanted, Safetensors):
        return model.save_pretrained(out, tokenizer, max_shard_size=wanted.max_shard_size)
    return export_model(out, model, tokenizer, {"source": source.folder.name})


def _require_writable(out: str) -> None:
    """Raise InputError where the folder `out` cannot be made, before minutes are spent on reading weights."""
    if not out:
        raise InputError("the new folder's name is empty. Give a path.")
    path = Path(out).absolute()
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{out!r} already exists and is not an empty folder. Give another path.")
        # Made and removed: what permissions say is not all, and root has every one.
        Path(tempfile.mkdtemp(dir=next(p for p in path.parents if p.exists()))).rmdir()
    except OSError as error:
        raise InputError(
            f"{out!r} cannot be written: {error.strerror or error}. Give a folder on a disk that you may write to."
        ) from error


def _copy_step(wanted: Orbax, source: ModelSource) -> Path:
    """A training run's folder with one step, copied bit for bit."""
    if not isinstance(source, OrbaxModel) or not (source.folder / "training").is_dir():
        raise InputError(
            f"{wanted.source!r} holds no optimizer state. Give a training run's folder, or leave --optimizer out."
        )
    if wanted.dtype is not None:
        raise InputError(
            f"--dtype {wanted.dtype} cannot be combined with --optimizer, whose state has dtypes of its own."
        )
    step = source.folder
    return write_folder(wanted.out, lambda folder: _copy(step, folder / _CHECKPOINTS / step.name))


def _copy(step: Path, target: Path) -> None:
    shutil.copytree(step, target)
    if not is_checkpoint(find_checkpoint(target)):
        raise OSError(f"{str(step)!r} changed while it was copied")


if __name__ == "__main__":
    sys.exit(main())
