"""A small model, a small corpus, and runs that take seconds."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nosa_jax import NosaConfig
from nosa_jax.train import Optimizer, Phase, TrainConfig

SMALL = NosaConfig.tiny(
    num_layers=1, embed_dim=32, ffn_dim=64, num_heads=2, num_kv_heads=1, head_dim=16, block_size=8, pool_window=8,
    pool_stride=4, sink_blocks=1, local_blocks=2, query_blocks=1, evict_blocks=1, max_context=256,
)  # fmt: skip


@pytest.fixture(scope="session")
def small() -> NosaConfig:
    """One layer, five blocks of eight tokens selected: 64 tokens exceed the budget."""
    return SMALL


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve short files of regular text."""
    folder = tmp_path_factory.mktemp("text")
    words = ["alpha", "beta", "gamma", "delta", "page", "block", "slot", "window"]
    rng = random.Random(7)
    for number in range(12):
        lines = (" ".join(rng.choice(words) for _ in range(6)) for _ in range(8))
        (folder / f"{number:02}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def run_config(text_folder: Path) -> Callable[..., TrainConfig]:
    """`run_config(out, **changes)`: a run of 12 dense and 8 NOSA steps on `text_folder`."""

    def make(out: Path, **changes: Any) -> TrainConfig:
        values: dict[str, Any] = dict(
            out=str(out), data=(str(text_folder),), validation=0.1, eval_every=0, eval_windows=8, checkpoint_every=0,
            dense=Phase(steps=12, seq_len=32, batch=4, attention="dense"),
            nosa=Phase(steps=8, seq_len=64, batch=2, attention="nosa"),
            optimizer=Optimizer(learning_rate=1e-2, warmup_steps=3),
        )  # fmt: skip
        return TrainConfig(**(values | changes))

    return make
