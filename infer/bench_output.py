"""What `nosa-bench` writes: files, tried before anything is measured, and tables."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nosa_jax.errors import InputError
from nosa_jax.infer.cli_output import WriteError


def require_writable(out: Path, file: Path) -> None:
    """Raise InputError where `file` cannot be written to, of --out `out`; what it holds already stays as it is."""
    try:
        with writing(out):
            file.parent.mkdir(parents=True, exist_ok=True)
            place = file.resolve()  # where a link leads, whether there is something or not
            existed = place.exists()
            with place.open("ab"):
                pass
            if not existed:
                place.unlink()
    except WriteError as error:
        raise InputError(str(error)) from error


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise WriteError, naming --out and the reason, where what is done meanwhile raises OSError."""
    try:
        yield
    except OSError as error:  # a library's own may come without a reason by itself
        reason = error.strerror or error
        raise WriteError(
            f"cannot write to {str(out)!r}: {reason}. Give --out a place that you may write to."
        ) from error


def show(table: Table) -> None:
    """Print a table, in full width where stdout is no terminal."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    Console(width=None if terminal else 172).print(table)
