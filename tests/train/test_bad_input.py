"""Bad input on the command line: one paragraph, exit status 2, no traceback, nothing written."""

import json
import os
from pathlib import Path

import pytest
import tokenizers
from flax import nnx

from nosa_jax.checkpoint import export_model
from nosa_jax.config import NosaConfig
from nosa_jax.model import NosaLM
from nosa_jax.tokenizer import ByteTokenizer
from nosa_jax.train.__main__ import main


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch) -> None:
    """Messages in a box are not broken over lines."""
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def word_tokenizer(tmp_path) -> Path:
    words = {f"w{i}": i for i in range(500)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def _refused(capsys, out: Path, *argv: str) -> str:
    assert main([*argv, "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert not out.exists()
    return " ".join(message.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--data", "/no/such/path"], ["/no/such/path", "does not exist", "Give a file"]),
        (["--dense.seq-len", "20000"], ["seq_len=20000", "max_context=16384", "Shorten it"]),
        (["--dense.batch", "3", "--optimizer.accumulate", "2"], ["batch=3", "accumulate=2"]),
        (["--override", "widht=3"], ["widht=3", "FIELD=VALUE", "embed_dim"]),
        (["--override", "head_dim=7"], ["head_dim", "even"]),
        (["--override", "local_blocks=1", "pool_window=64"], ["local_blocks=1", "at least"]),
        (["--tokenizer", "/no/tokenizer.json"], ["/no/tokenizer.json", "bytes"]),
        (["--dense.steps", "0", "--nosa.steps", "0"], ["leave nothing to train"]),
        (["--optimizer.learning-rate", "-1"], ["learning_rate=-1.0", "positive"]),
        (["--freeze", "*.gamma"], ["'*.gamma'", "matches no parameter"]),
        (["--validation", "1.5"], ["validation=1.5", "between 0 and 1"]),
        (["--init-from", "/no/run"], ["/no/run", "no checkpoint folder"]),
        (["--preset", "huge"], ["huge"]),
        (["--max-bytes", "10"], ["max_bytes=10", "Raise it"]),
    ],
)
def test_bad_value_is_named_with_its_limit_and_remedy(capsys, tmp_path, argv, words) -> None:
    message = _refused(capsys, tmp_path / "run", *argv)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--dense.seq-len", "0", "dense: seq_len=0 must be at least 1"),
        ("--nosa.batch", "-2", "nosa: batch=-2 must be at least 1"),
        ("--optimizer.warmup-steps", "-1", "optimizer: warmup_steps=-1 must be at least 0"),
        ("--optimizer.weight-decay", "-0.5", "optimizer: weight_decay=-0.5 must be at least 0"),
        ("--optimizer.weight-decay", "nan", "optimizer: weight_decay=nan must be at least 0 and finite"),
        ("--max-bytes", "0", "max_bytes=0 must be at least 1"),
    ],
)
def test_only_the_value_at_fault_is_named(capsys, tmp_path, option, value, words) -> None:
    message = _refused(capsys, tmp_path / "run", option, value)
    assert words in message
    assert message.count("=") == 1


def test_tokenizer_larger_than_the_vocabulary(capsys, tmp_path, word_tokenizer) -> None:
    message = _refused(capsys, tmp_path / "run", "--tokenizer", str(word_tokenizer))
    assert "has 500 tokens" in message
    assert "vocab_size=259" in message
    assert "--override vocab_size=500" in message


def test_folder_without_text(capsys, tmp_path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG\0\0")
    assert "holds no text" in _refused(capsys, tmp_path / "run", "--data", str(tmp_path / "pictures"))


def test_jsonl_with_another_key(capsys, tmp_path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"body": "text"}))
    message = _refused(capsys, tmp_path / "run", "--data", str(tmp_path / "d.jsonl"))
    assert "d.jsonl:1" in message
    assert "--text-field" in message


