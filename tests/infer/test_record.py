"""Recording what a model selects, by hand and by command, and replaying it."""

import json
from itertools import pairwise

import jax
import numpy as np
import pytest

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.errors import InputError
from nosa_jax.infer import bench, bench_trace, freeze
from nosa_jax.infer.bench_output import require_writable
from nosa_jax.infer.bench_trace import pieces
from nosa_jax.infer.record import Recording, record_trace
from nosa_jax.infer.trace import SelectionTrace
from nosa_jax.tokenizer import ByteTokenizer

CONFIG = NosaConfig.tiny(num_layers=2, embed_dim=32, ffn_dim=64, num_heads=2, num_kv_heads=2, head_dim=16)
BUDGET = CONFIG.budget


def model(config: NosaConfig = CONFIG) -> NosaLM:
    """Random weights with eviction heads that matter."""
    made = NosaLM.from_config(config)
    for index, layer in enumerate(made.layers):
        layer.attention.a_k[...] = jax.random.normal(jax.random.key(index), layer.attention.a_k.shape)
    return made


@pytest.fixture(scope="module")
def recording():
    prompts = [np.random.default_rng(n).integers(0, 256, n) for n in (500, 490)]
    return record_trace(freeze(model()), prompts, tokens=60, attention="nosa", origin="a test")


def test_a_recorded_trace_has_every_list_and_the_misses_that_the_engine_counted(recording):
    """Steps x (layers, rows, KV heads) x picks; replayed through tables of C slots it misses as often as the engine."""
    trace = recording.trace
    assert trace.picks.shape == (60, 2 * 2 * 2, BUDGET.query + BUDGET.evict)
    assert (np.diff(trace.picks, axis=-1) > 0).all()
    assert (trace.sink, trace.attention, trace.origin) == (BUDGET.sink, "nosa", "a test")
    assert recording.slots == BUDGET.total
    counted = trace.misses(BUDGET.total, BUDGET.sink + BUDGET.local)
    assert counted == pytest.approx(recording.misses, abs=0.15), "a block that leaves the local window was resident"
    assert recording.min_locality >= BUDGET.locality_bound
    for before, after in pairwise(trace.picks):
        for one, other in zip(before, after, strict=True):
            assert len(set(other) - set(one)) <= BUDGET.query + 1, "the locality law, and a block out of the window"


def test_a_recorded_trace_fits_its_own_model(recording, tmp_path):
    """It survives its file, and fits rows of its own length or longer ones."""
    recording.trace.save(tmp_path / "trace.npz")
    again = SelectionTrace.load(tmp_path / "trace.npz")
    assert again.attention == "nosa"
    np.testing.assert_array_equal(again.picks, recording.trace.picks)
    again.require_fit(CONFIG, "nosa", first_length=560, steps=60)
    again.require_fit(CONFIG, "nosa", first_length=4000, steps=10)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, dict(attention="infllmv2"), "holds picks of 'nosa' and 'infllmv2' is to replay them"),
        ({}, dict(steps=61), r"holds 60 steps and 61 are to be replayed; record more with nosa-bench trace --tokens"),
        (dict(evict_blocks=9), {}, r"has 11 picks behind 1 sink blocks, and the model picks 12 behind 1"),
        (dict(sink_blocks=2), {}, r"behind 1 sink blocks, and the model picks 11 behind 2; record one .* \(C=17\)"),
        ({}, dict(first_length=400), r"first 31 blocks, and rows of 400 tokens have 22 .* replay it at 554 tokens"),
    ],
)
def test_a_trace_of_another_shape_is_refused_by_number(recording, changes, options, message):
    where = dict(attention="nosa", first_length=600, steps=10) | options
    with pytest.raises(InputError, match=message):
        recording.trace.require_fit(CONFIG.replace(**changes), **where)


def test_what_cannot_be_recorded_is_refused():
    frozen = freeze(model())
    for prompt, options, message in (
        (240, {}, "a prompt of 240 tokens has fewer blocks of 16 than the 16 that a step selects; give at least 241"),
        (300, dict(attention="dense"), "attention 'dense' attends to every block and picks none"),
        (300, dict(tokens=1), "tokens=1 steps show no change of picks"),
    ):
        with pytest.raises(InputError, match=message):
            record_trace(
                frozen, [np.zeros(prompt, np.int32)], **(dict(tokens=4, attention="nosa", origin="") | options)
            )


