"""Quiet for the reads that orbax leaves behind when one of them fails.

Orbax reads arrays at the same time and, at the first failure, closes the event loop that the others report to. Their
complaints come from threads, from the garbage collector, from asyncio's logger and as warnings, just before the failure
itself is raised or long after, and say nothing that it does not say.
"""

import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER_AWAITED = r"coroutine '(Store\._get_array_metadatas|_read_array_index_and_device_put)' was never awaited"
_COMPLAINT = re.compile(
    r"Event loop is closed"
    r"|Encountered error while reading array index.*"
    r"|[A-Z_]+: Error reading .* in OCDBT database .*"
    rf"|{_NEVER_AWAITED}",
    re.DOTALL,
)

_lock = threading.Lock()
_reading = 0  # reads that are going on
_failed = False  # whether one has failed: there is no telling when its last complaint has come


@contextmanager
def ignore_abandoned_reads() -> Iterator[None]:
    """Drop what abandoned reads cannot deliver while reading, and from then on if that raises.

    Everything else goes on to where it went before; so do such complaints as long as nothing has failed.
    """
    global _reading, _failed
    with _lock:
        _install()
        _reading += 1
    try:
        yield
    except BaseException:
        _failed = True
        raise
    finally:
        with _lock:
            _reading -= 1


def _install() -> None:
    """Before the first read: a hook that comes after a failure is too late for some of its complaints."""
    logging.getLogger("asyncio").addFilter(_says_something)  # adding it again changes nothing, as with the next one
    warnings.filterwarnings("ignore", _NEVER_AWAITED, RuntimeWarning)
    previous = sys.unraisablehook
    if getattr(previous, "ignores_abandoned_reads", False):
        return

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not _is_complaint(unraisable.exc_value):
            previous(unraisable)

    hook.ignores_abandoned_reads = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def _is_complaint(error: BaseException | None) -> bool:
    return (_reading > 0 or _failed) and _COMPLAINT.fullmatch(str(error)) is not None


def _says_something(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _is_complaint(record.exc_info[1]))
