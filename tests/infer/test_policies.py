"""The compared systems over one cache and one scheduler: which blocks a step selects changes, and nothing else."""

import numpy as np
import pytest

from nosa_jax.errors import InputError
from nosa_jax.infer import Engine, SamplingParams
from tests.infer.cases import ONE_LAYER, C, P, forward, random_model, random_tokens

CONTEXT = C * P + 40
CHUNK = 12  # every piece of these prompts is padded to it: one compilation each for first and later pieces
PROMPTS = [random_tokens(n, seed=n) for n in (C * P - 9, 12, C * P + 3, 11, C * P + 4, 24)]
NEW = 14


def run(model, **options):
    """Six requests on three rows, joining one by one; their results in order."""
    with Engine(model, max_batch=3, max_context=CONTEXT, prefill_chunk=CHUNK, **options) as engine:
        handles = []
        for i, prompt in enumerate(PROMPTS):
            handles.append(engine.submit(prompt, SamplingParams(max_new_tokens=NEW), record_steps=i % 2 == 0))
            engine._driver.turn(lambda: True)
        return [handle.result() for handle in handles], engine.metrics(), engine.plan


def greedy_by_forward(model, prompt):
    """The most likely continuation, from one forward over the whole sequence at a time, padded to one shape."""
    tokens = list(prompt)
    for _ in range(NEW):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(forward(model, padded)[0][0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "attention", ["dense", *(pytest.param(a, marks=pytest.mark.slow) for a in ("nosa", "infllmv2", "dma"))]
)
def test_every_policy_on_the_same_scheduler_equals_its_forward(attention):
    """B6: prompts around the budget; with blocks on the host, with all on the device, and by forwards alone."""
    model = random_model(ONE_LAYER.replace(attention=attention))
    expected = [greedy_by_forward(model, prompt) for prompt in PROMPTS]
    budget = model.config.budget
    stayed, counted, plan = run(model, offload=False)
    assert [r.tokens for r in stayed] == expected
    assert counted.total.misses == 0
    assert plan.host_bytes == 0
    if attention == "dense":
        return
    moved, counted, plan = run(model, slots=C)
    assert [r.tokens for r in moved] == expected
    assert [r.min_locality for r in moved] == pytest.approx([r.min_locality for r in stayed], nan_ok=True)
    assert counted.total.selected == sum(r.hits + r.misses for r in moved) + _new_blocks(moved)
    assert counted.total.misses == sum(r.misses for r in moved)
    assert max(int(r.steps.misses.max()) for r in moved[::2]) <= budget.max_fetched
    if budget.max_fetched:
        assert counted.total.misses > 0
    assert counted.min_locality >= budget.locality_bound
    assert plan.layout.n_slots == C


def _new_blocks(results):
    """Blocks that a step began: neither found nor fetched. One per layer and KV head each time a block is entered."""
    begun = 0
    for result in results:
        first, end = result.prompt_length, result.prompt_length + len(result.tokens) - 1
        begun += sum(position % P == 0 for position in range(first, end))
    return begun * ONE_LAYER.num_kv_heads * ONE_LAYER.num_layers


def test_dense_attention_is_not_offloaded():
    with pytest.raises(InputError, match="attention='dense' reads every block in every step; use offload=False"):
        Engine(random_model(ONE_LAYER), max_batch=1, max_context=64, attention="dense")


@pytest.mark.slow
def test_an_engine_may_decode_as_another_system_than_the_models():
    """`attention=` overrides the config's, with the same parameters."""
    model = random_model(ONE_LAYER)
    other = random_model(ONE_LAYER.replace(attention="infllmv2"))
    assert [r.tokens for r in run(model, attention="infllmv2", slots=C)[0]] == [
        r.tokens for r in run(other, slots=C)[0]
    ]
