"""What comes later changes nothing before it, bit for bit: logits, selected blocks, padding, batch rows."""

import numpy as np
import pytest

from tests.oracle.test_model import SMALL, run, tokens_for
from tests.oracle.weights import model_with, random_weights

ATTENTIONS = ["dense", "infllmv2", "dma", "nosa"]


@pytest.fixture(scope="module")
def model():
    return model_with(SMALL, random_weights(SMALL, 11))


def assert_same_until(first, second, end: int) -> None:
    """Logits and ids of positions before `end` agree in every bit."""
    (logits, blocks), (other_logits, other_blocks) = first, second
    np.testing.assert_array_equal(logits[:, :end], other_logits[:, :end])
    for ids, other_ids in zip(blocks, other_blocks, strict=True):
        if ids is not None:
            np.testing.assert_array_equal(ids[:, :end], other_ids[:, :end])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_b4_token_t_plus_1_changes_nothing_until_t(model, attention):
    """At the first token, inside blocks, at their borders, where windows complete and at the end."""
    tokens = tokens_for(SMALL, 12)
    original = run(model, tokens, attention)
    for t in (0, 6, 7, 8, 63, 64, 75, 115):
        changed = tokens.copy()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1 + np.arange(tokens.shape[1] - t - 1)) % SMALL.vocab_size
        other = run(model, changed, attention)
        assert_same_until(original, other, t + 1)
        assert not np.array_equal(original[0][:, t + 1 :], other[0][:, t + 1 :])


@pytest.mark.parametrize("attention", ["dense", "nosa"])
def test_a_prefix_alone_gives_the_same_logits_and_blocks(model, attention):
    """Other lengths are other programs: sums may be ordered differently, the selection may not change."""
    tokens = tokens_for(SMALL, 13)
    logits, blocks = run(model, tokens, attention)
    for length in (1, 65):
        short_logits, short_blocks = run(model, tokens[:, :length], attention)
        np.testing.assert_allclose(short_logits, logits[:, :length], atol=2e-5)
        for ids, short_ids in zip(blocks, short_blocks, strict=True):
            if ids is not None:
                np.testing.assert_array_equal(short_ids, ids[:, :length])


@pytest.mark.parametrize("attention", ["dense", "nosa"])
def test_rows_of_a_batch_do_not_touch_each_other(model, attention):
    tokens = tokens_for(SMALL, 14)
    logits, _ = run(model, tokens, attention)
    swapped, _ = run(model, tokens[::-1], attention)
    np.testing.assert_array_equal(swapped[::-1], logits)
    tokens[1] = 0
    np.testing.assert_array_equal(run(model, tokens, attention)[0][0], logits[0])
