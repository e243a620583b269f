"""nosa-bench serve as a user calls it, on tiny models."""

import json
import re
import time
from pathlib import Path

import jax
import pytest
from rich.table import Table

from nosa_jax.infer import bench, bench_serve
from nosa_jax.infer.metrics import Recorder
from nosa_jax.infer.traffic import Served

TINY = ("--model", "tiny", "--layers", "1")
NOTHING = dict.fromkeys(("waiting", "reading", "decoding", "pages_free", "pages_total"), 0)


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
    assert re.search(r"9 requests, 50 a second within 0\.\d s, with prompts of \d+ to \d+ tokens \(stretches of ", out)
    assert str(book) in out
    assert f"the weights of {byte_model}, which select" in out
    report = strict((tmp_path / "serving.json").read_text())
    assert report["left_out"] == []
    assert report["requests"] in out
    offloaded, resident, dense = report["systems"]
    asked = int(re.search(r" new ones \((\d+) in all\)", out)[1])  # ids that would end one sooner are not asked for
    assert [s["system"] for s in report["systems"]] == ["nosa-c", "nosa-resident", "dense"]
    assert (offloaded["slots"], resident["slots"], dense["slots"]) == (6, None, None)
    assert "nosa-c: 3 rows, 6 slots," in out
    assert "dense: 3 rows, every block in a slot, so none is moved," in out
    assert [(s["same_as"], s["same_tokens"]) for s in report["systems"]] == [(None, None), ("nosa-c", 9), (None, None)]
    assert report["options"]["prompt_tokens"] == [30, 60]
    for system in report["systems"]:
        metrics = system["metrics"]
        assert (metrics["submitted"], metrics["completed"], system["failures"]) == (9, 9, [])
        assert metrics["time_to_first_token"]["count"] == 9
        assert metrics["generated_tokens"] == asked
        assert 0 < metrics["busy_seconds"] <= 1.05 * system["seconds"]
        assert system["busy"] == pytest.approx(metrics["busy_seconds"] / system["seconds"])
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
    assert report["left_out"][1].startswith("infllmv2-c: out of device memory; lower --rows")
    for line in report["left_out"]:
        assert f"{line}; left out" in out


@pytest.mark.parametrize(
    ("failures", "code"), [([[], []], 0), ([[], ["ValueError: no room"]], 1), ([], 1)], ids=["all", "one", "nothing"]
)
def test_the_exit_status_says_whether_all_was_served(monkeypatch, capsys, failures, code):
    served = [Served(1.0, [], its, Recorder(1).metrics(**NOTHING)) for its in failures]
    results = [bench_serve.ServedSystem("nosa", 1, 6, False, 0, None, 0.0, its) for its in served]
    monkeypatch.setattr(bench_serve, "run", lambda _: results)
    monkeypatch.setattr(bench_serve, "table", lambda _: Table("a table"))
    found, out, err = run(monkeypatch, capsys)
    assert found == code
    assert ("a table" in out) == bool(failures)
    assert err == ("nosa-bench: nosa: a request failed with ValueError: no room\n" if any(failures) else "")


def test_what_the_longest_request_needs_of_the_host_is_said(monkeypatch, capsys, tmp_path):
    """Before anything is compiled; the resident system needs none of it and is served."""
    monkeypatch.setattr(bench_serve.Engine, "warm_up", lambda self, sampling: 0.0)
    monkeypatch.setattr(bench_serve, "serve", lambda engine, _: pytest.fail("served"))
    code, out, _ = run(
        monkeypatch, capsys, *TINY, "--systems", "nosa", "--prompt-tokens", "20", "100", "--new-tokens", "4", "8",
        "--rows", "2", "--host-budget", "40KiB",
    )  # fmt: skip
    assert code == 1
    assert (
        "nosa: --host-budget 40KiB holds 5 blocks, and a request of 108 tokens has 7; give at least 56.00 KiB, or "
        "shorter requests; left out"
    ) in out
    assert "serving, times in milliseconds" not in out


