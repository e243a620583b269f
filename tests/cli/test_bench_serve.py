"""nosa-bench serve as a user calls it, on tiny models."""

import json
import re
import time
from pathlib import Path

import jax
import pytest

from nosa_jax.infer import bench, bench_serve
from nosa_jax.offload import OutOfPagesError

TINY = ("--model", "tiny", "--layers", "1")


def run(monkeypatch, capsys, *arguments: str | Path) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["nosa-bench", "serve", *map(str, arguments)])
    code = bench.main()
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def strict(text: str) -> dict:
    """JSON as the standard has it, without NaN."""

    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.slow
def test_the_same_requests_are_served_by_every_system(monkeypatch, capsys, tmp_path, byte_model):
    """R1, O1: over pages that are too few for all rows, tokens are those of an engine without a host pool."""
    book = tmp_path / "book.txt"
    book.write_bytes(bytes(range(1, 120)) * 3)
    code, out, err = run(
        monkeypatch, capsys, "--model", byte_model, "--systems", "nosa-c", "nosa-resident", "dense", "--requests", "9",
        "--rate", "50", "--rows", "3", "--prompt-tokens", "30", "60", "--new-tokens", "3", "12", "--prompt-file", book,
        "--host-budget", "20KiB", "--steps-per-dispatch", "2", "--prefill-chunk", "32", "--out", tmp_path,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert f"9 requests, 50 a second within 0.2 s, with prompts of 30 to 58 tokens (stretches of {book};" in out
    assert f"the weights of {byte_model}, which select" in out
    report = strict((tmp_path / "serving.json").read_text())
    assert report["left_out"] == []
    assert report["requests"] in out
    offloaded, resident, dense = report["systems"]
    assert [s["system"] for s in report["systems"]] == ["nosa-c", "nosa-resident", "dense"]
    assert (offloaded["slots"], resident["slots"], dense["slots"]) == (6, None, None)
    assert (offloaded["same_tokens"], resident["same_tokens"], dense["same_tokens"]) == (None, 9, None)
    for system in report["systems"]:
        metrics = system["metrics"]
        assert (metrics["submitted"], metrics["completed"], system["failures"]) == (9, 9, [])
        assert metrics["time_to_first_token"]["count"] == 9
        assert metrics["generated_tokens"] == pytest.approx(system["tokens_per_second"] * system["seconds"])
        assert system["rows"] == 3
    assert offloaded["metrics"]["total"]["misses"] > 0 == resident["metrics"]["total"]["misses"]
    assert offloaded["metrics"]["pages_total"] == 40 < 3 * 18
    assert dense["metrics"]["min_locality"] is None
    (line,) = (line for line in out.splitlines() if re.match(r"│ +nosa-resident", line))
    assert "9 of 9" in line


@pytest.mark.slow
def test_systems_that_do_not_fit_are_left_out_with_the_reason(monkeypatch, capsys, tmp_path):
    """A budget too small for dense attention, and memory that the device does not have; the rest is served."""

    def engine(model, **options):
        if options["attention"] == "infllmv2":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return made(model, **options)

    made = bench_serve.Engine
    monkeypatch.setattr(bench_serve, "Engine", engine)
    monkeypatch.setattr(made, "warm_up", lambda self, sampling: 0.0)  # two requests need few of the programs
    code, out, _ = run(
        monkeypatch, capsys, *TINY, "--systems", "dense", "infllmv2-c", "nosa-c", "--requests", "2", "--rows", "8",
        "--prompt-tokens", "20", "2038", "--new-tokens", "2", "2", "--prefill-chunk", "64",
        "--device-budget", "20MiB", "--host-budget", "3MiB", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0
    report = strict((tmp_path / "serving.json").read_text())
    assert [s["system"] for s in report["systems"]] == ["nosa-c"]
    assert report["systems"][0]["planned_bytes"] < 22 * 2**20  # weights of 1 MiB included
    assert re.match(r"dense: the plan needs .* bytes of device memory", report["left_out"][0])
    assert report["left_out"][1] == "infllmv2-c: out of device memory"
    for line in report["left_out"]:
        assert f"{line}; left out" in out


@pytest.mark.parametrize(
    ("failures", "code"), [([[], []], 0), ([[], [ValueError("no room")]], 1), ([], 1)], ids=["all", "one", "nothing"]
)
def test_the_exit_status_says_whether_all_was_served(monkeypatch, capsys, failures, code):
    class Served:
        def __init__(self, failures):
            self.failures = failures

    results = [type("Result", (), {"system": "nosa", "served": Served(its)}) for its in failures]
    monkeypatch.setattr(bench_serve, "run", lambda _: results)
    monkeypatch.setattr(bench_serve, "table", lambda _: "a table")
    assert run(monkeypatch, capsys)[0] == code


def test_what_a_request_needs_of_the_host_is_said(monkeypatch, capsys):
    def serve_with(*_):
        raise OutOfPagesError("too few pages")

    monkeypatch.setattr(bench_serve, "_serve_with", serve_with)
    code, out, _ = run(monkeypatch, capsys, *TINY, "--systems", "nosa")
    assert code == 1
    assert "nosa: too few pages; left out" in out


def test_a_reader_that_has_enough_ends_it_quietly(monkeypatch, capsys):
    """As `| head` does."""

    def gone(_):
        raise BrokenPipeError

    discarded = []
    monkeypatch.setattr(bench_serve, "run", gone)
    monkeypatch.setattr(bench, "discard_output", lambda: discarded.append(True))
    assert run(monkeypatch, capsys) == (1, "", "")
    assert discarded == [True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "magic"], r"unknown systems magic; known: dense, infllmv2"),
        (["--systems"], r"--systems is empty; give at least one"),
        (["--requests", "0"], r"--requests 0 must be at least 1"),
        (["--rate", "0"], r"--rate 0\.0 must be a positive number of requests a second; without, all come at once"),
        (["--rate", "nan"], r"--rate nan must be a positive number"),
        (["--prompt-tokens", "9", "3"], r"--prompt-tokens 9 3 must be two numbers, 1 <= least <= most"),
        (["--new-tokens", "0", "3"], r"--new-tokens 0 3 must be two numbers"),
        (["--prompt-tokens", "9", "16300"], r"max_context=16556 must lie in 1 \.\. 16384"),
        (["--rows", "-1"], r"--rows -1 must be at least 1, or 0 for as many as fit"),
        (["--rows", "0"], r"--rows 0 takes as many as fit; give the --device-budget"),
        (["--device-budget", "lots"], r"'lots' is no memory size"),
        (["--host-budget", "lots"], r"'lots' is no memory size"),
        (["--prefill-chunk", "0"], r"--prefill-chunk 0 must be at least 1"),
        (["--steps-per-dispatch", "0"], r"steps_per_dispatch=0 must be a whole number"),
        (["--tokenizer", "bytes"], r"--tokenizer 'bytes' is for the text of --prompt-file; give that too"),
        (["--prompt-file", "none.txt"], r"cannot read the prompt file 'none\.txt'"),
        (["--out", "/proc/x"], r"cannot write to '/proc/x': No such .* Give --out a place"),
    ],
)
def test_what_cannot_be_served_is_said(monkeypatch, capsys, arguments, message):
    """Before a model is made."""
    start = time.perf_counter()
    code, _, err = run(monkeypatch, capsys, *TINY, *arguments)
    assert code == 2
    assert err.startswith("nosa-bench: ")
    assert re.search(message, err), err
    assert time.perf_counter() - start < 20
