"""Windows over packed documents, and an order that can be left and taken up again."""

import json
from contextlib import closing

import numpy as np
import pytest

from nosa_jax.train import BatchStream, PackedWindows, evaluation_batches

TOKENS = np.arange(1000, dtype=np.uint16)


def test_windows_make_every_token_but_the_first_a_target_once() -> None:
    windows = PackedWindows(TOKENS, 64, pad_id=7777)
    items = [windows[i] for i in range(len(windows))]
    targets = np.concatenate([w["tokens"][1:][w["mask"]] for w in items])
    np.testing.assert_array_equal(targets, np.arange(1, 1000))
    last = items[-1]
    assert last["mask"].sum() == 999 % 64
    assert (last["tokens"][1:][~last["mask"]] == 7777).all()
    assert {w["tokens"].shape for w in items} == {(65,)}


def test_corpus_shorter_than_a_window_is_one_padded_window() -> None:
    windows = PackedWindows(TOKENS[:3], 64, pad_id=0)
    assert len(windows) == 1
    assert windows[0]["mask"].sum() == 2


def _take(stream: BatchStream, count: int) -> np.ndarray:
    return np.stack([next(stream)["tokens"][:, 0] for _ in range(count)])


def test_c4_resumed_order_equals_the_uninterrupted_one_across_epochs() -> None:
    """16 windows in batches of 3: epochs end inside a batch. Left at every one of 20 batches."""
    windows = PackedWindows(TOKENS, 64, pad_id=0)
    with closing(BatchStream(windows, 3, seed=5)) as stream:
        straight = _take(stream, 24)
    with closing(BatchStream(windows, 3, seed=5)) as stream:
        for left_at in range(20):
            state = json.loads(json.dumps(stream.state()))
            with closing(BatchStream(windows, 3, seed=5)) as again:
                again.restore(state)
                np.testing.assert_array_equal(_take(again, 4), straight[left_at : left_at + 4])
            next(stream)


def test_every_epoch_is_another_permutation() -> None:
    windows = PackedWindows(TOKENS, 64, pad_id=0)
    with closing(BatchStream(windows, 4, seed=5)) as stream:
        epochs = _take(stream, 12).reshape(3, 16)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(16) * 64)
    assert len({tuple(e) for e in epochs.tolist()}) == 3
    with closing(BatchStream(windows, 4, seed=6)) as other:
        assert _take(other, 4).reshape(-1).tolist() != epochs[0].tolist()


@pytest.mark.parametrize("count", [1, 5, 16, 100])
def test_evaluation_windows_are_distinct_and_whole_batches(count) -> None:
    windows = PackedWindows(TOKENS, 64, pad_id=0)
    batches = list(evaluation_batches(windows, count, 4))
    assert {b["tokens"].shape for b in batches} == {(4, 65)}
    starts = [t[0] for b in batches for t, m in zip(b["tokens"], b["mask"], strict=True) if m.any()]
    assert len(starts) == len(set(starts)) == min(count, 16)
