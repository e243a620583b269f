"""JSON files that come with a checkpoint, and may be anything."""

import json
from pathlib import Path
from typing import Any

from nosa_jax.errors import InputError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a table. Raises InputError naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{str(path)!r} is missing. Give the folder of a whole checkpoint.") from error
    except (OSError, ValueError, RecursionError) as error:  # damaged JSON, bytes that are no UTF-8, lists within lists
        raise InputError(f"{str(path)!r} cannot be read: {error}. Copy the checkpoint again.") from error
    if not isinstance(values, dict):
        raise InputError(f"{str(path)!r} must hold a table of keys, not {type(values).__name__}.")
    return values
