"""Which trace a row of `nosa-bench throughput` replays."""

from collections.abc import Sequence
from pathlib import Path

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.infer.bench_cases import Case
from nosa_jax.infer.throughput import Timing
from nosa_jax.infer.trace import PUBLISHED_MISSES, SelectionTrace, synthetic_trace


class Traces:
    """The traces to replay, each made or read once.

    Args:
      files: recorded ones, at most one for each system that selects.
      locality: of systems without one: "published", "weights", or None for "published" where the model selects as many
        blocks as what was published, else "weights".
      config: of the model that is to replay them.
      shortest: least context of all rows. Synthetic traces are made for it, since all others have its blocks too.
      steps: that a row replays at most.

    Raises:
      InputError: a file that holds no trace, or two of one system.
    """

    def __init__(
        self, files: Sequence[Path], locality: str | None, config: NosaConfig, shortest: int, steps: int
    ) -> None:
        locality = locality or ("published" if config.budget.total == min(PUBLISHED_MISSES) else "weights")
        self._locality, self._config, self._shortest, self._steps = locality, config, shortest, steps
        self._synthetic: dict[tuple[str, str], SelectionTrace] = {}
        self._recorded: dict[str, SelectionTrace] = {}
        for path in files:
            trace = SelectionTrace.load(path)
            if trace.attention in self._recorded:
                raise InputError(f"--trace: {path} is a second trace of {trace.attention!r}; give one for each system")
            self._recorded[trace.attention] = trace

    def get(self, case: Case, timing: Timing) -> SelectionTrace | None:
        """What a case replays; None where the weights select. Raises InputError where the trace does not fit."""
        attention = case.system.attention
        locality = case.locality or self._locality
        if attention == "dense":
            return None
        if case.locality is None and attention in self._recorded:
            trace = self._recorded[attention]
        elif locality == "weights" or (locality == "published" and attention != "nosa"):
            return None
        else:
            trace = self._made_up(attention, locality)
        first = case.context - timing.total_steps - 1
        trace.require_fit(self._config, attention, first_length=first, steps=timing.total_steps)
        return trace

    def _made_up(self, attention: AttentionKind, locality: str) -> SelectionTrace:
        budget = self._config.budget_for(attention)
        if locality != "published" and budget.query == 0:
            raise InputError(
                f"locality={locality}: {attention!r} picks no block by query in this model, so that a step misses none "
                "by choice and no trace can be made up with misses; give locality=weights, or a --trace"
            )
        total = budget.total
        misses = PUBLISHED_MISSES if locality == "published" else {total: float(locality)}
        if total not in misses:
            raise InputError(
                f"the published locality is of {min(PUBLISHED_MISSES)} selected blocks and this model selects {total}; "
                "give --locality weights, a --trace, or cases with locality=MISSES"
            )
        key = attention, locality
        if key not in self._synthetic:
            first = self._shortest - self._steps - 1
            self._synthetic[key] = synthetic_trace(
                self._config, context=first, steps=self._steps, misses=misses, attention=attention
            )
        return self._synthetic[key]
