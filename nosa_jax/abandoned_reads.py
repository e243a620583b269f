"""Quiet for the reads that orbax leaves behind when one of them fails.

Orbax reads arrays at the same time and, at the first failure, closes the event loop that the others report to. Their
complaints come from threads, from the garbage collector, from asyncio's logger and as warnings, just before the failure
itself is raised or long after, and say nothing that it does not say.
"""

import logging
import re
import sys
import warnings

_NEVER_AWAITED = r"coroutine '(Store\._get_array_metadatas|_read_array_index_and_device_put)' was never awaited"
_COMPLAINT = re.compile(
    rf"Event loop is closed|Encountered error while reading array index|[A-Z_]+: Error reading |{_NEVER_AWAITED}"
)


def ignore_abandoned_reads() -> None:
    """From now on drop what abandoned reads cannot deliver; everything else goes on to where it went before.

    To be called before the first read: a hook installed after a failure comes too late for some of them.
    """
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
    return _COMPLAINT.match(str(error)) is not None


def _says_something(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _is_complaint(record.exc_info[1]))
