"""nosa-bench throughput as a user calls it, on the tiny model."""

import json
import re
import time
from pathlib import Path

import jax
import pytest
from flax import nnx
from rich.table import Table

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.ffi import HostMemoryError
from nosa_jax.infer import bench, bench_throughput, freeze
from nosa_jax.infer.bench_options import ThroughputOptions
from nosa_jax.infer.bench_output import require_writable, show
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.random_contents import random_model
from nosa_jax.infer.rates import DeviceRates
from nosa_jax.infer.systems import SYSTEMS
from nosa_jax.weights.config_json import config_to_json

TINY = ("--model", "tiny", "--layers", "1", "--host-budget", "16MiB")


def run(monkeypatch, capsys, *arguments: str | Path) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["nosa-bench", *map(str, arguments)])
    code = bench.main()
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def rates(monkeypatch):
    """No time goes into measuring the machine."""
    monkeypatch.setattr(bench_throughput, "measure_rates", lambda: DeviceRates(1e10, 1e9))


@pytest.mark.slow
def test_all_systems_are_measured_beside_their_floors(monkeypatch, capsys, tmp_path):
    """A table, JSON and a picture; every row says where its selection comes from and what memory was planned."""
    code, out, _ = run(
        monkeypatch, capsys, "throughput", *TINY, "--contexts", "1024", "--batches", "2", "--steps", "2",
        "--rounds", "2", "--steps-per-dispatch", "4", "--locality", "weights", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0
    assert "random weights" in out
    assert "caches filled with random contents, not by a prefill" in out
    assert "selection of" in out
    for line in (line for line in out.splitlines() if "ms a step" in line):
        assert f"selection: {'every block' if line.startswith('dense') else 'weights'}:" in line
    report = json.loads((tmp_path / "throughput.json").read_text())
    assert [row["system"] for row in report["measurements"]] == list(SYSTEMS)
    for row in report["measurements"]:
        assert row["step_seconds"] > 0
        assert row["host_seconds"] > 0
        assert len(row["round_seconds"]) == 2
        assert row["floor_seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(2 / row["step_seconds"])
        assert row["locality"] == (
            "every block is attended to" if row["system"] == "dense" else "as it comes from the weights"
        )
        assert row["selection"] == ("every block" if row["system"] == "dense" else "weights")
        # 64 blocks: with a slot for each nothing is fetched. Nor by dma, whose picks leave the local window one by one.
        assert (row["misses"] > 0) == (row["slots"] < 64 and not row["system"].startswith("dma")), row
        assert {"parameters", "KV slots", "pooled keys", "workspace"} <= set(row["planned_bytes"])
        assert row["device_bytes"] == sum(row["planned_bytes"].values())
        assert 0 < row["program_bytes"] <= row["planned_bytes"]["workspace"]
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_what_does_not_fit_into_the_time_is_left_out_and_the_rest_is_written(monkeypatch, capsys, tmp_path, rates):
    """One row is measured whatever the limit; shared host pages are said; the file has what was left out."""
    code, out, _ = run(
        monkeypatch, capsys, "throughput", *TINY[:-1], "512KiB", "--cases", "nosa-c:1K:4,locality=2,overlap=on",
        "nosa:1K:4", "dense:1K:4", "--steps", "4", "--rounds", "2", "--compile-together", "1",
        "--seconds", "0.1", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0
    assert "nosa, 1024 tokens, 4 rows: no time left; left out" in out
    assert "host pages are shared" in out
    report = json.loads((tmp_path / "throughput.json").read_text())
    (row,) = report["measurements"]
    assert (row["system"], row["overlap"]) == ("nosa-c", True)
    assert row["locality"].startswith("synthetic: ")
    assert row["misses"] == pytest.approx(2, abs=0.7)
    assert row["shared_pages"] > 1
    assert len(report["left_out"]) == 2
    assert report["targets"] == []


@pytest.mark.slow
def test_caches_can_hold_text_instead_of_random_contents(monkeypatch, capsys, tmp_path, rates):
    """Read by a prefill, offloaded and resident; what is repeated and what does not fit is said."""
    text = tmp_path / "book.txt"
    text.write_bytes(bytes(range(256)) * 4)
    arguments = (
        "throughput", *TINY[:-1], "1MiB", "--cases", "nosa-c:512:2", "nosa-resident:512:2", "nosa:512:8",
        "--steps", "4", "--rounds", "1", "--steps-per-dispatch", "4", "--locality", "weights",
    )  # fmt: skip
    code, out, _ = run(monkeypatch, capsys, *arguments, "--prompt-file", str(text), "--out", str(tmp_path))
    assert code == 0
    # 512 tokens of context without 64 + 4 + 4 steps and the one to come.
    expected = f"caches filled by a prefill of {text} (1,025 tokens)"
    assert f"{expected}; memory" in out
    assert "random contents" not in out
    assert "nosa, 512 tokens, 8 rows: its text needs 2.00 MiB of host pages, see --host-budget; left out" in out
    report = json.loads((tmp_path / "throughput.json").read_text())
    assert report["contents"] == expected
    assert [row["system"] for row in report["measurements"]] == ["nosa-c", "nosa-resident"]
    assert all(row["selection"] == "weights" and row["shared_pages"] == 1 for row in report["measurements"])

    short = tmp_path / "short.txt"
    short.write_bytes(b"not much")
    code, out, _ = run(monkeypatch, capsys, *arguments, "--prompt-file", str(short), "--seconds", "0")
    assert code == 0
    assert f"caches filled by a prefill of {short} (9 tokens, repeated, since a batch reads up to 878)" in out


@pytest.mark.slow
def test_a_row_that_fails_does_not_take_the_others_along(monkeypatch, capsys, tmp_path, rates):
    """Out of device memory, and a program that does not compile."""
    compiled, measured = bench_throughput.compile_steps, bench_throughput.measure

    def compile_steps(model, layout, *rest):
        if layout.attention == "dense":
            raise RuntimeError("no such kernel")
        return compiled(model, layout, *rest)

    def measure(model, system, *rest, **options):
        if system.name == "nosa-c":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return measured(model, system, *rest, **options)

    monkeypatch.setattr(bench_throughput, "compile_steps", compile_steps)
    monkeypatch.setattr(bench_throughput, "measure", measure)
    cases = ("dense:1K:1", "nosa-c:1K:1", "nosa-resident:1K:1")
    code, out, _ = run(
        monkeypatch, capsys, "throughput", *TINY, "--cases", *cases, "--steps", "2", "--rounds", "1",
        "--locality", "weights", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0
    assert "dense, 1024 tokens, 1 rows: RuntimeError: no such kernel; left out" in out
    assert "nosa-c, 1024 tokens, 1 rows: out of device memory; left out" in out
    report = json.loads((tmp_path / "throughput.json").read_text())
    assert [row["system"] for row in report["measurements"]] == ["nosa-resident"]


@pytest.mark.slow
def test_random_parameters_are_those_of_a_fresh_model():
    """The same tree, shapes and dtypes as initialising the model, and values of the same spread."""
    config = NosaConfig.tiny(num_layers=3, dtype="bfloat16")
    ours = random_model(config)
    fresh = freeze(NosaLM.from_config(config.replace(param_dtype="bfloat16")))
    assert jax.tree.structure(ours) == jax.tree.structure(fresh)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(fresh), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert float(one.std()) == pytest.approx(float(other.std()), rel=0.2, abs=1e-6)
    layers = ours.module().layers
    assert (layers[0].attention.o_weight_nhd[...] != layers[1].attention.o_weight_nhd[...]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "magic"], r"unknown systems magic; known: dense, infllmv2"),
        (["--batches", "0"], r"as many rows as fit need a budget: --device-budget, or budget="),
        (["--locality", "published"], r"published locality is of 64 selected blocks and this model selects 16"),
        (["--cases", "nosa:1K"], r"'nosa:1K' is no row to measure; write SYSTEM:CONTEXT:ROWS.* like nosa:64K:16"),
        (["--cases", "nosa:1K:0"], r"'0' in 'nosa:1K:0' is no positive number like 65536, 64K or 1M; write SYSTEM:"),
        (["--cases", "nosa:1G:2"], r"'1G' in 'nosa:1G:2' is no positive number like 65536, 64K or 1M; write SYSTEM:"),
        (["--cases", "nosa:1M:2"], r"max_context=1048576 must lie in 1 \.\. 16384"),
        (["--cases", "nosa:1K:2,colour=red"], r"has the unknown option 'colour'"),
        (["--cases", "nosa:1K:2,locality=often"], r"locality=often .* must be weights, published or a positive number"),
        (["--cases", "dma:1K:2,locality=2"], r"'dma' picks no block by query .* give locality=weights, or a --trace"),
        (["--cases", "nosa:1K:2,budget=lots"], r"'lots' is no memory size"),
        (["--cases", "nosa:1K:2,overlap=maybe"], r"overlap=maybe .* must be on or off"),
        (["--steps-per-dispatch", "0"], r"--steps-per-dispatch 0 must be at least 1"),
        (["--locality", "weights", "--xla-options", "fast"], r"--xla-options 'fast' is no NAME=VALUE"),
        (["--rounds", "0"], r"--rounds 0 must be at least 1"),
        (
            ["--contexts", "128", "--locality", "weights"],
            r"timing takes 472 steps, more than the context has tokens; take a longer one, or lower --rounds",
        ),
        (["--contexts", "1024", "-5"], r"--contexts -5 must be at least 1"),
        (["--batches", "4", "-5"], r"--batches -5 must be at least 1, or 0"),
        (["--locality", "weights", "--out", "/proc/x"], r"cannot write to '/proc/x': No such .* Give --out a place"),
        (["--locality", "weights", "--out", __file__], r"cannot write to '.*test_bench\.py': File exists\. Give --out"),
        (
            ["--prompt-file", "none.txt"],
            r"cannot read the prompt file 'none\.txt': No such file.*\. Give a readable file",
        ),
        (["--prompt-file", "/dev/null"], r"'/dev/null' is empty; give at least one character"),
        (["--prompt-file", __file__, "--tokenizer", "none.json"], r"none\.json"),
        (["--tokenizer", "bytes"], r"--tokenizer 'bytes' is for the text of --prompt-file; give that too"),
        (["--trace", "none.npz"], r"none\.npz cannot be read as a selection trace: .*record one with nosa-bench trace"),
    ],
)
def test_what_cannot_be_measured_is_said(monkeypatch, capsys, arguments, message):
    """Before a model is made or anything is timed."""
    start = time.perf_counter()
    code, _, err = run(monkeypatch, capsys, "throughput", *TINY, "--contexts", "1024", *arguments)
    assert code == 2
    assert err.startswith("nosa-bench: ")
    assert re.search(message, err), err
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    ("cases", "budget", "blocks"),
    [
        (["nosa:1K:2", "dense:4K:9"], "16GiB", 2 * 64),
        (["nosa:1K:2", "nosa:2K:3"], "16GiB", 3 * 128),
        (["nosa:1K:2", "nosa:2K:3"], "1MiB", 256),
        (["nosa:1K:2"], "1KiB", 1),
        (["dense:1K:2"], "16GiB", 0),
    ],
)
def test_host_pages_are_what_the_largest_row_needs_within_the_budget(cases, budget, blocks):
    """A block of this model is one page of 4 KiB."""
    config = NosaConfig.tiny(num_layers=1, num_kv_heads=1, num_heads=1, head_dim=32)
    options = ThroughputOptions(cases=tuple(cases), host_budget=budget, locality="weights")
    rows = list(bench_throughput.rows_to_measure(options, config))
    assert {row.layout.page_bytes for row in rows} == {4096}
    assert bench_throughput.host_groups(options, rows) == blocks


