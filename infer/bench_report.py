"""How `nosa-bench throughput` shows what it measured: a line and a table row for each, and a picture."""

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
        f"{result.system:13} {result.context:6} tokens {result.batch:4} rows, {result.steps_per_dispatch} a dispatch"
        f"{', overlap' if result.overlap else ''}: "
        f"{result.step_seconds * 1e3:7.2f} ms a step (host {result.host_seconds * 1e3:.2f}), "
        f"{result.tokens_per_second:8,.0f} tokens/s, {result.of_floor:5.2f} x floor, {result.misses:5.2f} misses; "
        f"traced in {result.trace_seconds:.1f} s, compiled in {result.compile_seconds:.1f} s, "
        f"filled in {result.fill_seconds:.1f} s"
    )


def table(results: list[Measurement]) -> Table:
    """Everything measured."""
    found = Table(title="decode throughput")
    for name in ("context", "system", "rows", "slots", "budget", "steps/\ndispatch", "overlap", "ms/step", "host ms",
                 "tokens/s", "x floor", "misses", "MB\nfetched", "planned", "in use"):  # fmt: skip
        found.add_column(name, justify="right")
    for r in results:
        found.add_row(
            f"{r.context:,}", r.system, str(r.batch), str(r.slots), r.device_budget or "", str(r.steps_per_dispatch),
            "on" if r.overlap else "",
            f"{r.step_seconds * 1e3:.2f}", f"{r.host_seconds * 1e3:.2f}", f"{r.tokens_per_second:,.0f}",
            f"{r.of_floor:.2f}", f"{r.misses:.2f}", f"{r.fetched_bytes / 1e6:.1f}", format_bytes(r.device_bytes),
            format_bytes(r.allocator["in_use"] + r.program_bytes) if r.allocator else "",
        )  # fmt: skip
    return found


def plot(results: list[Measurement], path: Path) -> None:
    """Tokens per second over the batch, one panel per context; dotted: the floors."""
    contexts = sorted({r.context for r in results})
    figure, panels = plt.subplots(1, len(contexts), figsize=(5.2 * len(contexts), 4.2), squeeze=False)
    names = list(dict.fromkeys(r.system for r in results))
    for panel, context in zip(panels[0], contexts, strict=True):
        for index, name in enumerate(names):
            own = [r for r in results if r.system == name and r.context == context]
            # Where a batch was measured several times, the fastest.
            best = {r.batch: r for r in sorted(own, key=lambda r: r.tokens_per_second)}
            rows = [best[batch] for batch in sorted(best)]
            if rows:
                batches = [r.batch for r in rows]
                panel.plot(batches, [r.tokens_per_second for r in rows], "o-", color=f"C{index}", label=name)
                panel.plot(batches, [r.batch / r.floor_seconds for r in rows], ":", color=f"C{index}")
        panel.set(title=f"{context:,} tokens", xlabel="rows", ylabel="tokens/s")
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=8, title="dotted: floor")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
