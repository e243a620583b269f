"""What ran on the device while a function did, as JAX's profiler saw it."""

import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel or copy on a stream of the device, in microseconds."""

    name: str
    stream: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        """When it was over."""
        return self.start + self.duration

    @property
    def kind(self) -> str:
        """The name without the numbers that tell its uses apart: equal for all layers."""
        return re.sub(r"([._]\d+)+(?=$|<|\()", "", self.name)


def device_events(call: Callable[[], object]) -> list[DeviceEvent]:
    """Everything that the device ran during a call, in the order of its start; empty where it is no GPU.

    The call must wait for its results.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (path,) = Path(folder).glob("plugins/profile/*/*.trace.json.gz")
        return parse_events(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def parse_events(events: Sequence[dict]) -> list[DeviceEvent]:
    """The kernels and copies in a profile's list of events."""
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("ph") == "M" and "name" in e["args"]}
    found = []
    for e in events:
        if e.get("ph") != "X" or "GPU" not in names.get((e["pid"], None), ""):
            continue
        stream = names.get((e["pid"], e["tid"]), "")
        if "Stream" in stream:
            found.append(DeviceEvent(e["name"], stream, float(e["ts"]), float(e["dur"])))
    return sorted(found, key=lambda event: event.start)


def busy_intervals(events: Sequence[DeviceEvent]) -> list[tuple[float, float]]:
    """The times in which at least one stream ran something, as (start, end), apart from each other."""
    found: list[tuple[float, float]] = []
    for event in events:
        if found and event.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], event.end))
        else:
            found.append((event.start, event.end))
    return found


def by_kind(events: Sequence[DeviceEvent]) -> dict[str, tuple[int, float]]:
    """Number and total microseconds of the events of each kind, the longest first."""
    counts: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        counts[event.kind][0] += 1
        counts[event.kind][1] += event.duration
    ordered = sorted(counts.items(), key=lambda item: -item[1][1])
    return {kind: (int(number), total) for kind, (number, total) in ordered}
