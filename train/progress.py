"""What a training run shows while it works."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 15.0


class TrainProgress:
    """A live bar on a terminal; a line every now and then where output goes to a file."""

    def __init__(self, total: int, done: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.fields[phase]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total, completed=done, phase="", loss=float("nan"), speed="")
        self._total = total
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, step: int, phase: str, loss: float, speed: float) -> None:
        """Show a finished step; `speed` in tokens per second, 0 while it is not known."""
        rate = f"  {speed:,.0f} tokens/s" if speed else ""
        self._bar.update(self._task, completed=step, phase=phase, loss=loss, speed=rate)
        if not self.console.is_terminal and time.monotonic() - self._last_line > _LINE_EVERY_S:
            self.say(f"{phase} step {step}/{self._total}  loss {loss:.3f}{rate}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._last_line = time.monotonic()
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)
