"""Requests that cannot be run, and calls that need rows which requests have."""

import pytest

from nosa_jax.errors import InputError
from nosa_jax.infer import SamplingParams
from nosa_jax.offload import OutOfPagesError
from tests.infer.cases import P, random_tokens
from tests.infer.scheduling import GREEDY, GROUP, PROMPTS, engine_of


def test_what_cannot_be_run_is_refused_when_it_is_submitted(engine):
    for prompt, message in [
        ([], "is empty"),
        ([61], "token id 61"),
        ("text", "no tokenizer"),
        ([1] * 300, "300 tokens"),
    ]:
        with pytest.raises(InputError, match=message):
            engine.submit(prompt)
    with pytest.raises(InputError, match="stop strings are text"):
        engine.submit([1], SamplingParams(stop=("x",)))
    for stream in (-1, 2**32):
        with pytest.raises(InputError, match=f"stream={stream} must be a whole number"):
            engine.submit([1], stream=stream)
    with engine_of(host_budget=5 * GROUP) as small, pytest.raises(OutOfPagesError, match="needs 6 blocks"):
        small.submit(random_tokens(5 * P), SamplingParams(max_new_tokens=1))
    with pytest.raises(InputError, match="max_queue=0"):
        engine_of(max_queue=0)
    with pytest.raises(InputError, match="prefill_chunk=0"):
        engine_of(prefill_chunk=0)


def test_rows_are_not_taken_from_requests(engine, solo):
    handle = engine.submit(PROMPTS[0], GREEDY)
    for call in (lambda: engine.prefill(PROMPTS[:1]), engine.warm_up):
        with pytest.raises(RuntimeError, match="requests wait or run"):
            call()
    assert handle.result().tokens == solo[0]
