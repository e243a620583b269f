"""The locality theorem: a decode step needs at most `query` blocks that the step before did not select.

It holds for every weight and input, so it is tested with hostile ones and not as a statistic. docs/ has the proof.
"""

from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from nosa_jax.config import NosaConfig
from nosa_jax.eviction import ranking_scores
from nosa_jax.selection import block_ranking, pooled_keys, select
from tests.oracle.test_model import run
from tests.oracle.weights import model_with, random_weights

LENGTH, BATCH, KV_HEADS = 150, 1, 2

BASE = NosaConfig(
    vocab_size=31, embed_dim=16, ffn_dim=16, num_layers=2, num_heads=4, num_kv_heads=KV_HEADS, head_dim=4,
    block_size=4, pool_window=4, pool_stride=2, sink_blocks=1, local_blocks=2, query_blocks=2, evict_blocks=3,
    dtype="float32",
)  # fmt: skip
CONFIGS = {
    "published shape": BASE,
    "long windows": BASE.replace(pool_window=8, local_blocks=3),
    "shortest legal local window": BASE.replace(pool_window=2, local_blocks=1, block_size=5, pool_stride=1),
    "no sink, one query pick": BASE.replace(sink_blocks=0, query_blocks=1),
    "dma ranking": BASE.replace(eviction="dma"),
    "no eviction head": BASE.replace(eviction="none"),
}


def check_locality(ids: np.ndarray, config: NosaConfig, attention: str = "nosa") -> int:
    """Assert the law over ids [B, T, K, C] of consecutive positions from 0; the most blocks any step fetched."""
    budget, most = config.budget_for(attention), 0
    for row, head in np.ndindex(ids.shape[0], ids.shape[2]):
        before: set[int] = set()
        for t in range(ids.shape[1]):
            now = {*ids[row, t, head].tolist()} - {-1}
            fetched = {b for b in now - before if b * config.block_size < t}
            assert len(fetched) <= budget.max_fetched, f"position {t}, row {row}, head {head}: {sorted(fetched)}"
            if len(now) == budget.total and t:
                kept = len(now & before)
                assert kept >= budget.total - budget.query - 1, f"position {t}, row {row}, head {head}"
                assert kept / budget.total >= budget.locality_bound - 1e-12
            most = max(most, len(fetched))
            before = now
    return most


@partial(jax.jit, static_argnames=("config", "attention"))
def pipeline(q, k, cis, config, attention):
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    rank = block_ranking(ranking_scores(cis, config.eviction), config, n_blocks=config.num_blocks(q.shape[1]))
    return select(q, pooled_keys(k, config), rank, positions, config=config, attention=attention)


def query_inputs(kind: str, rng: np.random.Generator):
    """Queries and keys that try to make the query-aware picks jump."""
    q = rng.normal(size=(BATCH, LENGTH, 2 * KV_HEADS, 4)).astype(np.float32)
    k = rng.normal(size=(BATCH, LENGTH, KV_HEADS, 4)).astype(np.float32)
    if kind == "opposite queries":
        q = (40 * q[:, :1] * (-1.0) ** np.arange(LENGTH)[None, :, None, None]).astype(np.float32)
    elif kind == "constant":
        q, k = np.zeros_like(q), np.ones_like(k)
    elif kind == "overflowing":
        q, k = q * np.float32(1e25), k * np.float32(1e25)
    elif kind == "NaN keys":
        k[rng.random(k.shape) < 0.02] = np.nan
    elif kind == "few values":
        q, k = np.sign(q), np.sign(k)
    return q, k


def static_inputs(kind: str, rng: np.random.Generator):
    """cis that tries to reorder blocks late: growing, shrinking, spikes at the tokens that decide last, NaN, ties."""
    cis = rng.normal(size=(BATCH, LENGTH, KV_HEADS)).astype(np.float32)
    time = np.arange(LENGTH, dtype=np.float32)[None, :, None]
    if kind == "growing":
        cis = cis * 0 + time
    elif kind == "shrinking":
        cis = cis * 0 - time
    elif kind == "late spikes":
        cis = np.where(time % 4 < 2, 100 * np.abs(cis), cis)
    elif kind == "ties":
        cis = np.round(cis)
    elif kind == "NaN":
        cis[rng.random(cis.shape) < 0.05] = np.nan
    elif kind == "infinite":
        cis = rng.choice(np.array([np.inf, -np.inf, 0, 1e38, -1e38], np.float32), cis.shape)
    elif kind == "huge":
        cis = cis * np.float32(1e30)
    return cis


QUERY_KINDS = ["random", "opposite queries", "constant", "overflowing", "NaN keys", "few values"]
STATIC_KINDS = ["random", "growing", "shrinking", "late spikes", "ties", "NaN", "infinite", "huge"]


@pytest.mark.parametrize("name", CONFIGS)
@hypothesis.given(st.sampled_from(QUERY_KINDS), st.sampled_from(STATIC_KINDS), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=16)
def test_locality_law_for_hostile_inputs(name, query_kind, static_kind, seed):
    rng = np.random.default_rng(seed)
    q, k = query_inputs(query_kind, rng)
    check_locality(np.asarray(pipeline(q, k, static_inputs(static_kind, rng), CONFIGS[name], "nosa")), CONFIGS[name])


@pytest.mark.parametrize(("attention", "fetched"), [("dma", 0), ("nosa", 2)])
def test_the_bound_is_reached_and_not_exceeded(attention, fetched):
    """Queries that flip between two sides exhaust the query picks; with no such picks nothing is ever fetched."""
    rng = np.random.default_rng(0)
    q, k = query_inputs("opposite queries", rng)
    ids = np.asarray(pipeline(q, k, static_inputs("random", rng), BASE, attention))
    assert check_locality(ids, BASE, attention) == fetched == BASE.budget_for(attention).max_fetched


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("repeated", [False, True])
def test_locality_law_in_every_layer_of_random_models(scale, repeated):
    """Random weights with cis of both signs, text and one token repeated (ties everywhere); all heads and layers."""
    weights = random_weights(BASE, 3, scale=scale)
    tokens = np.random.default_rng(4).integers(0, 31, size=(2, LENGTH)).astype(np.int32)
    if repeated:
        tokens[:] = 5
    for attention in ("nosa", "dma"):
        for ids in run(model_with(BASE, weights), tokens, attention)[1]:
            check_locality(np.asarray(ids), BASE, attention)


def test_budgets_without_the_proof_are_refused():
    with pytest.raises(ValueError, match=r"local_blocks=1 breaks the locality guarantee.*at least 2"):
        BASE.replace(local_blocks=1)