def test_text_is_cut_into_pieces():
    texts = {"a": np.arange(10), "b": np.arange(25)}
    assert [len(p) for p in pieces(texts, None, 4)] == [10, 25]
    assert [p.tolist()[0] for p in pieces(texts, 10, 9)] == [0, 0, 10]
    assert len(pieces(texts, 10, 2)) == 2
    with pytest.raises(InputError, match="no file has --context 26 tokens; the longest, b, has 25"):
        pieces(texts, 26, 4)
    with pytest.raises(InputError, match="--rows 0 must be at least 1"):
        pieces(texts, None, 0)


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["nosa-bench", *map(str, arguments)])
    code = bench.main()
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.slow
def test_a_trace_is_recorded_and_replayed_by_command(monkeypatch, capsys, tmp_path):
    """A checkpoint and real text; the rates beside the published ones; throughput then says what it replayed, and its
    counters see the trace's misses."""
    model().save_pretrained(tmp_path / "model", ByteTokenizer())
    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike; each unhappy family is unhappy in its own way. " * 40)
    file = tmp_path / "trace.npz"
    code, out, err = command(
        monkeypatch, capsys, "trace", "--model", tmp_path / "model", "--prompt-file", text, "--context", 512,
        "--rows", 2, "--tokens", 130, "--out", file,
    )  # fmt: skip
    assert code == 0, err
    assert "3.58" in out
    assert "0.71" in out
    assert "2 rows of 512 tokens of text.txt, 130 steps" in out
    trace = SelectionTrace.load(file)
    assert trace.picks.shape[:2] == (130, 2 * 2 * 2)
    code, out, err = command(
        monkeypatch, capsys, "throughput", "--model", tmp_path / "model", "--cases", "nosa-c:1K:2", "--trace", file,
        "--steps", 16, "--rounds", 2, "--host-budget", "4MiB", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0, err
    assert "selection of nosa-c: recorded from model, nosa, 2 rows of 512 tokens of text.txt, 130 steps" in out
    (measured,) = json.loads((tmp_path / "throughput.json").read_text())["measurements"]
    assert measured["misses"] == pytest.approx(trace.misses(BUDGET.total, BUDGET.sink + BUDGET.local), rel=0.5)
    code, _, err = command(
        monkeypatch,
        capsys,
        "throughput",
        "--model",
        tmp_path / "model",
        "--cases",
        "nosa-c:1K:2",
        "--trace",
        file,
        file,
    )
    assert code == 2
    assert "is a second trace of 'nosa'; give one for each system" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "trace.txt"], "must end in .npz"),
        (["--out", "no/such/folder/trace.npz"], "lies in a folder that does not exist"),
        (["--model", "no/such/model/here"], "no/such/model/here"),
    ],
)
def test_a_trace_that_cannot_be_recorded_says_why(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    given = {"--model": "m", "--prompt-file": "t", "--out": "trace.npz"} | {arguments[0]: arguments[1]}
    code, _, err = command(monkeypatch, capsys, "trace", *[x for pair in given.items() for x in pair])
    assert code == 2
    assert message in err


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of 16384 positions, of which 241 are the least to record from."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    model(CONFIG.replace(num_layers=1)).save_pretrained(folder, ByteTokenizer())
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens 0 must be at least 2: fewer steps show no change of picks"),
        (["--tokens", "-3"], "--tokens -3 must be at least 2"),
        (["--tokens", "20000"], "--tokens 20000 must be at most 16143: 241 of the model's 16384 positions are"),
        (["--tokens", "16144"], "--tokens 16144 must be at most 16143"),
        (["--tokens", "16143"], "a piece of 400 tokens and --tokens 16143 exceed the model's 16384 positions; cut with "
            "--context 241 or less"),
        (["--context", "240"], "a prompt of 240 tokens has fewer blocks of 16 than the 16 that a step selects"),
        (["--attention", "dense"], "attention 'dense' attends to every block and picks none"),
        (["--out", "/proc/t.npz"], "cannot write to '/proc/t.npz': No such file or directory. Give --out a place that"),
        (["--out", "folder.npz"], "cannot write to 'folder.npz': Is a directory. Give --out a place that"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused_before_weights_are_read(
    monkeypatch, capsys, tmp_path, saved, arguments, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_trace, "freeze", None)  # nobody gets so far
    (tmp_path / "text").write_text("x" * 399)  # and the token that begins a text
    (tmp_path / "folder.npz").mkdir()
    given = {"--model": saved, "--prompt-file": "text", "--out": "trace.npz"} | {arguments[0]: arguments[1]}
    code, _, err = command(monkeypatch, capsys, "trace", *[x for pair in given.items() for x in pair])
    assert (code, err[:12]) == (2, "nosa-bench: ")
    assert message in err
    assert not (tmp_path / "trace.npz").exists()


def test_trying_whether_a_file_can_be_written_leaves_its_contents(tmp_path):
    file = tmp_path / "trace.npz"
    require_writable(file, file)
    assert not file.exists()
    file.write_text("an earlier trace")
    require_writable(file, file)
    assert file.read_text() == "an earlier trace"


def test_a_full_disk_costs_the_file_and_not_the_rates(monkeypatch, capsys, tmp_path):
    """They are printed before; why there is no file is said in one line."""
    trace = SelectionTrace(np.zeros((4, 2, BUDGET.query + BUDGET.evict), np.int32) + 1, 1, 20, "a test")
    monkeypatch.setattr(bench_trace, "record", lambda _: (Recording(trace, 0.0, 16, 0.5), CONFIG))
    full = tmp_path / "trace.npz"
    full.symlink_to("/dev/full")
    code, out, err = command(monkeypatch, capsys, "trace", "--model", "m", "--prompt-file", "t", "--out", full)
    assert "this trace" in out
    assert code == 1
    assert err == (
        f"nosa-bench: cannot write to '{full}': No space left on device. Give --out a place that you may write to.\n"
    )
