"""Whole runs: they learn, repeat themselves, and go on exactly where they were stopped."""

import json
import math
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from nosa_jax.checkpoint import split_model
from nosa_jax.tokenizer import ByteTokenizer
from nosa_jax.train import (
    BatchStream,
    InputError,
    Optimizer,
    PackedWindows,
    Phase,
    RunFailure,
    evaluation_batches,
    load_model,
    loop,
    make_eval_step,
    mean_loss,
    read_metrics,
    train,
)
from nosa_jax.train.__main__ import main
from nosa_jax.train.corpus import build_corpus
from nosa_jax.weights import find_model

LONG = dict(
    dense=Phase(steps=60, seq_len=32, batch=4, attention="dense"),
    nosa=Phase(steps=40, seq_len=96, batch=2, attention="nosa"),
    eval_every=25,
    checkpoint_every=30,
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, run_config, small):
    """100 steps without a break."""
    out = tmp_path_factory.mktemp("straight") / "run"
    return train(run_config(out, **LONG), model_config=small)


def _bits(model) -> dict[str, bytes]:
    return {name: np.asarray(value).tobytes() for name, value in split_model(model)[1].items()}


def test_loss_falls_and_everything_is_written(straight) -> None:
    assert straight.step == 100
    assert not straight.interrupted
    assert len(straight.losses) == 100
    assert straight.losses[0] == pytest.approx(math.log(259), abs=0.7)
    assert np.mean(straight.losses[-5:]) < straight.losses[0] - 2.0
    assert straight.validation_losses[-1] < straight.validation_losses[0] - 0.3
    assert [m["step"] for m in straight.metrics if "val_loss" in m] == [25, 50, 60, 75, 100]
    assert {m["phase"] for m in straight.metrics if m["step"] <= 60} == {"dense"}
    assert straight.metrics[-1]["phase"] == "nosa"
    assert [m["tokens"] for m in straight.metrics if "loss" in m][-1] == 60 * 4 * 32 + 40 * 2 * 96
    assert (straight.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((straight.out / "tensorboard").glob("events*"))
    assert set(straight.tokens_per_second) == {"dense", "nosa"}
    assert sorted(p.name for p in (straight.out / "checkpoints").iterdir()) == ["100", "90"]


def test_held_out_perplexity_equals_one_from_the_saved_model(straight, text_folder) -> None:
    model, tokenizer, meta = load_model(straight.out)
    assert isinstance(tokenizer, ByteTokenizer)
    assert _bits(model) == _bits(straight.model)
    corpus = build_corpus([str(text_folder)], tokenizer, validation=0.1)
    assert corpus.fingerprint == meta["corpus"]
    skeleton, params = split_model(model)
    windows = PackedWindows(corpus.validation, 96, tokenizer.pad_id)
    loss = mean_loss(make_eval_step(skeleton, "nosa"), params, evaluation_batches(windows, 8, 2))
    assert straight.metrics[-1]["val_ppl"] == pytest.approx(math.exp(loss), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [50, 60, 80])
def test_c4_stopped_and_resumed_equals_straight(tmp_path, run_config, small, straight, monkeypatch, stop_after) -> None:
    """100 steps straight and stopped after some, in each phase and between them: the same samples, losses and weights.

    The corpus has fewer windows than 100 steps take, so several epochs end on the way.
    """
    seen: list[bytes] = []
    original = BatchStream.__next__

    def watched(self):
        batch = original(self)
        seen.append(batch["tokens"].tobytes())
        if len(seen) == stop_after:
            os.kill(os.getpid(), signal.SIGINT)
        return batch

    config = run_config(tmp_path / "run", **LONG)
    monkeypatch.setattr(BatchStream, "__next__", watched)
    stopped = train(config, model_config=small)
    assert stopped.interrupted
    assert stopped.step == stop_after
    result = train(replace(config, resume=True), model_config=small)
    assert not result.interrupted
    assert len(seen) == 100
    assert result.losses == straight.losses
    assert [m["val_loss"] for m in result.metrics if m["step"] > stop_after and "val_loss" in m] == [
        m["val_loss"] for m in straight.metrics if m["step"] > stop_after and "val_loss" in m
    ]
    assert _bits(result.model) == _bits(straight.model)


def test_resume_needs_the_same_run(straight, run_config, small, tmp_path) -> None:
    config = run_config(straight.out, **LONG)
    with pytest.raises(InputError, match=r"already holds the checkpoints.*--resume"):
        train(config, model_config=small)
    resumed = replace(config, resume=True)
    with pytest.raises(InputError, match=r"seed was 0, is 9"):
        train(replace(resumed, seed=9), model_config=small)
    with pytest.raises(InputError, match=r"another config: ffn_dim is 64, wanted 128"):
        train(resumed, model_config=small.replace(ffn_dim=128))
    (tmp_path / "other.txt").write_text("other text " * 40)
    with pytest.raises(InputError, match="other text"):
        train(replace(resumed, data=(str(tmp_path),)), model_config=small)
    done = train(resumed, model_config=small)  # nothing is left to do, which is no error
    assert done.step == 100
    assert done.metrics == straight.metrics


def test_new_run_starts_from_exported_weights_and_trains_the_eviction_head_only(
    tmp_path, run_config, small, straight
) -> None:
    config = run_config(
        tmp_path / "second", init_from=str(straight.out), train_only=("*.a_k", "*.delta_*"),
        export=str(tmp_path / "export"),
        dense=Phase(steps=0, seq_len=32, batch=4, attention="dense"),
        nosa=Phase(steps=4, seq_len=96, batch=2, attention="nosa"),
    )  # fmt: skip
    result = train(config, model_config=small.replace(evict_blocks=2))  # the selection may change, arrays may not
    before, after = _bits(straight.model), _bits(load_model(tmp_path / "export")[0])
    assert after == _bits(result.model)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if name.endswith(".a_k") or "delta" in name}
    with pytest.raises(InputError, match=r"embed_dim is 32, wanted 64"):
        train(replace(config, out=str(tmp_path / "third"), export=None), model_config=small.replace(embed_dim=64))


