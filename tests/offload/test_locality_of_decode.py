"""The locality theorem in the running cache: with exactly C slots a step never fetches more than the query picks."""

import numpy as np
import pytest

from nosa_jax.infer import freeze
from tests.infer.cases import LENGTHS, ROWS, SMALL, C, P, offloaded, random_tokens, run_steps
from tests.oracle.weights import model_with, random_weights

STEPS = 120


def hostile_weights(kind: str) -> dict[str, np.ndarray]:
    weights = random_weights(SMALL, 11, 20.0 if kind == "sharp" else 1.0)
    for name, value in weights.items():
        if kind in ("huge A", "opposite A") and name.endswith(".A"):
            weights[name] = np.array([1e4, -1e4] if kind == "opposite A" else [3e4, 1e4], np.float32)
        if kind == "constant embeddings" and "embed_tokens" in name:
            weights[name] = np.ones_like(value)
        if kind == "zero queries" and "q_proj" in name:
            weights[name] = np.zeros_like(value)
        if kind == "A of zero" and name.endswith(".A"):
            weights[name] = np.zeros_like(value)
    return weights


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("opposite A", "constant embeddings", "A of zero")]


@pytest.mark.parametrize("kind", ["sharp", "huge A", "zero queries", *SLOW])
def test_a_step_fetches_at_most_the_query_picks(kind):
    """Every step, layer, row and KV head, from the first step after a prefill on; counted again from the ids."""
    model, budget = freeze(model_with(SMALL, hostile_weights(kind))), SMALL.budget
    prompts = [random_tokens(n, seed=n) for n in LENGTHS]
    with offloaded(model) as engine:
        state = engine.prefill(prompts)
        before = [np.asarray(layer.selected) for layer in state.layers]
        trace = run_steps(model, state, random_tokens((ROWS, STEPS), seed=12))
        stats = trace.state.stats()
    assert trace.misses.max() <= budget.query == budget.max_fetched
    ids = np.concatenate([np.stack(before)[None], trace.ids])  # the step before the first is the prefill's last token
    for step, layer, row, head in np.ndindex(trace.misses.shape):
        old, new = ({*ids[s, layer, row, head].tolist()} - {-1} for s in (step, step + 1))
        fresh = {b for b in new if b * P == LENGTHS[row] + step}
        place = (step, layer, row, head)
        assert trace.selected[place] == len(new)
        assert trace.kept[place] == len(new & old)
        assert trace.misses[place] == len(new - old - fresh), "C slots hold the previous selection and nothing else"
        assert trace.hits[place] == len(new & old)
    full = stats.min_locality[~np.isnan(stats.min_locality)]
    assert stats.locality_bound == 1 - (budget.query + 1) / C
    assert full.size == stats.min_locality.size
    assert (full >= stats.locality_bound - 1e-6).all()
    if kind in ("zero queries", "A of zero", "constant embeddings"):
        assert np.isfinite(trace.logits).all()
