"""Folders that appear whole or not at all."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from nosa_jax.errors import InputError


def write_folder(folder: str | Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a folder that then appears whole under its name, or not at all.

    Raises:
      InputError: the folder exists and is not empty.
      OSError: it cannot be written; what had been written is removed.
    """
    path = Path(folder).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{str(path)!r} already exists and is not an empty folder. Give another path.")
    unfinished = path.parent / f".{path.name}.unfinished-{os.getpid()}"
    try:
        unfinished.mkdir(parents=True)
        write(unfinished)
        unfinished.rename(path)
    finally:
        _remove(unfinished)
    return path


def _remove(folder: Path, patience: float = 5.0) -> None:
    """Remove a folder that threads of a write that failed may go on filling for a moment."""
    until = time.monotonic() + patience
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists() or time.monotonic() > until:
            return
        time.sleep(0.05)
