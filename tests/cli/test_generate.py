"""`nosa-generate`: what it prints, and how it refuses."""

import json
import re

import numpy as np
import pytest

from nosa_jax.checkpoint import load_model
from nosa_jax.errors import InputError
from nosa_jax.infer import Engine, SamplingParams
from nosa_jax.infer.__main__ import main
from nosa_jax.infer.text_stream import TextStream
from nosa_jax.tokenizer import ByteTokenizer
from tests.cli.conftest import CONFIG

PROMPT = "def read(path):\n    return open(path)\n"  # more than the six blocks that a step selects
CONTEXT = ("--max-context", "64")  # engines of one layout share what was compiled
SAMPLING = (*CONTEXT, "--max-new-tokens", "20", "--temperature", "0.8", "--top-p", "0.9", "--seed", "3", "--ignore-eos")


def generate(capsys, *argv: str) -> str:
    """What a run that must succeed writes to stdout."""
    code = main(argv)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def refusal(capsys, *argv: str) -> str:
    """The one paragraph on stderr of a run that must be refused."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return " ".join(captured.err.split())


@pytest.fixture(scope="module")
def expected(byte_model):
    """What the library writes after PROMPT."""
    model, tokenizer, _ = load_model(byte_model)
    with Engine(model, max_batch=1, max_context=64, tokenizer=tokenizer) as engine:
        params = SamplingParams(max_new_tokens=20, temperature=0.8, top_p=0.9, seed=3)
        (result,) = engine.generate([tokenizer.encode(PROMPT, bos=True)], params)
    return result.text


@pytest.mark.parametrize(
    "options", [(), ("--resident",), ("--steps-per-dispatch", "8"), ("--prefill-chunk", "8")], ids=" ".join
)
def test_streamed_text_is_that_of_the_library(capsys, byte_model, expected, options):
    """Written piece by piece, with the blocks in host memory or all on the device."""
    assert generate(capsys, "--model", str(byte_model), "--prompt", PROMPT, *SAMPLING, *options) == expected + "\n"


def test_several_prompts_from_text_and_files(capsys, byte_model, expected, tmp_path):
    """In the order given, whatever row they were decoded in; the first is written as if it were alone."""
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9 " * 7)  # no UTF-8: bytes take anything
    argv = ("--model", str(byte_model), "--prompt", PROMPT, PROMPT[:37], "--prompt-file", str(file))
    text = generate(capsys, *argv, *SAMPLING, "--max-batch", "2", "--slots", "6")  # the layout of JSONL tests
    assert re.findall("^=== (.*)$", text, re.MULTILINE) == ["prompt 0", "prompt 1", repr(str(file))]
    assert text.startswith(f"=== prompt 0\n{expected}\n=== prompt 1\n")


def test_plan_is_printed_and_nothing_is_read_or_made(capsys, byte_model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("nosa_jax.weights.source.load_model", None)
        patch.setattr("nosa_jax.infer.__main__.Engine", None)
        argv = ("--model", str(byte_model), "--plan", "--max-context", "128", "--device-budget", "20MiB")
        text = generate(capsys, *argv)
    model, _, _ = load_model(byte_model)
    engine = Engine(model, max_batch=1, max_context=128, device_budget="20MiB")
    engine.close()
    assert text == f"{engine.plan}\n"
    assert "32 blocks x 1 layers x 1 KV heads" in text


def test_statistics_go_to_stderr(capsys, byte_model):
    assert main(["--model", str(byte_model), "--prompt", PROMPT, *SAMPLING, "--stats"]) == 0
    report = " ".join(capsys.readouterr().err.split())
    for words in ("20 tokens in", "length", "hit rate", "12 slots", "guaranteed: locality 0.6667", "1 of 6 blocks"):
        assert words in report


def test_model_without_a_tokenizer(capsys, nameless_model):
    argv = ("--model", str(nameless_model), "--prompt", PROMPT, *SAMPLING)
    assert "Name one with --tokenizer" in refusal(capsys, *argv)
    generate(capsys, *argv, "--tokenizer", "bytes")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["nothing to continue", "--prompt-file"]),
        (["--prompt", ""], ["prompt 0 is empty", "at least one character"]),
        (["--prompt", "x", "y" * 200, "--max-new-tokens", "100"], ["prompt 1 has 201 tokens", "100", "256", "most 55"]),
        (["--prompt", "x" * 40, "--max-context", "64"], ["prompt 0 has 41 tokens", "64 (--max-context)", "at most 23"]),
        (["--prompt", "x", "--max-context", "512"], ["max_context=512", "1 .. 256"]),
        (["--prompt", "x", "--max-new-tokens", "-1"], ["max_new_tokens=-1", "at least 0"]),
        (["--prompt", "x", "--temperature", "nan"], ["temperature=nan", "at least 0"]),
        (["--prompt", "x", "--top-p", "0"], ["top_p=0.0", "at most 1"]),
        (["--prompt", "x", "--slots", "5"], ["slots=5", "at least 6"]),
        (["--prompt", "x", "--device-budget", "lots"], ["'lots'", "20GiB"]),
        (
            ["--prompt", "x", "--device-budget", "1KiB"],
            ["needs", "budget is 1,024", "Raise device_budget, or lower max_batch"],
        ),
        (["--prompt", "x", "--host-budget", "1KiB"], ["host", "1,024", "needs"]),
        (["--prompt", "x" * 40, "--host-budget", "4KiB"], ["prompt 0 needs 43 blocks", "22,016 bytes", "4,096 bytes"]),
        (["--prompt", "x", "--max-batch", "0"], ["max_batch=0", "at least 1"]),
        (["--prompt", "x", "--prefill-chunk", "0"], ["prefill_chunk=0", "at least 1"]),
        (["--prompt", "x", "--steps-per-dispatch", "0"], ["steps_per_dispatch=0", "from 1 to max_context=130"]),
        (["--prompt", "x", "--attention", "dense"], ["'dense'", "--resident"]),
        (["--prompt", "x", "--resident", "--slots", "20"], ["--slots 20", "--resident", "leave one of them out"]),
        (["--prompt", "x", "--step", "3"], ["step=3", "leave step out"]),
        (["--prompt", "x", "--tokenizer", "/no/file"], ["/no/file", "tokenizer.json"]),
        (["--prompt-file", "/no/file"], ["/no/file", "No such file", "readable"]),
        (["--prompt", "x", "--attention", "sparse"], ["sparse"]),
    ],
)
def test_bad_value_is_named_with_its_limit_and_remedy(capsys, byte_model, argv, words):
    message = refusal(capsys, "--model", str(byte_model), *argv)
    for word in words:
        assert word in message


def test_more_host_memory_than_there_is(capsys, byte_model, monkeypatch):
    monkeypatch.setattr("nosa_jax.ffi._cpu.available_bytes", lambda: 10_000)
    message = refusal(capsys, "--model", str(byte_model), "--prompt", "x" * 40)
    assert "22016 bytes" in message
    assert "10000 bytes" in message


def test_folder_that_is_missing_or_holds_no_checkpoint(capsys, tmp_path):
    assert "no checkpoint folder" in refusal(capsys, "--model", "/no/model", "--prompt", "x")
    message = refusal(capsys, "--model", str(tmp_path), "--prompt", "x")
    assert "holds no complete checkpoint" in message
    assert "or a folder with config.json and safetensors files" in message
    assert "the model's name is empty" in refusal(capsys, "--model", "", "--prompt", "x")


def test_parameters_of_another_config(capsys, mixed_up_model):
    message = refusal(capsys, "--model", str(mixed_up_model), "--prompt", "x")
    assert "ffn.down_weight_fd" in message
    assert "[48, 32], wanted float32[64, 32]" in message


@pytest.mark.parametrize(
    ("pattern", "keep", "what"),
    [
        ("params/**/d/*", 0.0, "the parameters of"),
        ("params/**/d/*", 0.5, "the parameters of"),
        ("params/ocdbt.process_0/d/*", 0.9, "the parameters of"),  # described in full, but arrays are cut off
        ("params/manifest.ocdbt", 0.0, "the parameters of"),
        ("meta/data.json", 0.5, "the item 'meta' of"),
    ],
)
def test_damaged_files_of_a_checkpoint(capsys, damaged_model, pattern, keep, what):
    model = damaged_model(pattern, keep)
    message = refusal(capsys, "--model", str(model), "--prompt", "x")
    assert f"{what} {str(model)!r} cannot be read: " in message
    assert "give another one" in message
    with pytest.raises(InputError, match="cannot be read"):
        load_model(model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {"colour": 3}}, ["the config in", "unknown config keys: colour"]),
        ({"config": {}}, ["the config in", "missing config keys: embed_dim"]),
        ({"config": [1]}, ["the config in", "[1] instead of a table"]),
        ({"config": {**CONFIG.to_dict(), "num_heads": "two"}}, ["the config in", "cannot be used"]),
        ({"tokenizer": {"kind": "tokenizer.json"}}, ["the tokenizer in", "spec"]),
        ({"tokenizer": {"kind": "runes"}}, ["unknown tokenizer kind 'runes'"]),
        ({"format": 2}, ["has format 2", "this version reads 1"]),
        (None, ["has format None"]),
    ],
)
def test_description_that_this_version_cannot_use(capsys, damaged_model, changes, words):
    model = damaged_model("meta/data.json", 1.0)
    file = model / "meta" / "data.json"
    file.write_text(json.dumps([1] if changes is None else json.loads(file.read_text()) | changes))
    message = refusal(capsys, "--model", str(model), "--prompt", "x")
    for word in words:
        assert word in message
    with pytest.raises(InputError):
        load_model(model)


def test_bytes_that_are_no_text_for_a_tokenizer(capsys, word_model, tmp_path):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    message = refusal(capsys, "--model", str(word_model), "--prompt-file", str(tmp_path / "latin1.txt"))
    assert "byte 0xe9 at offset 3" in message
    assert "latin1.txt" in message
    assert "\ufffd" not in generate(capsys, "--model", str(word_model), "--prompt", "w2 w3 " * 19, *SAMPLING)


def test_interrupted(capsys, byte_model, monkeypatch):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupt)
    assert main(["--model", str(byte_model), "--prompt", "x"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_help_is_not_an_error(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--prompt-file", "--device-budget", "--resident", "--plan", "--stats"):
        assert word in text


def test_stream_never_shows_half_a_character():
    """Random bytes between whole characters: the pieces join to the text, and no piece ends within a character."""
    rng = np.random.default_rng(0)
    whole = "aé€😀".encode() * 5
    noise = rng.integers(0, 256, 200, np.uint8).tobytes()
    tokenizer = ByteTokenizer()
    for data in (whole, whole + noise + whole, noise):
        stream = TextStream(tokenizer)
        pieces = [stream.push(byte) for byte in data]
        assert not any(p.endswith("\ufffd") for p in pieces)
        assert "".join(pieces) + stream.flush() == tokenizer.decode(list(data))


def test_config_selects_fewer_blocks_than_the_prompt_has():
    assert CONFIG.num_blocks(len(PROMPT)) > CONFIG.budget.total
