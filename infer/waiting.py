"""Requests that wait for a row and pages, and in which order they get them."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class QueueFullError(RuntimeError):
    """As many requests wait as may; nothing was submitted."""


@dataclass(eq=False)
class Waiter:
    """What can wait; `overtaken` counts how often others went before it."""

    overtaken: int = 0


class WaitingQueue[Entry: Waiter]:
    """First come, first served, with bounded overtaking.

    An entry that does not fit yet (its pages are still in use) may be overtaken by later ones that do, at most
    `max_overtaken` times; after that nothing behind it is taken before it is. So a stream of small requests cannot
    keep a large one waiting: it waits for those that run already and for at most `max_overtaken` more.

    Args:
      max_overtaken: 0 keeps to the order strictly.
    """

    def __init__(self, max_overtaken: int) -> None:
        self.max_overtaken = max_overtaken
        self._entries: OrderedDict[int, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def push(self, entry: Entry) -> None:
        """Add at the end."""
        self._entries[id(entry)] = entry

    def push_front(self, entry: Entry) -> None:
        """Add before all others."""
        self.push(entry)
        self._entries.move_to_end(id(entry), last=False)

    def remove(self, entry: Entry) -> bool:
        """Take an entry out wherever it is; False where it is not here."""
        return self._entries.pop(id(entry), None) is not None

    def take(self, fits: Callable[[Entry], bool]) -> Entry | None:
        """Take out the first entry that fits and may go; None where there is none."""
        passed: list[Entry] = []
        for entry in self._entries.values():
            if fits(entry):
                for other in passed:
                    other.overtaken += 1
                self.remove(entry)
                return entry
            # Looking further than the bound is of no use for long: each one taken from there counts for all of these.
            if entry.overtaken >= self.max_overtaken or len(passed) >= self.max_overtaken:
                return None
            passed.append(entry)
        return None
