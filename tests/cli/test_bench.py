"""nosa-bench as a user calls it, on the tiny model."""

import json
import re

import pytest

from nosa_jax.infer import bench
from nosa_jax.infer.throughput import SYSTEMS, beside_weights


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["nosa-bench", *arguments])
    code = bench.main()
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.slow
def test_all_systems_are_measured_beside_their_floors(monkeypatch, capsys, tmp_path):
    """A table, JSON and a picture; every row says where its selection comes from."""
    code, out, _ = run(
        monkeypatch, capsys, "throughput", "--model", "tiny", "--layers", "1", "--contexts", "1024", "--batches", "2",
        "--steps", "2", "--locality", "weights", "--host-budget", "16MiB", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0
    assert "random weights" in out
    assert "selection of" in out
    report = json.loads((tmp_path / "throughput.json").read_text())
    assert [row["system"] for row in report["measurements"]] == list(SYSTEMS)
    for row in report["measurements"]:
        assert row["step_seconds"] > 0
        assert row["floor_seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(2 / row["step_seconds"])
        assert row["locality"] == "as it comes from the weights"
        assert (row["misses"] > 0) == (row["slots"] < 64), row  # 64 blocks: with a slot for each nothing is fetched
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_a_budget_decides_how_many_rows_fit():
    config = bench.NosaConfig.tiny()
    system, budget = SYSTEMS["nosa"], 40 * 2**20
    rows = bench.largest_batch(system, config, 4096, budget, limit=4096)
    assert beside_weights(system.layout(config, rows, 4096)) <= budget
    assert beside_weights(system.layout(config, rows + 1, 4096)) > budget
    assert rows > bench.largest_batch(SYSTEMS["dense"], config, 4096, budget, limit=4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "magic"], r"unknown systems magic; known: dense, infllmv2"),
        (["--batches", "0"], r"batch 0 .* needs a --device-budget"),
        (["--locality", "published"], r"published locality is of 64 selected blocks and this model selects 16"),
    ],
)
def test_what_cannot_be_measured_is_said(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(bench, "measure_rates", lambda: bench.DeviceRates(1e9, 1e9))
    code, _, err = run(
        monkeypatch, capsys, "throughput", "--model", "tiny", "--layers", "1", "--contexts", "1024", *arguments
    )
    assert code == 2
    assert err.startswith("nosa-bench: ")
    assert re.search(message, err), err


def test_without_a_command_it_says_which_there_is(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys)
    assert code == 2
    assert "nosa-bench throughput" in err
