"""Tiny exported models, as command lines read them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from nosa_jax.checkpoint import export_model
from nosa_jax.config import NosaConfig
from nosa_jax.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from tests.oracle.weights import model_with, random_weights

CONFIG = NosaConfig.tiny(
    num_layers=1, embed_dim=32, ffn_dim=48, num_heads=2, num_kv_heads=1, head_dim=16, block_size=4, pool_window=4,
    pool_stride=2, local_blocks=2, query_blocks=1, evict_blocks=2, max_context=256,
)  # fmt: skip
"""Six blocks of four tokens selected."""


def export(path: Path, tokenizer: Tokenizer | None, config: NosaConfig = CONFIG) -> Path:
    return export_model(path, model_with(config, random_weights(config, 1)), tokenizer)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that read and write bytes."""
    return export(tmp_path_factory.mktemp("bytes") / "model", ByteTokenizer())


@pytest.fixture(scope="session")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with a tokenizer.json of a few words."""
    words = {"<unk>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, 40)}
    spec = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    spec.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return export(tmp_path_factory.mktemp("words") / "model", JsonTokenizer(spec.to_str()))


@pytest.fixture(scope="session")
def nameless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights without a tokenizer."""
    return export(tmp_path_factory.mktemp("none") / "model", None)


@pytest.fixture
def damaged_model(byte_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """`damaged_model(pattern, keep)`: a copy in which the files that match have only this part of their bytes left."""

    def make(pattern: str, keep: float = 0.5) -> Path:
        model = Path(shutil.copytree(byte_model, tmp_path / "damaged"))
        files = [path for path in model.glob(pattern) if path.is_file()]
        assert files
        for path in files:
            os.truncate(path, int(path.stat().st_size * keep))
        return model

    return make


@pytest.fixture(scope="session")
def mixed_up_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parameters of one config beside the description of another."""
    folder = tmp_path_factory.mktemp("mixed")
    wide = export(folder / "wide", ByteTokenizer(), CONFIG.replace(ffn_dim=64))
    (wide / "meta").rename(folder / "meta-of-wide")
    model = export(folder / "model", ByteTokenizer())
    (model / "meta").rename(folder / "meta-of-model")
    (folder / "meta-of-wide").rename(model / "meta")
    return model
