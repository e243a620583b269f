"""Runs that end badly: killed, out of disk, without permission."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nosa_jax.checkpoint import split_model
from nosa_jax.train import CheckpointStore, Phase, RunFailure, load_model, train
from nosa_jax.train.__main__ import main

STEPS = dict(
    dense=Phase(steps=60, seq_len=32, batch=4, attention="dense"),
    nosa=Phase(steps=0, seq_len=32, batch=4, attention="nosa"),
    checkpoint_every=10,
)


def _bits(model) -> list[bytes]:
    return [np.asarray(value).tobytes() for value in split_model(model)[1].values()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, run_config, small):
    return train(run_config(tmp_path_factory.mktemp("whole") / "run", **STEPS), model_config=small)


@pytest.mark.parametrize("delay_ms", [0, *(pytest.param(ms, marks=pytest.mark.slow) for ms in (50, 200))])
def test_c3_killed_after_a_save_resumes_to_the_same_run(tmp_path, run_config, small, uninterrupted, delay_ms) -> None:
    """kill -9 shortly after the second save has returned, while it may still be writing."""
    config = run_config(tmp_path / "run", **STEPS)
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({**config.to_dict(), "model": small.to_dict()}))
    script = Path(__file__).with_name("slow_run.py")
    with subprocess.Popen([sys.executable, str(script), str(settings)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert next(lines) == "saved 10\n"
        assert next(lines) == "saved 20\n"
        time.sleep(delay_ms / 1000)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    before = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdecimal()]
    assert max(before) in (10, 20, 30)
    result = train(replace(config, resume=True), model_config=small)
    assert result.losses == uninterrupted.losses
    assert _bits(result.model) == _bits(uninterrupted.model)


@pytest.mark.slow
def test_c3_last_step_is_saved_off_the_interval(tmp_path, run_config, small) -> None:
    config = run_config(
        tmp_path / "run", checkpoint_every=5, dense=Phase(steps=7, seq_len=16, batch=2, attention="dense"),
        nosa=Phase(steps=0, seq_len=16, batch=2, attention="nosa"),
    )  # fmt: skip
    train(config, model_config=small)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["5", "7"]


@pytest.mark.slow
def test_c3_full_disk_is_a_failure_that_names_the_last_good_step(tmp_path, run_config, small, monkeypatch) -> None:
    """A limit on the size of files stands for the full disk; it starts after the first checkpoint."""
    config = run_config(
        tmp_path / "run", checkpoint_every=4, nosa=Phase(steps=0, seq_len=32, batch=2, attention="nosa")
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = CheckpointStore.save

    def save_to_full_disk(self, state, meta):
        if int(state.step) > 4:
            self.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        save(self, state, meta)

    monkeypatch.setattr(CheckpointStore, "save", save_to_full_disk)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(RunFailure, match=r"step 8 could not be written.*step 4 is complete"):
            train(config, model_config=small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    monkeypatch.undo()
    assert load_model(tmp_path / "run")[2]["data"]["phase"] == 0
    assert train(replace(config, resume=True), model_config=small).step == 12


def test_c3_failing_run_exits_with_one_and_without_traceback(tmp_path, text_folder, monkeypatch, capsys) -> None:
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nosa_jax.train.metrics.MetricsLog.write", fail)
    sizes = ["--dense.seq-len", "16", "--dense.batch", "1", "--override", "num_layers=1", "embed_dim=16", "ffn_dim=16"]
    code = main(["--data", str(text_folder), "--out", str(tmp_path / "run"), *sizes])
    message = " ".join(capsys.readouterr().err.split())
    assert code == 1
    assert "Traceback" not in message
    assert "No space left on device" in message
    assert "Free space" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_c3_read_only_folder_is_refused(tmp_path, text_folder, capsys) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    assert main(["--data", str(text_folder), "--out", str(tmp_path / "locked" / "run")]) == 2
    assert "cannot be written" in capsys.readouterr().err