@pytest.mark.parametrize(
    ("command", "arguments", "option"),
    [
        ("throughput", [], "Lower --host-budget."),
        ("trace", ["--model", "m", "--prompt-file", "t", "--out", "o.npz"], "Lower --rows or --context."),
    ],
)
def test_what_the_host_cannot_hold_names_the_option_to_lower(monkeypatch, capsys, command, arguments, option):
    def full(_):
        raise HostMemoryError("host pool: too large. Plan fewer or shorter requests.")

    monkeypatch.setattr(getattr(bench, f"bench_{command}"), "run", full)
    code, _, err = run(monkeypatch, capsys, command, *arguments)
    assert (code, err) == (2, f"nosa-bench: host pool: too large. Plan fewer or shorter requests. {option}\n")


def test_a_folder_that_fills_up_while_rows_are_measured_is_said(monkeypatch, capsys, tmp_path, rates):
    """In one line instead of a traceback."""

    def measure_group(session, _):
        (tmp_path / "throughput.json").symlink_to("/dev/full")
        session.write()

    nothing = FrozenModel.of(nnx.graphdef(nnx.Dict()), {}, NosaConfig.tiny())
    monkeypatch.setattr(bench_throughput, "load", lambda *_: (nothing, "no weights"))
    monkeypatch.setattr(bench_throughput.Session, "measure_group", measure_group)
    code, _, err = run(
        monkeypatch, capsys, "throughput", *TINY, "--cases", "nosa:1K:2", "--locality", "weights", "--out", tmp_path
    )
    expected = f"cannot write to '{tmp_path}': No space left on device. Give --out a place that you may write to."
    assert (code, err) == (1, f"nosa-bench: {expected}\n")