def test_as_many_rows_as_fit_are_no_more_than_the_requests(monkeypatch, capsys):
    rows = []
    monkeypatch.setattr(bench_serve.Engine, "warm_up", lambda self, sampling: rows.append(self.layout.max_batch) or 0.0)
    monkeypatch.setattr(bench_serve, "serve", lambda *_: Served(1.0, [[1]], [], Recorder(1).metrics(**NOTHING)))
    few = ("--prompt-tokens", "20", "40", "--new-tokens", "4", "8", "--rows", "0")
    for budget in ("200MiB", "3MiB"):
        assert (
            run(monkeypatch, capsys, *TINY, "--systems", "nosa", "--requests", "7", *few, "--device-budget", budget)[0]
            == 0
        )
    assert rows[0] == 7 > rows[1] > 0


def test_requests_that_failed_twice_have_no_same_tokens(monkeypatch, capsys, tmp_path):
    """Nor do those with other tokens: only the first of these four has the same ones."""
    outcomes = [[[1, 2], None, [3], [4]], [[1, 2], None, None, [5]]]
    monkeypatch.setattr(bench_serve.Engine, "warm_up", lambda self, sampling: 0.0)
    monkeypatch.setattr(
        bench_serve, "serve", lambda *_: Served(1.0, outcomes.pop(0), [], Recorder(1).metrics(**NOTHING))
    )
    code, out, _ = run(
        monkeypatch, capsys, *TINY, "--systems", "nosa-c", "nosa-resident", "--requests", "4", "--prompt-tokens", "20",
        "40", "--new-tokens", "4", "8", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0
    _, second = strict((tmp_path / "serving.json").read_text())["systems"]
    assert (second["same_as"], second["same_tokens"]) == ("nosa-c", 1)
    assert "1 of 4" in out


@pytest.mark.parametrize(
    ("error", "said"),
    [(BrokenPipeError(), ""), (OSError(28, "No space left"), "nosa-bench: [Errno 28] No space left\n")],
    ids=["head", "full"],
)
def test_a_stdout_that_takes_no_more_ends_it_in_a_line_at_most(monkeypatch, capsys, error, said):
    def fail(_):
        raise error

    discarded = []
    monkeypatch.setattr(bench_serve, "run", fail)
    monkeypatch.setattr(bench, "discard_output", lambda: discarded.append(True))
    assert run(monkeypatch, capsys) == (1, "", said)
    assert discarded == [True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "magic"], r"unknown systems magic; known: dense, infllmv2"),
        (["--systems"], r"--systems is empty; give at least one"),
        (["--requests", "0"], r"--requests 0 must lie in 1 \.\. 1,000,000"),
        (["--requests", "99999999999"], r"--requests 99999999999 must lie in 1 \.\. 1,000,000"),
        (
            ["--rate", "0", "--requests", "864"],
            r"--rate 0\.0 must be .* at which 864 come within a day, at least 0\.01; without it, all come at once",
        ),
        (["--rate", "1e-9"], r"--rate 1e-09 must be"),
        (["--rate", "nan"], r"--rate nan must be"),
        (["--seed", "-1"], r"--seed -1 must be at least 0"),
        (["--prompt-tokens", "9", "3"], r"--prompt-tokens 9 3 must be two numbers, 1 <= least <= most"),
        (["--new-tokens", "0", "3"], r"--new-tokens 0 3 must be two numbers"),
        (
            ["--prompt-tokens", "9", "16300"],
            r"--prompt-tokens and --new-tokens let a request have 16556 tokens, .* has 16384 positions; lower one",
        ),
        (["--rows", "-1"], r"--rows -1 must be at least 1, or 0 for as many as fit"),
        (["--rows", "0"], r"--rows 0 takes as many as fit; give the --device-budget"),
        (["--device-budget", "lots"], r"'lots' is no memory size"),
        (["--host-budget", "lots"], r"'lots' is no memory size"),
        (["--prefill-chunk", "0"], r"--prefill-chunk 0 must be at least 1"),
        (["--steps-per-dispatch", "0"], r"--steps-per-dispatch 0 must lie in 1 \.\. 256, the most tokens"),
        (["--steps-per-dispatch", "257"], r"--steps-per-dispatch 257 must lie in 1 \.\. 256"),
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
