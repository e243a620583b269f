"""What the scheduler has dispatched and not read yet, and how many steps it dispatches at once."""

from collections.abc import Collection
from dataclasses import dataclass

import jax

from nosa_jax.infer.jobs import Job
from nosa_jax.offload.state import StepCounts

# A row that ends by its limit in mid-dispatch idles, while single steps cost all rows the host's time of each. With
# many rows, one or two nearly always end within a few steps.
_MOST_IDLE = 1 / 8


@dataclass
class InFlight:
    """Steps of several rows, or the first token of one.

    jobs: with their rows. report: [n, B, 8] of n steps (`StepsOutput`), a packed token otherwise. dispatched: on the
    clock of `time.perf_counter`.
    """

    jobs: list[tuple[int, Job]]
    report: jax.Array
    dispatched: float
    counts: StepCounts | None = None


def steps_now(jobs: Collection[Job], *, at_once: int, reading: bool, waiting: bool) -> int:
    """How many decode steps to dispatch: `at_once` or 1, which have a program each (docs/09).

    One where a prompt is being read (its next piece comes after these steps), where every row is known to end sooner,
    and, while requests wait for rows or pages, where more than an eighth of the work would be for rows that are known
    to end within: whoever waits could have them.

    Args:
      jobs: those that decode. reading: whether a prompt is read in pieces. waiting: whether requests wait.
    """
    if at_once == 1 or reading:
        return 1
    left = [job.limit - job.issued for job in jobs]
    idle = sum(max(0, at_once - steps) for steps in left)
    if max(left) < at_once or (waiting and idle > _MOST_IDLE * at_once * len(left)):
        return 1
    return at_once
