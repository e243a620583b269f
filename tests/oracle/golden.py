"""The authors' vectors that the repository keeps (tests/data/README.md), and how far a selection is from another."""

from functools import cache
from pathlib import Path

import numpy as np

from .nosa_numpy import Array, Budget, Geometry

GEOMETRY = Geometry(64, 32, 16)
BUDGET = Budget(sink=1, local=17, query=15, evict=31)
EPS, THETA = 1e-6, 10_000.0
PROMPTS = ("L100", "L1024", "L4133", "L8197")


def from_bits(x: Array) -> Array:
    """bfloat16 bits, held as uint16, to float64."""
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def read(path: Path) -> dict[str, Array]:
    """All arrays of an .npz, with bfloat16 bits (every uint16 array) decoded."""
    with np.load(path) as file:
        return {name: from_bits(file[name]) if file[name].dtype == np.uint16 else file[name] for name in file.files}


@cache
def kept() -> dict[str, Array]:
    """The part that lies in tests/data."""
    return read(Path(__file__).parents[1] / "data" / "golden.npz")


def relative_error(ours, theirs: Array) -> float:
    """Norm of the difference over the norm of `theirs`."""
    ours = np.asarray(ours, np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def selection_margin(theirs: set[int], score_q: Array, score_e: Array, position: int) -> float:
    """How much scores would have to be wrong, relative to the worse one, for the rules to select `theirs`; 0 if not."""
    current = position // GEOMETRY.block
    forced = {*range(BUDGET.sink), *range(current - BUDGET.local + 1, current + 1)} & {*range(current + 1)}
    left_out = [b for b in range(current + 1) if b not in theirs]
    if not forced <= theirs or not left_out:
        return 0.0 if forced <= theirs else np.inf
    free = sorted(theirs - forced, key=lambda b: -score_q[b])
    margin = 0.0
    for picks, scores in ((free[: BUDGET.query], score_q), (free[BUDGET.query :], score_e)):
        worst_in, best_out = min(scores[picks]), max(scores[left_out])
        margin = max(margin, (best_out - worst_in) / abs(best_out))
    return margin
