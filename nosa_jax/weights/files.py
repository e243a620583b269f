"""The safetensors files of a folder: which tensor lies where, in which dtype and shape, read in pieces.

Only headers are read here until a tensor is asked for. What is read of an open file counts towards the process's memory
until it is closed, so a large tensor is read through several openings. Format: https://huggingface.co/docs/safetensors.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from nosa_jax.errors import InputError
from nosa_jax.json_files import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""What a tensor's dtype may be, by its name in the files."""

_COPY = "Copy the checkpoint again: its files do not belong together."
_OPENING_BYTES = 2**25
_PIECE_BYTES = 2**18  # read at a time: it fits into a core's cache, where transposing is fast


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its file's header says of it."""

    file: Path
    dtype: str  # as the format names it
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file. Raises KeyError for a dtype that is not supported."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors files by name.

    Raises:
      InputError: there are no such files, one is missing or damaged, or the index and a file disagree; names file and
        tensor.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed(folder, index)
    if (folder / SINGLE_FILE).is_file():
        return _header(folder / SINGLE_FILE)
    names = sorted(p.name for p in folder.iterdir())
    if shards := [n for n in names if n.endswith(".safetensors")]:
        raise InputError(
            f"{str(folder)!r} has {shards[0]!r} but neither {SINGLE_FILE!r} nor {INDEX_FILE!r}, which says which files "
            "belong together. Copy the whole checkpoint."
        )
    if pickled := [n for n in names if n.endswith((".bin", ".pt", ".pth"))]:
        raise InputError(
            f"{str(folder)!r} holds its weights in {pickled[0]!r}, a format that runs code when it is read. Convert it "
            "to safetensors."
        )
    raise InputError(
        f"{str(folder)!r} holds no weights: {SINGLE_FILE!r} and {INDEX_FILE!r} are missing. Copy the whole checkpoint."
    )


def _indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise InputError(f"{str(index)!r} has no table 'weight_map' from tensors to files. Copy the checkpoint again.")
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(table.values())):
        wanted = [name for name, where in table.items() if where == file]
        if Path(file).name != file:
            raise InputError(f"{str(index)!r} names {file!r} for {wanted[0]!r}, which is no file of its own folder.")
        if not os.path.isfile(folder / file):  # unlike Path, it takes any text for a name
            raise InputError(
                f"the file {file!r} of {str(folder)!r} is missing; the index has {wanted[0]!r} and "
                f"{len(wanted) - 1} other tensors in it. Copy the whole checkpoint."
            )
        header = _header(folder / file)
        if absent := [name for name in wanted if name not in header]:
            raise InputError(f"{INDEX_FILE} names {absent[0]!r} in {file!r}, but it is not there. {_COPY}")
        if extra := [name for name in header if table.get(name) != file]:
            raise InputError(f"{file!r} holds {extra[0]!r}, which {INDEX_FILE} does not name there. {_COPY}")
        found |= header
    return found


def _header(file: Path) -> dict[str, StoredTensor]:
    with opened(file) as handle:
        slices = ((name, handle.get_slice(name)) for name in handle.keys())  # noqa: SIM118 - it is no dictionary
        return {name: StoredTensor(file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices}


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file. Raises InputError where it is damaged, cut off or unreadable."""
    try:
        with safe_open(file, framework="np") as handle:  # arrays need ml_dtypes imported for bfloat16
            yield handle
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{str(file)!r} cannot be read: {error}. It is damaged, cut off or no safetensors file: copy it again."
        ) from error


def row_slices(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Rows of a tensor in pieces of some hundred KiB, as many pieces together as one opening of the file may read."""
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * itemsize
    rows = max(1, _PIECE_BYTES // max(1, row_bytes))
    pieces = (slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))
    return itertools.batched(pieces, max(1, _OPENING_BYTES // (rows * row_bytes)))
