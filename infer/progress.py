"""A progress bar over tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def token_bar(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar while the block runs; gives what to call for each token. Nothing is drawn unless `shown`."""
    if not shown:
        yield lambda: None
        return
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("tokens", total=total)
        yield lambda: bar.advance(task)
