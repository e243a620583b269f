"""How `nosa-bench throughput` shows what it measured: a line and a table row for each, and a picture."""

import statistics
from pathlib import Path

import matplotlib
from rich.table import Table

from nosa_jax.infer.plan import format_bytes
from nosa_jax.infer.throughput import Measurement

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def describe(result: Measurement) -> str:
    """One line."""
    return (
        f"{result.system:17} {result.context:6} tokens {result.batch:4} rows, {result.steps_per_dispatch} a dispatch"
        f"{', overlap' if result.overlap else ''}, selection: {result.selection}: "
        f"{result.step_seconds * 1e3:7.2f} ms a step (host {result.host_seconds * 1e3:.2f}), "
        f"{result.tokens_per_second:8,.0f} tokens/s, {result.of_floor:5.2f} x floor, {result.misses:5.2f} misses; "
        f"traced in {result.trace_seconds:.1f} s, compiled in {result.compile_seconds:.1f} s, "
        f"filled in {result.fill_seconds:.1f} s"
    )


def table(results: list[Measurement]) -> Table:
    """Everything measured."""
    found = Table(title="decode throughput")
    for name in ("context", "system", "rows", "slots", "budget", "selection", "steps/\ndispatch", "overlap", "ms/step",
                 "host ms", "tokens/s", "x floor", "misses", "MB\nfetched", "planned", "in use"):  # fmt: skip
        found.add_column(name, justify="right", overflow="fold")  # rather than cut off what tells rows apart
    for r in results:
        found.add_row(
            f"{r.context:,}", r.system, str(r.batch), str(r.slots), r.device_budget or "", r.selection,
            str(r.steps_per_dispatch), "on" if r.overlap else "",
            f"{r.step_seconds * 1e3:.2f}", f"{r.host_seconds * 1e3:.2f}", f"{r.tokens_per_second:,.0f}",
            f"{r.of_floor:.2f}", f"{r.misses:.2f}", f"{r.fetched_bytes / 1e6:.1f}", format_bytes(r.device_bytes),
            format_bytes(r.allocator["in_use"] + r.program_bytes) if r.allocator else "",
        )  # fmt: skip
    return found


def plot(results: list[Measurement], path: Path) -> None:
    """A bar of tokens per second for each row, by context, with a mark where its floor would be."""
    contexts = sorted({r.context for r in results})
    groups = [sorted((r for r in results if r.context == c), key=lambda r: (r.batch, r.system)) for c in contexts]
    sizes = [len(group) for group in groups]
    figure, panels = plt.subplots(
        len(groups), 1, figsize=(9, 1.2 + 0.5 * len(groups) + 0.28 * sum(sizes)), squeeze=False, sharex=True,
        height_ratios=sizes, layout="constrained",
    )  # fmt: skip
    names = dict(zip(map(id, results), labels(results), strict=True))
    colors = {name: f"C{index}" for index, name in enumerate(dict.fromkeys(r.system for r in results))}
    for panel, context, group in zip(panels[:, 0], contexts, groups, strict=True):
        places = range(len(group))
        panel.barh(places, [r.tokens_per_second for r in group], color=[colors[r.system] for r in group], height=0.7)
        panel.plot([r.batch / r.floor_seconds for r in group], places, "k|", markersize=10, label="floor")
        for place, r in zip(places, group, strict=True):
            panel.text(0, place, f" {r.tokens_per_second:,.0f}", va="center", fontsize=8, color="white")
        panel.set_yticks(places, [names[id(r)] for r in group], fontsize=8)
        panel.invert_yaxis()
        panel.set_title(f"{context:,} tokens", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(fontsize=8, loc="lower right", frameon=False)
    panels[-1, 0].set_xlabel("tokens/s of all rows together")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def labels(results: list[Measurement]) -> list[str]:
    """Every row in few words, for the picture; the steps of a dispatch where they are not the usual ones."""
    usual = statistics.mode(r.steps_per_dispatch for r in results)
    return [_label(r, usual) for r in results]


def _label(r: Measurement, usual_steps: int) -> str:
    notes = [
        r.selection,
        f"{r.misses:.2g} misses" if r.misses else "",
        "overlap" if r.overlap else "",
        r.device_budget or "",
        f"{r.steps_per_dispatch} a dispatch" if r.steps_per_dispatch != usual_steps else "",
    ]
    return f"{r.system}, {r.batch} rows ({', '.join(filter(None, notes))})"
