"""The picture of kernels.py: dense against sparse decode over the context, and the speed-up over sequences."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def crossover(figures: list[dict[str, Any]], kernel: str, rows: int) -> float | None:
    """The context from which on attention over C blocks is faster than a dense decode, interpolated; None: never."""
    mine = [f for f in figures if f.get("rows") == rows]
    own = [f for f in mine if f["kernel"] == "decode_attention" and kernel in f["seconds"]]
    dense = sorted((f["context"], min(f["seconds"].values())) for f in mine if f["kernel"] == "dense decode")
    if not own or not dense:
        return None
    sparse = own[0]["seconds"][kernel]
    if dense[0][1] >= sparse:
        return float(dense[0][0])
    for (context, before), (later, after) in pairwise(dense):
        if after >= sparse:
            return context + (later - context) * (sparse - before) / (after - before)
    return None


def plot(figures: list[dict[str, Any]], kernel: str, path: Path) -> None:
    """Draw what there is; nothing if neither was measured."""
    dense_rows = sorted({f["rows"] for f in figures if f["kernel"] == "dense decode"})
    sequences = sorted((f for f in figures if "faster_than_dense_by" in f), key=lambda f: f["length"])
    if not dense_rows and not sequences:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for index, rows in enumerate(dense_rows):
        dense = [f for f in figures if f["kernel"] == "dense decode" and f["rows"] == rows]
        color = f"C{index}"
        times = [min(f["seconds"].values()) * 1e6 for f in dense]
        left.plot([f["context"] for f in dense], times, "o-", color=color, label=f"dense, {rows} rows")
        for own in (f for f in figures if f["kernel"] == "decode_attention" and f["rows"] == rows):
            if kernel in own["seconds"]:
                left.axhline(own["seconds"][kernel] * 1e6, color=color, label=f"{own['case']}")
                left.axhline(own["floor_seconds"] * 1e6, color=color, linestyle=":", label=f"its floor, {rows} rows")
        if found := crossover(figures, kernel, rows):
            print(f"{rows} rows: sparse decode attention is faster than a dense one from {found:,.0f} tokens on")
    left.set(xlabel="context, tokens", ylabel="microseconds a layer", title="Decode attention")
    if dense_rows:
        left.set(xscale="log", yscale="log")
        left.legend(fontsize=8)
    for case, width in (("forward", -0.2), ("forward and backward", 0.2)):
        chosen = [f for f in sequences if f["pass_"] == case]
        heights = [f["faster_than_dense_by"] for f in chosen]
        right.bar([i + width for i in range(len(chosen))], heights, 0.38, label=case)
        right.set_xticks(range(len(chosen)), [f"{f['length']:,}" for f in chosen])
    right.set(xlabel="sequence length", ylabel="times faster than dense", title="Sparse attention over a sequence")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
