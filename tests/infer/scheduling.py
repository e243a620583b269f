"""Requests and engines for the tests of scheduling, driven round by round where the order matters."""

from functools import lru_cache

import numpy as np
import pytest

from nosa_jax.infer import Engine, SamplingParams
from tests.infer.cases import SMALL, P, offloaded, random_model, random_tokens

MODEL = random_model()
NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW)
SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=1.3, top_k=30, top_p=0.97, seed=5)
PROMPTS = [random_tokens(n, seed=n) for n in (11, 33, 3, 36, 2, 35, 9, 12, 34, 1, 10, 33)]
PARAMS = [SAMPLED if i % 3 == 2 else GREEDY for i in range(len(PROMPTS))]
CHUNK = 16  # the longer prompts take three pieces; few padded lengths, few compilations
GROUP = SMALL.num_layers * SMALL.num_kv_heads * 2 * P * SMALL.head_dim * 4
AT_ONCE = 4  # steps of a dispatch, where it is of several

# The fixture `engine` with one step a dispatch, and with several.
either = pytest.mark.parametrize("engine", [1, AT_ONCE], indirect=True, ids=["a step at once", "four steps at once"])


def engine_of(**options) -> Engine:
    """An engine that reads prompts in pieces."""
    return offloaded(MODEL, **(dict(prefill_chunk=CHUNK) | options))


@lru_cache(maxsize=1)
def solo_tokens() -> list[list[int]]:
    """What each request gets alone, in an engine that did nothing before."""
    outcomes = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        with engine_of() as engine:
            outcomes.append(engine.submit(prompt, params).result().tokens)
    return outcomes


def turn(engine, times=1):
    """So many rounds; the result of the last."""
    more = True
    for _ in range(times):
        more = engine._driver.turn(lambda: True)
    return more


def turn_until(engine, reached):
    """Rounds until something has come about."""
    for _ in range(200):
        if reached():
            return
        turn(engine)
    raise AssertionError("not reached in 200 rounds")


def assert_all_free(engine):
    """Nothing waits or runs, and all pages and rows are there."""
    now = engine.metrics()
    assert (now.waiting, now.reading, now.decoding) == (0, 0, 0)
    assert now.pages_free == now.pages_total == engine.plan.page_groups
    assert sorted(engine._scheduler._free_rows) == list(range(engine.layout.max_batch))
    if engine._scheduler.state is not None:
        assert not np.asarray(engine._scheduler.state.active).any()
