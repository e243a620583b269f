"""The order in which waiting requests are taken, as laws over random arrivals and releases."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nosa_jax.infer.waiting import Waiter, WaitingQueue


@dataclass(eq=False)
class Entry(Waiter):
    number: int = 0
    size: int = 1


SIZES = st.lists(st.integers(1, 10), min_size=1, max_size=40)


@given(SIZES, st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_nothing_is_overtaken_more_often_than_allowed_and_everything_is_taken(sizes, bound, seed):
    """Ten pages, taken and freed in any order, between arrivals at any time."""
    random = np.random.default_rng(seed)
    queue: WaitingQueue[Entry] = WaitingQueue(bound)
    arriving = [Entry(number=i, size=size) for i, size in enumerate(sizes)]
    running: list[Entry] = []
    taken: list[Entry] = []
    free, arrived = 10, 0
    while len(taken) < len(sizes):
        if arrived < len(sizes) and random.random() < 0.5:
            queue.push(arriving[arrived])
            arrived += 1
        elif running and random.random() < 0.5:
            free += running.pop(random.integers(len(running))).size
        entry = queue.take(lambda e, free=free: e.size <= free)
        if entry is not None:
            assert entry.size <= free
            free -= entry.size
            running.append(entry)
            taken.append(entry)
        elif arrived == len(sizes) and queue and not running:
            raise AssertionError("nothing runs and nothing is taken")
    assert not queue
    assert sorted(e.number for e in taken) == list(range(len(sizes)))
    place = {e.number: i for i, e in enumerate(taken)}
    for entry in taken:
        overtaking = sum(place[later] < place[entry.number] for later in range(entry.number + 1, len(sizes)))
        assert overtaking == entry.overtaken <= bound


@given(SIZES)
def test_what_fits_goes_in_the_order_of_arrival(sizes):
    queue: WaitingQueue[Entry] = WaitingQueue(3)
    entries = [Entry(number=i, size=size) for i, size in enumerate(sizes)]
    for entry in entries:
        queue.push(entry)
    assert list(queue) == entries
    assert [queue.take(lambda _: True) for _ in entries] == entries
    assert queue.take(lambda _: True) is None
    assert not any(e.overtaken for e in entries)


def test_entries_leave_from_anywhere_and_return_to_the_front():
    queue: WaitingQueue[Entry] = WaitingQueue(1)
    a, b, c = (Entry(number=i) for i in range(3))
    for entry in (a, b, c):
        queue.push(entry)
    assert queue.remove(b)
    assert not queue.remove(b)
    queue.push_front(b)
    assert list(queue) == [b, a, c]
    assert len(queue) == 3
