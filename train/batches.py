"""Fixed-size windows of a token stream, shuffled into batches in an order that can be saved and resumed."""

from collections.abc import Iterator
from typing import Any, Self

import grain
import numpy as np

Batch = dict[str, np.ndarray]
"""`tokens` int32 [B, T+1]; `mask` bool [B, T]: whether the target tokens[:, 1:] counts."""


class PackedWindows:
    """Random access to consecutive windows of `seq_len` targets over packed documents.

    Windows share one token, so that every token but the first is a target once. The last window is filled up with
    `pad_id` and masked. Documents are not separated by more than their bos and eos.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, pad_id: int) -> None:
        self._tokens, self._seq_len, self._pad_id = tokens, seq_len, pad_id

    def __len__(self) -> int:
        return max(0, -(-(len(self._tokens) - 1) // self._seq_len))

    def __getitem__(self, index: int) -> Batch:
        start = index * self._seq_len
        piece = self._tokens[start : start + self._seq_len + 1]
        window = np.full(self._seq_len + 1, self._pad_id, np.int32)
        window[: len(piece)] = piece
        return {"tokens": window, "mask": np.arange(self._seq_len) < len(piece) - 1}


class BatchStream:
    """Endless batches: every epoch is a new permutation of the windows, fixed by the seed.

    A batch may straddle two epochs, so no window is ever dropped. `state()` after n batches, given to
    `restore()` of a stream made with the same arguments, continues with batch n+1.
    """

    def __init__(self, windows: PackedWindows, batch: int, seed: int) -> None:
        dataset = grain.MapDataset.source(windows).seed(seed).shuffle().repeat().batch(batch, drop_remainder=True)
        # One thread: slicing an array is cheap, and a second core has better things to do.
        self._iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """Position as plain JSON values."""
        return dict(self._iterator.get_state())

    def restore(self, state: dict[str, Any]) -> Self:
        """Continue at a position that `state()` gave."""
        self._iterator.set_state(state)
        return self

    def close(self) -> None:
        """Stop the reading thread."""
        self._iterator.close()


def evaluation_batches(windows: PackedWindows, count: int, batch: int) -> Iterator[Batch]:
    """At most `count` windows spread evenly over the text, the same ones every time, in whole batches.

    The last batch is filled up with windows that are masked throughout.
    """
    indices = np.unique(np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int))
    for start in range(0, len(indices), batch):
        items = [windows[int(i)] for i in indices[start : start + batch]]
        while len(items) < batch:
            items.append({"tokens": items[0]["tokens"], "mask": np.zeros_like(items[0]["mask"])})
        yield {name: np.stack([item[name] for item in items]) for name in items[0]}
