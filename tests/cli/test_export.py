"""`nosa-export`: from every format into every other, and how it refuses."""

import dataclasses
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from nosa_jax import NosaLM
from nosa_jax.checkpoint import load_model, make_meta, split_model
from nosa_jax.export import main
from nosa_jax.folders import write_folder
from nosa_jax.tokenizer import ByteTokenizer
from nosa_jax.train import CheckpointStore, Optimizer
from nosa_jax.train.checkpoints import abstract_like
from nosa_jax.train.optimizer import make_optimizer
from nosa_jax.train.sharding import make_mesh
from nosa_jax.train.step import init_state
from nosa_jax.weights import find_model
from tests.cli.conftest import CONFIG
from tests.weights.cases import assert_same_bits, params_of


def export(capsys, *argv: str) -> str:
    """What a run that must succeed writes to stdout."""
    code = main(argv)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def refusal(capsys, *argv: str, code: int = 2) -> str:
    """The one paragraph on stderr of a run that must fail."""
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return " ".join(captured.err.split())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, object]:
    """A training run's folder with two steps, and the state of the last one."""
    folder = tmp_path_factory.mktemp("run") / "run"
    names = frozenset(split_model(NosaLM.from_config(CONFIG))[1])
    state = init_state(CONFIG, make_optimizer(Optimizer(), 10), names, 0, make_mesh(jax.devices()[:1]))
    with CheckpointStore(folder / "checkpoints") as store:
        for step in (3, 7):
            state = dataclasses.replace(state, step=state.step * 0 + step)
            store.save(state, make_meta(CONFIG, ByteTokenizer()))
    return folder, state


def test_round_trip_through_both_formats(capsys, byte_model, tmp_path) -> None:
    """orbax to safetensors to orbax: the same bits, config and tokenizer."""
    original, _, _ = load_model(byte_model)
    first, second = str(tmp_path / "released"), str(tmp_path / "orbax")
    assert export(capsys, "safetensors", str(byte_model), first, "--max-shard-size", "20KB") == f"{first}\n"
    assert len(list(Path(first).glob("*.safetensors"))) > 1
    assert export(capsys, "orbax", first, second) == f"{second}\n"
    for path in (first, second):
        assert_same_bits(NosaLM.from_pretrained(path), original)
        assert find_model(path).config == CONFIG
        assert isinstance(find_model(path).tokenizer, ByteTokenizer)


def test_dtype_is_converted_when_asked_for(capsys, byte_model, tmp_path) -> None:
    out = str(tmp_path / "half")
    export(capsys, "orbax", str(byte_model), out, "--dtype", "bfloat16")
    assert find_model(out).config == CONFIG.replace(dtype="bfloat16", param_dtype="bfloat16")
    assert {str(p.dtype) for p in params_of(NosaLM.from_pretrained(out)).values()} == {"bfloat16"}


def test_step_of_a_run(capsys, run, tmp_path) -> None:
    folder, state = run
    export(capsys, "safetensors", str(folder), str(tmp_path / "last"))
    export(capsys, "orbax", str(folder), str(tmp_path / "early"), "--step", "3")
    for name in ("last", "early"):
        params = params_of(NosaLM.from_pretrained(tmp_path / name))
        for key, value in state.params.items():
            np.testing.assert_array_equal(params[key], value)


def test_c1_optimizer_state_goes_along_when_asked_for(capsys, run, tmp_path) -> None:
    """The copy restores like the run itself: every leaf bit for bit."""
    folder, state = run
    out = tmp_path / "copy"
    export(capsys, "orbax", str(folder), str(out), "--optimizer")
    with CheckpointStore(out / "checkpoints") as store:
        assert store.steps == [7]
        again, meta = store.restore(abstract_like(state))
    assert meta["tokenizer"] == {"kind": "bytes"}
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    export(capsys, "orbax", str(folder), str(tmp_path / "alone"))
    assert not (tmp_path / "alone" / "training").exists()


