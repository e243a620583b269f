"""Sampling: the filters against NumPy, greedy ties, and streams that do not depend on the other rows."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosa_jax.errors import InputError
from nosa_jax.infer import SamplingParams
from nosa_jax.infer.sampling import MAX_EOS, empty_sampling, filtered_logits, finished, sample, set_row
from tests.infer.cases import ROWS, offloaded, random_model, random_tokens

VOCAB, BATCH = 23, 4


def filter_numpy(logits, top_k, top_p):
    """Which tokens may be drawn, by the definition: ranked by logit, cut at k, then at the mass p; ties stay in."""
    order = np.argsort(-logits, kind="stable")
    ranked = logits[order].astype(np.float64)
    if top_k:
        ranked = ranked[:top_k]
    mass = np.exp(ranked - ranked[0])
    mass /= mass.sum()
    count = len(ranked) if top_p == 1 else 1 + int((np.cumsum(mass) < top_p)[:-1].sum())
    return logits >= ranked[count - 1]


@given(st.integers(0, 2**32 - 1), st.integers(0, VOCAB + 2), st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
       st.sampled_from([0.1, 1.0, 20.0]), st.booleans())  # fmt: skip
def test_filters_match_numpy(seed, top_k, top_p, scale, tied):
    logits = np.random.default_rng(seed).normal(scale=scale, size=(BATCH, VOCAB)).astype(np.float32)
    if tied:
        logits = np.round(logits)
    out = filtered_logits(jnp.asarray(logits), jnp.full(BATCH, top_k, jnp.int32), jnp.full(BATCH, top_p, jnp.float32))
    for before, after in zip(logits, np.asarray(out), strict=True):
        kept = filter_numpy(before, top_k, top_p)
        np.testing.assert_array_equal(after[after > -np.inf], before[after > -np.inf])
        # Where rounding of the summed mass decides, either answer is right.
        near = [filter_numpy(before, top_k, p) for p in (top_p * (1 - 1e-5), min(1.0, top_p * (1 + 1e-5)))]
        if top_p == 1 or (near[0] == near[1]).all():
            np.testing.assert_array_equal(after > -np.inf, kept)


def rows_of(params):
    state = empty_sampling(len(params))
    for row, (one, stream) in enumerate(params):
        state = set_row(state, row, one, stream)
    return state


def test_greedy_takes_the_lower_id_of_equals():
    logits = jnp.zeros((2, VOCAB)).at[1, 5].set(1).at[1, 9].set(1)
    for greedy in (True, False):
        tokens, state = sample(logits, rows_of([(SamplingParams(), 0)] * 2), greedy=greedy)
        assert tokens.tolist() == [0, 5]
        assert state.generated.tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-20, 1e-3])
def test_a_tiny_temperature_is_nearly_greedy_and_finite(temperature):
    logits = jnp.asarray(np.random.default_rng(0).normal(scale=5, size=(3, VOCAB)), jnp.float32)
    tokens, _ = sample(logits, rows_of([(SamplingParams(temperature=temperature), i) for i in range(3)]), greedy=False)
    assert tokens.tolist() == logits.argmax(axis=-1).tolist()


def test_top_k_of_one_and_tiny_top_p_are_greedy():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, VOCAB)), jnp.float32)
    params = [(SamplingParams(temperature=1.0, top_k=1), 0), (SamplingParams(temperature=1.0, top_p=1e-6), 1)]
    assert sample(logits, rows_of(params), greedy=False)[0].tolist() == logits.argmax(axis=-1).tolist()


def test_draws_follow_the_probabilities():
    """2,000 streams at temperature 2 against softmax(logits / 2): largest deviation within four standard errors."""
    n, logits = 2000, np.array([2.0, 0.0, -1.0, 3.0], np.float32)
    state = empty_sampling(n)._replace(
        temperature=jnp.full(n, 2.0), key=jnp.stack([jnp.arange(n, dtype=jnp.uint32)] * 2, axis=1)
    )
    tokens, _ = sample(jnp.broadcast_to(logits, (n, 4)), state, greedy=False)
    expected = np.exp(logits / 2) / np.exp(logits / 2).sum()
    shares = np.bincount(np.asarray(tokens), minlength=4) / n
    assert (np.abs(shares - expected) < 4 * np.sqrt(expected * (1 - expected) / n)).all()


def test_a_request_draws_the_same_whatever_runs_beside_it():
    """The same seed and place in the list: alone, beside greedy and sampled requests, waiting for a row, repeated."""
    model = random_model()
    prompts = [random_tokens(n, seed=n) for n in (11, 5, 33)]
    mine = SamplingParams(max_new_tokens=10, temperature=1.5, top_k=20, top_p=0.95, seed=7)
    with offloaded(model) as engine:
        alone = engine.generate(prompts[:1], mine)[0].tokens
        mates = [SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=12, temperature=0.7, seed=1)]
        assert engine.generate(prompts, [mine, *mates])[0].tokens == alone
        assert engine.generate(prompts[:1], mine)[0].tokens == alone
        crowd = engine.generate(prompts[:1] * (ROWS + 2), mine)
        assert crowd[0].tokens == alone
        assert len({tuple(r.tokens) for r in crowd}) > ROWS, "equal seeds at other places draw differently"
        greedy = engine.generate(prompts, SamplingParams(max_new_tokens=10))
        mixed = engine.generate(prompts, [mine, SamplingParams(max_new_tokens=10), SamplingParams(max_new_tokens=10)])
    assert [r.tokens for r in mixed[1:]] == [r.tokens for r in greedy[1:]]


def test_rows_end_at_their_limit_or_at_one_of_their_ids():
    params = [
        (SamplingParams(max_new_tokens=1), 0),
        (SamplingParams(max_new_tokens=2), 0),
        (SamplingParams(eos_ids=(3, 4)), 0),
        (SamplingParams(eos_ids=(5,)), 0),
    ]
    _, state = sample(jnp.zeros((4, VOCAB)), rows_of(params), greedy=True)
    assert finished(jnp.asarray([9, 9, 4, 4], jnp.int32), state).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(max_new_tokens=-1), "max_new_tokens=-1 must be an integer of at least 0"),
        (dict(temperature=-0.5), "temperature=-0.5 must be"),
        (dict(temperature=float("nan")), "temperature=nan must be"),
        (dict(temperature=1e300), "temperature=1e.300 must be .* finite in float32"),
        (dict(top_k=-2), "top_k=-2 must be an integer of at least 0"),
        (dict(top_p=0.0), "top_p=0.0 must be above 0"),
        (dict(top_p=1.5), "top_p=1.5 must be above 0 and at most 1"),
        (dict(seed=2**32), "seed=4294967296 must be an integer of at least 0"),
        (dict(eos_ids=tuple(range(MAX_EOS + 1))), f"{MAX_EOS + 1} eos_ids given; at most {MAX_EOS}"),
    ],
    ids=str,
)
def test_parameters_out_of_range(change, message):
    with pytest.raises(InputError, match=message):
        SamplingParams(**change)