def test_out_that_cannot_be_written(capsys, tmp_path, text_folder) -> None:
    (tmp_path / "file").write_text("")
    message = _refused(capsys, tmp_path / "file" / "run", "--data", str(text_folder))
    assert "cannot be written" in message
    assert "Give a folder" in message


@pytest.mark.parametrize("option", ["--out", "--export"])
def test_a_folder_from_which_orbax_could_not_read(capsys, tmp_path, text_folder, option) -> None:
    path = tmp_path / "run [1]"
    given = [] if option == "--out" else ["--export", str(path)]
    message = _refused(capsys, path if option == "--out" else tmp_path / "run", "--data", str(text_folder), *given)
    assert f"{str(path)!r} has a bracket in its name" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("export", "words"),
    [
        ("full", "already exists and is not an empty folder"),
        ("file", "already exists and is not an empty folder"),
        ("file/export", "is no folder that you may write to"),
        ("file/a/b", "is no folder that you may write to"),
        (".", "one above it"),
        ("run", "is the folder of the run"),
        ("link", "is the folder of the run"),
        ("run/checkpoints", "among the run's own files"),
        ("run/checkpoints/7", "among the run's own files"),
        ("run/tensorboard", "among the run's own files"),
    ],
)
def test_export_that_cannot_be_written_or_would_spoil_the_run(capsys, tmp_path, text_folder, export, words) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    path = str(tmp_path / export)
    message = _refused(capsys, tmp_path / "run", "--data", str(text_folder), "--export", path)
    assert f"export={path!r}" in message
    assert words in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full", "link"]


@pytest.fixture
def exported(tmp_path, small) -> Path:
    return export_model(tmp_path / "export", NosaLM(small, rngs=nnx.Rngs(0)), ByteTokenizer())


def _overrides(small) -> list[str]:
    default = NosaConfig.tiny().to_dict()
    return [f"{name}={value}" for name, value in small.to_dict().items() if value != default[name]]


@pytest.mark.parametrize("resume", [(), ("--resume",)])
@pytest.mark.parametrize("holds", ["config.json", "model-1-of-2.safetensors", "params, meta"])
def test_out_that_holds_a_checkpoint(capsys, tmp_path, text_folder, exported, holds, resume) -> None:
    """The run's steps would be written beside it and never be read."""
    out = exported
    if holds != "params, meta":
        out = tmp_path / "released"
        out.mkdir()
        (out / holds).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert (
        main(["--data", str(text_folder), "--out", str(out), "--dense.steps", "1", "--nosa.steps", "0", *resume]) == 2
    )
    message = " ".join(capsys.readouterr().err.split())
    assert f"out={str(out)!r} holds a checkpoint ({holds}), which would be read instead of the run. Give" in message
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_damaged_weights_to_start_from(capsys, tmp_path, text_folder, exported, small, keep) -> None:
    for path in exported.glob("params/**/d/*"):
        os.truncate(path, int(path.stat().st_size * keep))
    argv = ("--data", str(text_folder), "--init-from", str(exported), "--override", *_overrides(small))
    message = _refused(capsys, tmp_path / "run", *argv, "--dense.seq-len", "32", "--nosa.seq-len", "32")
    assert f"the parameters of {str(exported)!r} cannot be read" in message


def test_weights_to_start_from_with_an_unknown_config(capsys, tmp_path, text_folder, exported) -> None:
    file = exported / "meta" / "data.json"
    meta = json.loads(file.read_text())
    file.write_text(json.dumps(meta | {"config": meta["config"] | {"colour": 3}}))
    message = _refused(capsys, tmp_path / "run", "--data", str(text_folder), "--init-from", str(exported))
    assert f"the config in {str(exported)!r} cannot be used: unknown config keys: colour" in message


def test_help_is_not_an_error(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--data", "stdlib", "--dense.seq-len", "--optimizer.learning-rate", "--train-only"):
        assert word in text