def test_refusals(capsys, byte_model, run, tmp_path) -> None:
    out = str(tmp_path / "out")
    assert "no checkpoint folder" in refusal(capsys, "orbax", "/no/model", out)
    assert "already exists" in refusal(capsys, "orbax", str(byte_model), str(byte_model))
    assert "holds no optimizer state" in refusal(capsys, "orbax", str(byte_model), out, "--optimizer")
    assert "--dtype bfloat16 cannot" in refusal(capsys, "orbax", str(run[0]), out, "--optimizer", "--dtype", "bfloat16")
    assert "no checkpoint of step=5; it has 3, 7" in refusal(capsys, "orbax", str(run[0]), out, "--step", "5")
    assert "max_shard_size='lots'" in refusal(capsys, "safetensors", str(byte_model), out, "--max-shard-size", "lots")
    assert refusal(capsys, "parquet", str(byte_model), out)
    assert not Path(out).exists()


@pytest.mark.parametrize("parent", ["/proc", "/proc/no/folder", "a-file", "a-file/folder"])
def test_place_that_cannot_be_written_is_refused_before_the_source_is_read(
    capsys, tmp_path, monkeypatch, parent
) -> None:
    (tmp_path / "a-file").touch()
    monkeypatch.chdir(tmp_path)
    message = refusal(capsys, "safetensors", "/no/model", f"{parent}/x")
    assert message.startswith(f"nosa-export: '{parent}/x' cannot be written: ")
    assert message.endswith(". Give a folder on a disk that you may write to.")
    assert "unfinished" not in message


def test_place_from_which_orbax_could_not_read_is_refused(capsys, tmp_path) -> None:
    message = refusal(capsys, "orbax", "/no/model", str(tmp_path / "a [b]"))
    assert "has a bracket in its name" in message


def test_place_is_left_as_it_was(capsys, tmp_path) -> None:
    """Trying it leaves nothing behind where the source cannot be read."""
    assert "no checkpoint folder" in refusal(capsys, "orbax", "/no/model", str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [("", "out"), ("/no/model", "")])
def test_empty_names(capsys, tmp_path, monkeypatch, argv) -> None:
    monkeypatch.chdir(tmp_path)
    assert "name is empty" in refusal(capsys, "orbax", *argv)


def test_disk_that_fills_up(capsys, byte_model, tmp_path, monkeypatch) -> None:
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nosa_jax.weights.writer.save_file", full)
    message = refusal(capsys, "safetensors", str(byte_model), str(tmp_path / "out"), code=1)
    assert "could not be written" in message
    assert "No space left on device" in message
    assert list(tmp_path.iterdir()) == []


def test_interrupted(capsys, byte_model, tmp_path, monkeypatch) -> None:
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("nosa_jax.weights.writer.save_file", interrupt)
    assert main(["safetensors", str(byte_model), str(tmp_path / "out")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["orbax", "safetensors"])
def test_file_that_cannot_be_written_whole(capsys, byte_model, tmp_path, kind) -> None:
    """The system refuses bytes beyond a limit, as a full disk does; nothing is left of the folder."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        message = refusal(capsys, kind, str(byte_model), str(tmp_path / "out"), code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "could not be written" in message
    assert "File too large" in message
    assert list(tmp_path.iterdir()) == []


def test_a_thread_that_goes_on_writing_leaves_nothing_behind(tmp_path) -> None:
    """A write fails as soon as one of its files does, while threads are still writing the others."""
    stop = time.monotonic() + 0.4

    def go_on(folder: Path) -> None:
        while time.monotonic() < stop:
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
                (folder / "late").write_bytes(b"x")

    def write(folder: Path) -> None:
        threads.append(threading.Thread(target=go_on, args=(folder / "item",)))
        threads[0].start()
        raise OSError("File too large")

    threads: list[threading.Thread] = []
    with pytest.raises(OSError, match="File too large"):
        write_folder(tmp_path / "out", write)
    threads[0].join()
    assert list(tmp_path.iterdir()) == []


def test_orbax_export_interrupted_while_threads_write(capsys, byte_model, tmp_path, monkeypatch) -> None:
    """They are waited for, so that nothing of the folder is left."""
    start = ocp.save_checkpointables_async

    class Interrupted:
        def __init__(self, *args):
            self.saving, self.asked = start(*args), 0

        def result(self):
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt
            self.saving.result()

    monkeypatch.setattr(ocp, "save_checkpointables_async", Interrupted)
    assert main(["orbax", str(byte_model), str(tmp_path / "out")]) == 130
    assert "no unfinished folder was left behind" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "orbax" in text
    assert "safetensors" in text