def test_trying_whether_a_file_can_be_written_leaves_what_there_is(tmp_path):
    """No file, one with contents, and a link that leads to nothing yet."""
    (tmp_path / "full").write_text("contents")
    (tmp_path / "link").symlink_to(tmp_path / "later")
    for name in ("none", "full", "link"):
        require_writable(tmp_path, tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"full", "link"}
    assert (tmp_path / "full").read_text() == "contents"
    assert (tmp_path / "link").is_symlink()


def test_a_table_needs_no_stdout(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    show(Table("a table"))


def test_layers_of_a_checkpoint_are_its_own(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "throughput", "--model", "somewhere", "--layers", "2")
    assert code == 2
    assert "--layers 2 is for nosa_8b, nosa_1b, tiny and config files without weights; a checkpoint has its own" in err


@pytest.mark.slow
def test_a_config_file_is_timed_with_random_weights(monkeypatch, capsys, tmp_path, rates):
    """The output says so, as for presets; the file has it too."""
    shape = tmp_path / "shape"
    shape.mkdir()
    values = config_to_json(NosaConfig.tiny(num_layers=1, embed_dim=32, ffn_dim=32, vocab_size=64))
    (shape / "config.json").write_text(json.dumps(values))
    code, out, _ = run(
        monkeypatch, capsys, "throughput", "--model", str(shape), "--cases", "nosa-resident:512:1", "--steps", "1",
        "--rounds", "1", "--steps-per-dispatch", "1", "4", "--locality", "weights", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0
    assert "shape, random weights, " in out
    report = json.loads((tmp_path / "throughput.json").read_text())
    assert report["weights"] == "random weights"
    assert [row["steps_per_dispatch"] for row in report["measurements"]] == [1, 4]


def test_an_invalid_config_file_is_refused_by_name(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    code, _, err = run(monkeypatch, capsys, "throughput", "--model", str(tmp_path))
    assert code == 2
    assert f"{tmp_path}/config.json': " in err
    assert "vocab_size is missing" in err


def test_without_a_command_it_says_which_there_are(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys)
    assert code == 2
    for name in ("throughput", "serve", "trace"):
        assert f"nosa-bench {name} " in err
    assert run(monkeypatch, capsys, "--help")[0] == 0
