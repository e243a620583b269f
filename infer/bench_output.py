"""Where `nosa-bench` writes: tried before anything is measured, and what goes wrong later said in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nosa_jax.errors import InputError
from nosa_jax.infer.cli_output import WriteError


def require_writable(out: Path, file: Path) -> None:
    """Raise InputError where `file` cannot be written to, of --out `out`; what it holds already stays as it is."""
    try:
        with writing(out):
            file.parent.mkdir(parents=True, exist_ok=True)
            existed = file.exists()
            with file.open("ab"):
                pass
            if not existed:
                file.unlink()
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
