"""What a config accepts, refuses and derives."""

import math
import subprocess
import sys

import pytest

from nosa_jax import NosaConfig


def test_default_budget_is_the_published_one():
    config = NosaConfig.nosa_8b()
    assert (config.budget.total, config.budget.max_fetched, config.budget.locality_bound) == (64, 15, 0.75)
    assert config.group_size == 16
    assert (config.num_blocks(65), config.num_windows(31), config.num_windows(32), config.num_windows(48)) == (
        2,
        0,
        1,
        2,
    )


@pytest.mark.parametrize(
    ("attention", "query", "evict"), [("nosa", 15, 31), ("infllmv2", 46, 0), ("dma", 0, 46), ("dense", 15, 31)]
)
def test_compared_systems_divide_the_same_budget(attention, query, evict):
    budget = NosaConfig.nosa_1b(attention=attention).budget
    assert (budget.sink, budget.local, budget.query, budget.evict, budget.total) == (1, 17, query, evict, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"local_blocks": 1}, ["local_blocks=1", "locality", "at least 2"]),
        ({"pool_window": 12, "local_blocks": 1}, ["local_blocks=1", "locality"]),
        ({"pool_stride": 3}, ["block_size=16", "pool_stride=3"]),
        ({"pool_window": 6}, ["pool_window=6", "pool_stride=4"]),
        ({"num_heads": 3}, ["num_heads=3", "num_kv_heads=2"]),
        ({"head_dim": 33}, ["head_dim=33", "even"]),
        ({"query_blocks": -1}, ["query_blocks=-1"]),
        ({"max_context": 2**22 + 1}, ["max_context=4194305", "4,194,304"]),
        ({"rope_theta": 0.0}, ["rope_theta=0.0"]),
        ({"rope_theta": math.nan}, ["rope_theta=nan"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps=-1.0"]),
        ({"rope_attention_factor": math.inf}, ["rope_attention_factor=inf"]),
        ({"rope_factors": (1.0,)}, ["1 entries", "16"]),
        ({"rope_factors": (0.0,) * 16}, ["positive"]),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_its_numbers(change, words):
    with pytest.raises(ValueError, match=r".") as refused:
        NosaConfig.tiny(**change)
    for word in words:
        assert word in str(refused.value)


def test_the_smallest_local_window_that_the_proof_allows_is_accepted():
    """A block's score is final 79 tokens after its first one with the default windows: two blocks of 64 cover that."""
    assert NosaConfig.nosa_1b(local_blocks=2).local_blocks == 2
    with pytest.raises(ValueError, match="Set local_blocks to at least 2"):
        NosaConfig.nosa_1b(local_blocks=1)


def test_json_round_trip_and_hash():
    config = NosaConfig.tiny(rope_factors=(1.5,) * 16)
    again = NosaConfig.from_dict(config.to_dict())
    assert again == config
    assert hash(again) == hash(config)
    with pytest.raises(ValueError, match="unknown config keys: extra"):
        NosaConfig.from_dict(config.to_dict() | {"extra": 1})
    with pytest.raises(ValueError, match="missing config keys: vocab_size"):
        NosaConfig.from_dict({k: v for k, v in config.to_dict().items() if k != "vocab_size"})


# The test suite checks the types of all arguments; users do not, so these run in a process of their own.
WRONG_TYPES = """
import json
from nosa_jax import NosaConfig
from nosa_jax.infer import SamplingParams

config = NosaConfig.from_dict(json.loads(json.dumps(NosaConfig.tiny(rope_factors=(1.5,) * 16).to_dict())))
assert hash(config) == hash(NosaConfig.tiny(rope_factors=(1.5,) * 16))
for make, change in (
    (NosaConfig.tiny, {"vocab_size": 259.5}),
    (NosaConfig.tiny, {"num_layers": True}),
    (NosaConfig.tiny, {"attention": "sparse"}),
    (NosaConfig.tiny, {"dtype": "int8"}),
    (SamplingParams, {"max_new_tokens": 2.5}),
    (SamplingParams, {"eos_ids": 3}),
):
    try:
        make(**change)
    except ValueError as error:
        print(error)
    else:
        raise SystemExit(f"{change} was accepted")
"""


def test_values_of_a_wrong_type_are_refused_by_name():
    done = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    expected = (
        "vocab_size=259.5",
        "num_layers=True",
        "attention='sparse'",
        "dtype='int8'",
        "max_new_tokens=2.5",
        "eos_ids=3",
    )
    assert len(lines) == len(expected)
    assert all(word in line for word, line in zip(expected, lines, strict=True))
