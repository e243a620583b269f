"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """While this context is open, the first SIGINT or SIGTERM sets `requested`; a second SIGINT interrupts at once.

    Outside the main thread, where Python allows no handlers, nothing is changed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
