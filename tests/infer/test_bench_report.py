"""How measured rows are shown: the line, the table and the picture's labels."""

import dataclasses
from io import StringIO

import pytest
from rich.console import Console

from nosa_jax.infer.bench_report import describe, labels, table
from nosa_jax.infer.systems import SYSTEMS
from nosa_jax.infer.throughput import BY_WEIGHTS, EVERY_BLOCK, Measurement

ROW = Measurement(
    system="nosa-c", context=16_384, batch=16, slots=64, device_budget=None, steps_per_dispatch=8, overlap=False,
    step_seconds=6e-3, round_seconds=(), host_seconds=0.0, misses=3.6, fetched_bytes=0.0, read_bytes=0.0,
    floor_seconds=4e-3, locality="", planned_bytes={}, program_bytes=0, allocator=None, shared_pages=1.0,
    trace_seconds=0.0, compile_seconds=0.0, fill_seconds=0.0,
)  # fmt: skip

ORIGINS = [
    ("synthetic: 3.58 with 64 slots miss of 64 a step", "synthetic"),
    (BY_WEIGHTS, "weights"),
    ("recorded from run, nosa, 4 rows of 16384 tokens of book.txt, 320 steps", "recorded"),
    ("by hand", "recorded"),  # whatever words a file has
    (EVERY_BLOCK, "every block"),
]


def shown(rows: list[Measurement]) -> list[str]:
    """The table's lines that show rows."""
    text = StringIO()
    Console(file=text, width=172).print(table(rows))
    return [line for line in text.getvalue().splitlines() if "nosa-c" in line]


@pytest.mark.parametrize(("origin", "word"), ORIGINS)
def test_every_row_says_where_its_selection_comes_from(origin, word):
    row = dataclasses.replace(ROW, locality=origin)
    assert f"selection: {word}:" in describe(row)
    assert word in labels([row])[0]
    (line,) = shown([row])
    assert word in line


def test_no_system_s_name_is_cut_off():
    text = StringIO()
    Console(file=text, width=172).print(table([dataclasses.replace(ROW, system=name) for name in SYSTEMS]))
    for name in SYSTEMS:
        assert f" {name} " in text.getvalue()


def test_rows_that_differ_in_their_selection_alone_can_be_told_apart():
    rows = [dataclasses.replace(ROW, locality=origin) for origin, word in ORIGINS if origin != "by hand"]
    assert len({describe(row) for row in rows}) == len(rows)
    assert len(set(labels(rows))) == len(rows)
    assert len(set(shown(rows))) == len(rows)
