"""Tables of what a cache did while it generated."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from nosa_jax.infer.plan import format_bytes
from nosa_jax.infer.requests import GenerationResult
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import StepCounts


def statistics_tables(
    names: Sequence[str], results: Sequence[GenerationResult], layout: CacheLayout, seconds: float
) -> list[Table]:
    """One table by prompt and one by layer.

    Args:
      names: what to call the prompts.
      results: of `Engine.generate` with `record_steps=True`, in the same order.
      seconds: that generating took.
    """
    return [_by_prompt(names, results, seconds), _by_layer([r.steps for r in results if r.steps], layout)]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


def _by_prompt(names: Sequence[str], results: Sequence[GenerationResult], seconds: float) -> Table:
    written = sum(len(r.tokens) for r in results)
    table = _table(
        f"{written} tokens in {seconds:.1f} s, compilation included",
        "prompt", "read", "written", "ended by", "hit rate", "fetched per step", "least locality",
    )  # fmt: skip
    for name, result in zip(names, results, strict=True):
        steps = max(0, len(result.tokens) - 1)  # the first token comes from reading the prompt
        table.add_row(
            name,
            str(result.prompt_length),
            str(len(result.tokens)),
            result.finish_reason,
            _share(result.hits, result.hits + result.misses),
            format_bytes(round(result.bytes_fetched / steps)) if steps else "-",
            "-" if np.isnan(result.min_locality) else f"{result.min_locality:.4f}",
        )
    return table


def _by_layer(steps: Sequence[StepCounts], layout: CacheLayout) -> Table:
    """Counts over all prompts, decode steps and KV heads."""
    budget = layout.config.budget_for(layout.attention)
    title = f"{layout.n_slots} slots per row and KV head"
    if layout.offload:
        title += (
            f"; guaranteed: locality {budget.locality_bound:.4g}, "
            f"{budget.max_fetched} of {budget.total} blocks fetched per step and KV head"
        )
    table = _table(title, "layer", "hits", "misses", "hit rate", "most fetched", "least locality")
    hits, misses, selected, kept = (np.concatenate(column) for column in zip(*steps, strict=True))  # each [steps, L, K]
    full = selected == layout.n_selected
    locality = np.where(full, kept / np.maximum(selected, 1), np.inf)
    for layer in range(layout.config.num_layers):
        found, fetched = int(hits[:, layer].sum()), int(misses[:, layer].sum())
        least = locality[:, layer].min(initial=np.inf)
        table.add_row(
            str(layer),
            str(found),
            str(fetched),
            _share(found, found + fetched),
            str(misses[:, layer].max(initial=0)),
            "-" if np.isinf(least) else f"{least:.4f}",
        )
    return table
