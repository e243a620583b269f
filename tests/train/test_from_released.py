"""Continued training from a released checkpoint: its whole config, float32 parameters, NOSA switched on."""

import numpy as np
import pytest

from nosa_jax import NosaLM
from nosa_jax.checkpoint import split_model
from nosa_jax.tokenizer import ByteTokenizer
from nosa_jax.train import InputError, Phase, load_model, train
from tests.oracle.weights import random_weights
from tests.train.conftest import SMALL
from tests.weights.cases import write_checkpoint

# A released config says what a preset would get wrong: positions, epsilon, scales.
CHANGES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, vocab_size=259, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=777.0,
    torch_dtype="bfloat16",
    rope_scaling={"rope_type": "longrope", "short_factor": [1.0, 1.5] * 4, "long_factor": [1.0, 1.5] * 4},
    sparse_config={"kernel_size": 8, "kernel_stride": 4, "block_size": 8, "window_size": 8, "select_blocks": 2,
                   "topk": 5},
)  # fmt: skip


@pytest.fixture
def plain(tmp_path):
    """A bfloat16 Llama checkpoint without an eviction head."""
    weights = {n: a for n, a in random_weights(SMALL, 1).items() if "delta" not in n and not n.endswith(".A")}
    return write_checkpoint(tmp_path / "plain", weights, dtype="bfloat16", **CHANGES)


@pytest.mark.slow
def test_nosa_is_switched_on_by_continued_training(tmp_path, plain, run_config) -> None:
    """The run keeps the checkpoint's config, its eviction head learns, and a copy of the run needs no checkpoint."""
    config = run_config(
        tmp_path / "run", preset="checkpoint", init_from=str(plain), export=str(tmp_path / "export"), seed=5,
        dense=Phase(steps=0, seq_len=32, batch=4, attention="dense"),
        nosa=Phase(steps=3, seq_len=64, batch=2, attention="nosa"),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="has no eviction head"):
        result = train(config)
    trained, tokenizer, _ = load_model(tmp_path / "export")
    assert isinstance(tokenizer, ByteTokenizer)
    c = trained.config
    assert (c.rope_theta, c.rms_norm_eps, c.max_context, c.rope_factors) == (777.0, 1e-5, 256, (1.0, 1.5) * 4)
    assert (c.param_dtype, c.dtype, c.attention) == ("float32", "bfloat16", "nosa")
    assert (c.block_size, c.budget.total) == (8, 5)
    params = split_model(trained)[1]
    assert all(np.any(np.asarray(params[f"layers.0.attention.{n}"])) for n in ("a_k", "delta_weight_kkh"))
    assert result.step == 3
    with pytest.warns(UserWarning, match="has no eviction head"):
        before = split_model(NosaLM.from_pretrained(plain, seed=5))[1]
    near = np.abs(np.asarray(params["embed_vd"]) - np.asarray(before["embed_vd"], np.float32)).max()
    assert 0 < near < 0.1  # it went on from these weights
    for file in plain.iterdir():
        file.unlink()
    again = train(
        run_config(tmp_path / "run", preset="checkpoint", resume=True, seed=5, dense=config.dense, nosa=config.nosa)
    )
    assert again.step == 3


def test_what_does_not_fit_is_named(tmp_path, plain, run_config) -> None:
    with pytest.raises(InputError, match="takes the model of --init-from"):
        train(run_config(tmp_path / "a", preset="checkpoint"))
    with pytest.raises(InputError, match=r"num_layers is 1, wanted 4.*rope_theta is 777.0.*param_dtype is 'bfloat16'"):
        train(run_config(tmp_path / "b", preset="tiny", init_from=str(plain)))
    with pytest.raises(InputError, match=r"embed_dim is 32, wanted 64"):
        train(run_config(tmp_path / "c", preset="checkpoint", init_from=str(plain), override=("embed_dim=64",)))
    assert not any((tmp_path / name).exists() for name in "abc")
