"""`nosa-generate` on released checkpoints: chat, JSONL in and out, stop strings, statistics, and its refusals."""

import io
import json
import sys

import numpy as np
import pytest

from nosa_jax import NosaLM
from nosa_jax.chat import encode_chat
from nosa_jax.errors import InputError
from nosa_jax.infer import Engine, SamplingParams
from nosa_jax.infer.__main__ import main
from nosa_jax.infer.text_stream import StoppingStream
from nosa_jax.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from tests.cli.conftest import CONFIG
from tests.cli.test_generate import CONTEXT, PROMPT, SAMPLING, generate, refusal
from tests.oracle.weights import model_with, random_weights
from tests.weights.test_text import CHATML, spec


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Byte-level, in the published layout."""
    model = model_with(CONFIG, random_weights(CONFIG, 1))
    return model.save_pretrained(tmp_path_factory.mktemp("released") / "model", ByteTokenizer(), max_shard_size="20KB")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """With a vocabulary of words and a chat template."""
    tokenizer = JsonTokenizer(spec(), chat_template=CHATML, stop_ids=[4])
    return model_with(CONFIG, random_weights(CONFIG, 1)).save_pretrained(
        tmp_path_factory.mktemp("chatty") / "model", tokenizer
    )


@pytest.fixture(scope="module")
def expected(released):
    """What the library writes after PROMPT, and its tokens."""
    with Engine(NosaLM.from_pretrained(released), max_batch=1, max_context=64, tokenizer=ByteTokenizer()) as engine:
        params = SamplingParams(max_new_tokens=20, temperature=0.8, top_p=0.9, seed=3)
        (result,) = engine.generate([ByteTokenizer().encode(PROMPT, bos=True)], params)
    return result


def test_text_is_that_of_the_same_model_in_the_other_format(capsys, released, byte_model, expected) -> None:
    argv = ("--prompt", PROMPT, *SAMPLING)
    assert generate(capsys, "--model", str(released), *argv) == expected.text + "\n"
    assert generate(capsys, "--model", str(byte_model), *argv) == expected.text + "\n"


def test_plan_reads_no_weights(capsys, released, monkeypatch) -> None:
    monkeypatch.setattr("nosa_jax.weights.source.read_parameters", None)
    assert "KV pages" in generate(capsys, "--model", str(released), "--plan", "--max-context", "128")


def test_plain_checkpoint_says_that_its_eviction_head_is_new(capsys, tmp_path) -> None:
    from tests.weights.cases import SMALL, write_checkpoint

    weights = {n: a for n, a in random_weights(SMALL, 1).items() if "delta" not in n and not n.endswith(".A")}
    folder = write_checkpoint(tmp_path / "plain", weights)
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text('{"tokens": [1, 2, 3], "max_new_tokens": 1}\n')
    argv = ("--model", str(folder), "--jsonl", str(tokens), "--tokenizer", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(spec())
    assert "add --resident" in refusal(capsys, *argv)
    assert main([*argv, "--resident"]) == 0
    captured = capsys.readouterr()
    assert "nosa-generate: " in captured.err
    assert "has no eviction head" in captured.err
    assert len(json.loads(captured.out)["tokens"]) == 1


# Stop strings.


def test_text_ends_before_a_stop_string(capsys, released, expected) -> None:
    """The string spans tokens; a prompt after it gets the row."""
    stop = expected.text[7:10]
    cut = expected.text[: expected.text.index(stop)]
    argv = ("--model", str(released), *SAMPLING, "--stop", "\u2603", stop)
    assert generate(capsys, *argv, "--prompt", PROMPT) == cut + "\n"
    both = generate(capsys, *argv, "--prompt", PROMPT, PROMPT[:37], "--max-batch", "1")
    assert both.startswith(f"=== prompt 0\n{cut}\n=== prompt 1\n")


def test_stop_is_a_reason_to_finish(released, expected) -> None:
    """The row is given back at once, and tokens hold what was generated until then."""
    tokenizer = ByteTokenizer()
    stop = expected.text[7:10]
    with Engine(NosaLM.from_pretrained(released), max_batch=1, max_context=64, tokenizer=tokenizer) as engine:
        params = SamplingParams(max_new_tokens=20, temperature=0.8, top_p=0.9, seed=3, stop=(stop,))
        prompt = tokenizer.encode(PROMPT, bos=True)
        (result,) = engine.generate([prompt], params)
        assert result.finish_reason == "stop"
        assert result.text == expected.text[: expected.text.index(stop)]
        assert result.tokens == expected.tokens[: len(result.tokens)]
        assert len(result.tokens) < 20
        assert stop in tokenizer.decode(result.tokens)
        assert engine.allocator.n_free == engine.plan.page_groups
    with (
        Engine(NosaLM.from_pretrained(released), max_batch=1, max_context=64) as engine,
        pytest.raises(InputError, match="no tokenizer"),
    ):
        engine.generate([prompt], params)


@pytest.mark.parametrize("stop", [("",), "x", ("a", 1)])
def test_stop_strings_are_checked(stop) -> None:
    with pytest.raises((InputError, TypeError), match="stop"):
        SamplingParams(stop=stop)


def test_stopping_stream_against_plain_search() -> None:
    """Random texts over two letters, so that beginnings of stop strings occur all the time."""
    rng = np.random.default_rng(0)
    tokenizer = ByteTokenizer()
    ended = 0
    for _ in range(300):
        text = "".join(rng.choice(["a", "b", "é"], rng.integers(0, 25)))
        stop = tuple("".join(rng.choice(["a", "b", "é"], rng.integers(1, 5))) for _ in range(rng.integers(0, 3)))
        stream = StoppingStream(tokenizer, stop)
        pieces = []
        for token in tokenizer.encode(text).tolist():
            pieces.append(stream.push(token))
            if stream.stopped:
                break
        shown = "".join(pieces) + stream.flush()
        found = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
        # It ends with the token that completes the first string; of those complete then, the earliest beginning counts.
        end = min(found)[0] if found else len(text)
        begins = [at for s in stop if (at := text[:end].find(s)) >= 0]
        assert shown == stream.text == text[: min(begins, default=len(text))]
        assert stream.stopped == bool(found)
        ended += stream.stopped
    assert 50 < ended < 290


# JSONL.


def write_lines(path, *lines) -> str:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_jsonl_in_and_out(capsys, released, expected, tmp_path) -> None:
    """Each line has its own parameters and id; results come in order, whatever row finished first.

    A stop string ends one row while the other goes on.
    """
    ids = ByteTokenizer().encode(PROMPT, bos=True).tolist()
    file = write_lines(
        tmp_path / "in.jsonl",
        {"id": "first", "prompt": PROMPT},
        "\n",
        {"tokens": ids, "max_new_tokens": 1},
        {"prompt": PROMPT[:9], "max_new_tokens": 0, "id": {"k": 1}},
        {"prompt": PROMPT, "temperature": 0, "top_p": 1, "stop": ["\u2603"]},
        {"prompt": PROMPT, "seed": 5},
        {"prompt": PROMPT, "seed": 5, "stop": "no such text"},
    )
    argv = ("--model", str(released), "--jsonl", file, *SAMPLING, "--max-batch", "2", "--slots", "6")
    results = [json.loads(line) for line in generate(capsys, *argv).splitlines()]
    assert [r["id"] for r in results] == ["first", 1, {"k": 1}, 3, 4, 5]
    assert [len(r["tokens"]) for r in results] == [20, 1, 0, 20, 20, 20]
    assert (results[0]["text"], results[0]["tokens"]) == (expected.text, expected.tokens)
    assert [r["prompt_tokens"] for r in results] == [len(ids), len(ids), 10, *[len(ids)] * 3]
    assert {r["finish_reason"] for r in results} == {"length"}
    assert results[0]["misses"] > 0
    stop = results[4]["text"][3:5]
    write_lines(tmp_path / "in.jsonl", {"prompt": PROMPT}, {"prompt": PROMPT}, {"prompt": PROMPT}, {"prompt": PROMPT},
                {"prompt": PROMPT, "seed": 5, "stop": stop})  # fmt: skip
    stopped = [json.loads(line) for line in generate(capsys, *argv).splitlines()]
    assert {**stopped[0], "id": "first"} == results[0]
    assert stopped[4]["finish_reason"] == "stop"
    assert stopped[4]["text"] == results[4]["text"][: results[4]["text"].index(stop)]
    assert len(stopped[4]["tokens"]) < 20


def test_jsonl_output_file(capsys, released, tmp_path) -> None:
    file = write_lines(tmp_path / "in.jsonl", {"prompt": PROMPT}, {"prompt": "x", "max_new_tokens": 0})
    argv = ("--model", str(released), "--jsonl", file, *SAMPLING, "--max-batch", "1")
    results = [json.loads(line) for line in generate(capsys, *argv).splitlines()]
    out = tmp_path / "out.jsonl"
    assert generate(capsys, *argv, "--output", str(out)) == ""
    assert [json.loads(line) for line in out.read_text().splitlines()] == results


def test_jsonl_of_stdin_and_statistics(capsys, released, monkeypatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(json.dumps({"prompt": PROMPT}).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["--model", str(released), "--jsonl", "-", *SAMPLING, "--stats"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["tokens"]) == 20
    assert "hit rate" in captured.err
    assert "-:1" in captured.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["in.jsonl:2 is no JSON", "Every line"]),
        ("[1]", ["in.jsonl:2 must be a table with one of prompt, messages, tokens"]),
        ('{"id": 1}', ["in.jsonl:2", "has none"]),
        ('{"prompt": "x", "tokens": [1]}', ["in.jsonl:2", "['prompt', 'tokens']"]),
        ('{"prompt": "x", "heat": 1}', ["in.jsonl:2 has the unknown key 'heat'", "temperature"]),
        ('{"prompt": ""}', ["in.jsonl:2: prompt must be a text that is not empty"]),
        ('{"tokens": ["x"]}', ["in.jsonl:2: tokens must be a list of ids"]),
        ('{"tokens": [999999]}', ["in.jsonl:2: ", "999999", "0 .. 258"]),
        ('{"prompt": "x", "temperature": -1}', ["in.jsonl:2: temperature=-1"]),
        ('{"prompt": "x", "temperature": 1' + "0" * 400 + "}", ["in.jsonl:2: temperature=inf"]),
        ('{"prompt": "x", "temperature": "hot"}', ["in.jsonl:2: temperature must be a number, not 'hot'"]),
        ('{"prompt": "x", "top_p": null}', ["in.jsonl:2: top_p must be a number, not None"]),
        ('{"prompt": "x", "top_p": NaN}', ["in.jsonl:2: top_p=nan"]),
        ('{"prompt": "x", "seed": 1.5}', ["in.jsonl:2: seed must be an integer, not 1.5"]),
        ('{"prompt": "x", "max_new_tokens": true}', ["in.jsonl:2: max_new_tokens must be an integer, not True"]),
        ('{"prompt": "x", "stop": 5}', ["in.jsonl:2: stop must be a text or a list of texts, not 5"]),
        ('{"prompt": "x", "stop": null}', ["in.jsonl:2: stop must be a text or a list of texts, not None"]),
        ('{"tokens": [1' + "0" * 30 + "]}", ["in.jsonl:2: tokens must be a list of ids"]),
        ("[" * 100_000, ["in.jsonl:2 is no JSON"]),
        ('{"prompt": "x", "max_new_tokens": 5000}', ["in.jsonl:2 has 2 tokens", "5000"]),
        ('{"messages": [{"role": "user", "content": "x"}]}', ["in.jsonl:2: this tokenizer has no chat template"]),
    ],
)
def test_line_that_cannot_be_used_is_named(capsys, released, tmp_path, line, words) -> None:
    file = write_lines(tmp_path / "in.jsonl", {"prompt": "fine"}, line + "\n")
    message = refusal(capsys, "--model", str(released), "--jsonl", file, "--max-new-tokens", "4")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--jsonl", "/no/file"], ["cannot read the JSONL file '/no/file'"]),
        (["--jsonl", "-", "--prompt-file", "-"], ["stdin (-) can be read once"]),
        (["--prompt", "x", "--output", "out"], ["--output 'out'", "--jsonl"]),
        (["--prompt", "x", "--system", "y"], ["--system has no effect without --chat"]),
        (["--prompt", "x", "--chat-option", "a=1"], ["--chat-option has no effect"]),
        (["--prompt", "x", "--chat"], ["no chat template", "plain prompts"]),
        (["--chat"], ["no chat template"]),
        (["--prompt", "x", "--stop", ""], ["stop=", "not empty"]),
        (["--prompt", "x", "--revision", "v1", "--step", "2"], ["step=2", "leave step out"]),
    ],
)
def test_options_that_make_no_sense(capsys, released, argv, words) -> None:
    message = refusal(capsys, "--model", str(released), *argv)
    for word in words:
        assert word in message


def test_output_that_cannot_be_written(capsys, released, tmp_path) -> None:
    file = write_lines(tmp_path / "in.jsonl", {"prompt": "x"})
    argv = (
        "--model",
        str(released),
        "--jsonl",
        file,
        "--max-new-tokens",
        "1",
        "--output",
        str(tmp_path / "no" / "out"),
    )
    assert "cannot write the output" in refusal(capsys, *argv)


def test_output_is_not_one_of_the_inputs(capsys, released, tmp_path) -> None:
    file = write_lines(tmp_path / "in.jsonl", {"prompt": "x"})
    argv = ("--model", str(released), "--jsonl", file, "--max-new-tokens", "0")
    assert "one of the files that prompts are read from" in refusal(capsys, *argv, "--output", f"{tmp_path}/./in.jsonl")
    assert json.loads((tmp_path / "in.jsonl").read_text()) == {"prompt": "x"}


def test_results_that_cannot_be_written_end_with_a_word(capsys, released, tmp_path, monkeypatch) -> None:
    """A full disk, as a file and as stdout, and no stdout at all."""
    file = write_lines(tmp_path / "in.jsonl", {"prompt": PROMPT, "max_new_tokens": 0})
    argv = ["--model", str(released), *SAMPLING]
    assert main([*argv, "--jsonl", file, "--output", "/dev/full"]) == 1
    assert "cannot write to /dev/full: No space left on device" in capsys.readouterr().err
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main([*argv, "--prompt", PROMPT]) == 1
    assert "cannot write to stdout: No space left on device" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main([*argv, "--plan"]) == 1
    assert "stdout is closed" in capsys.readouterr().err


def test_jsonl_survives_a_stdout_that_is_not_utf8(released, tmp_path, monkeypatch) -> None:
    """Also an id that no encoding can hold."""
    file = write_lines(tmp_path / "in.jsonl", '{"prompt": "x", "id": "\\ud800\\u00e9", "max_new_tokens": 0}\n')
    for encoding in ("ascii", "utf-8"):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["--model", str(released), "--jsonl", file, *SAMPLING]) == 0
        assert json.loads(out.buffer.getvalue())["id"] == "\ud800é"


# Chat.


def reply(folder, messages, **options) -> str:
    """What the library answers."""
    tokenizer = load_tokenizer(folder)
    with Engine(NosaLM.from_pretrained(folder), max_batch=1, max_context=64, tokenizer=tokenizer) as engine:
        params = SamplingParams(max_new_tokens=6, temperature=0.9, seed=1, eos_ids=(2, 4))
        return engine.generate([encode_chat(tokenizer, messages, **options)], params)[0].text


ANSWER = (*CONTEXT, "--max-new-tokens", "6", "--temperature", "0.9", "--seed", "1")


def test_prompt_goes_through_the_chat_template(capsys, chatty) -> None:
    user = {"role": "user", "content": "hello world"}
    argv = ("--model", str(chatty), "--chat", "--prompt", "hello world", *ANSWER)
    assert generate(capsys, *argv) == reply(chatty, [user]) + "\n"
    system = {"role": "system", "content": "world"}
    text = generate(capsys, *argv, "--system", "world", "--chat-option", "enable_thinking=false")
    assert text == reply(chatty, [system, user], enable_thinking=False) + "\n"


def test_messages_of_a_jsonl_line(capsys, chatty, tmp_path) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"},
             {"role": "user", "content": "hello"}]  # fmt: skip
    file = write_lines(tmp_path / "in.jsonl", {"messages": turns})
    (line,) = generate(capsys, "--model", str(chatty), "--jsonl", file, *ANSWER).splitlines()
    assert json.loads(line)["text"] == reply(chatty, turns)


def test_conversation_on_stdin(capsys, chatty, monkeypatch) -> None:
    """Turns build on each other; /new forgets them; a message that no longer fits is left out."""
    first = [{"role": "user", "content": "hello"}]
    answer = reply(chatty, first)
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "world"}]
    lines = ["hello", "", "world", "hello " * 200, "/new", "hello"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["--model", str(chatty), "--chat", *ANSWER, "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{answer}\n{reply(chatty, second)}\n{answer}\n"
    assert captured.err.count("nosa-generate: ") == 1
    assert "the plan holds 64 per row" in captured.err
    assert "message 2" in captured.err


def test_conversation_without_or_with_a_strange_input(capsys, chatty, monkeypatch) -> None:
    argv = ["--model", str(chatty), "--chat", *ANSWER]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        assert "stdin is closed" in refusal(capsys, *argv)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\nhello\n"), encoding="utf-8"))
    assert generate(capsys, *argv) == reply(chatty, [{"role": "user", "content": "hello"}]) + "\n"


def test_chat_option_of_the_conversation_s_name(capsys, chatty) -> None:
    argv = ("--model", str(chatty), "--chat", "--prompt", "hello", *ANSWER, "--chat-option", "messages=1")
    assert "`messages` is the name of the conversation" in refusal(capsys, *argv)
