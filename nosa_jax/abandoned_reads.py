"""Quiet for the reads that orbax leaves behind when one of them fails.

Orbax reads arrays at the same time and, at the first failure, closes the event loop that the others report to. Their
complaints come from threads and from the garbage collector, long after the failure was reported, and say nothing.
"""

import sys

_COMPLAINTS = (
    "Event loop is closed",
    "Encountered error while reading array index",
    "coroutine '_read_array_index_and_device_put' was never awaited",
)


def ignore_abandoned_reads() -> None:
    """From now on drop what abandoned reads cannot deliver; everything else goes on to the hook that was there."""
    previous = sys.unraisablehook
    if getattr(previous, "ignores_abandoned_reads", False):
        return

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not str(unraisable.exc_value).startswith(_COMPLAINTS):
            previous(unraisable)

    hook.ignores_abandoned_reads = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