def test_diverging_run_fails_and_keeps_its_last_checkpoint(tmp_path, run_config, small) -> None:
    config = run_config(tmp_path / "run", checkpoint_every=1, optimizer=Optimizer(learning_rate=1e30, warmup_steps=0))
    with pytest.raises(RunFailure, match=r"of step 2 .*learning_rate=1e\+30.*last good checkpoint is that of step 1\."):
        train(config, model_config=small)
    model, _, _ = load_model(tmp_path / "run")
    assert all(np.isfinite(value).all() for value in split_model(model)[1].values())
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]


@pytest.mark.filterwarnings("ignore:overflow")
def test_last_update_that_breaks_the_weights_is_neither_saved_nor_exported(tmp_path, run_config, small) -> None:
    """The loss before the only update is finite; the learning rate is infinite in float32."""
    config = run_config(
        tmp_path / "run", export=str(tmp_path / "export"),
        dense=Phase(steps=1, seq_len=32, batch=4, attention="dense"),
        nosa=Phase(steps=0, seq_len=32, batch=4, attention="nosa"),
        optimizer=Optimizer(learning_rate=1e39, warmup_steps=0),
    )  # fmt: skip
    with pytest.raises(RunFailure, match=r"step 1 makes parameters.* not finite.*no checkpoint was saved"):
        train(config, model_config=small)
    assert not (tmp_path / "export").exists()
    assert not any((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("broken", ["grad_norm", "finite", "val_loss"])
def test_step_that_is_not_finite_anywhere_is_not_saved(tmp_path, run_config, small, monkeypatch, broken) -> None:
    """Step 3 goes wrong in one value alone, between two saves."""
    make = loop.make_train_step

    def make_breaking(*args, **settings):
        step = make(*args, **settings)

        def breaking(state, batch):
            state, metrics = step(state, batch)
            bad = {"grad_norm": np.float32("nan"), "finite": np.bool_(False)}
            return state, metrics | ({broken: bad[broken]} if int(state.step) == 3 and broken in bad else {})

        return breaking

    monkeypatch.setattr(loop, "make_train_step", make_breaking)
    if broken == "val_loss":
        monkeypatch.setattr(loop, "mean_loss", lambda *_: math.inf)
    config = run_config(tmp_path / "run", checkpoint_every=1, eval_every=3)
    names = {"grad_norm": "the norm of the gradients of step 3 is nan", "finite": "step 3 makes parameters or moments",
             "val_loss": "the held-out loss of step 3 is inf"}  # fmt: skip
    with pytest.raises(RunFailure, match=f"{names[broken]}.*last good checkpoint is that of step 2"):
        train(config, model_config=small)
    assert load_model(tmp_path / "run")[2]["data"]["iterator"] is not None
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["1", "2"]


def test_single_step_has_no_speed_and_its_export_inside_the_run_is_not_in_the_way(
    tmp_path, text_folder, capsys
) -> None:
    out = tmp_path / "run"
    argv = ["--out", str(out), "--data", str(text_folder), "--dense.steps", "1", "--nosa.steps", "0",
            "--dense.seq-len", "16", "--dense.batch", "1", "--eval-windows", "1",
            "--override", "num_layers=1", "embed_dim=16", "ffn_dim=16"]  # fmt: skip
    assert main([*argv, "--export", str(out / "export")]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"step 1  {out}"
    assert find_model(out).folder == out / "checkpoints" / "1"
    assert main([*argv, "--resume"]) == 0  # nothing is left to do
    assert capsys.readouterr().err.splitlines()[-1] == f"step 1  {out}"


@pytest.mark.slow
def test_export_that_fails_is_named_and_can_be_repeated(tmp_path, run_config, small, monkeypatch) -> None:
    def full(*_):
        raise OSError(28, "No space left on device")

    config = run_config(
        tmp_path / "run", export=str(tmp_path / "export"),
        dense=Phase(steps=1, seq_len=32, batch=4, attention="dense"),
        nosa=Phase(steps=0, seq_len=32, batch=4, attention="nosa"),
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(loop, "export_model", full)
        with pytest.raises(RunFailure, match=r"exported to '.*/export': .*No space left.*step 1 is saved.*--resume"):
            train(config, model_config=small)
    result = train(replace(config, resume=True, export=str(tmp_path / "run" / "export")), model_config=small)
    assert _bits(load_model(tmp_path / "run" / "export")[0]) == _bits(result.model)


def test_half_written_metrics_line_is_dropped(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "loss": 2.0}) + '\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]
    assert read_metrics(tmp_path / "none") == []


def test_second_process_in_the_same_folder_is_refused(tmp_path, run_config, small) -> None:
    from nosa_jax.train.prepare import exclusive

    (tmp_path / "run").mkdir()
    with exclusive(tmp_path / "run"), pytest.raises(InputError, match="another process is training"):
        train(run_config(tmp_path / "run"), model_config=small)
