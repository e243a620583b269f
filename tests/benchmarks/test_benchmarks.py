"""The benchmarks that measure a GPU, as far as a machine without one runs them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(FOLDER / name), *map(str, arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)


@pytest.fixture
def device_trace(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import device_trace

    return device_trace


def profiled(*kernels: tuple[str, int, float, float]) -> list[dict]:
    """A profile with kernels (name, stream, start, duration) of a device, and what the host did meanwhile."""
    names = {1: "/host:CPU", 2: "/device:GPU:0"}
    events = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}} for pid, name in names.items()]
    threads = {(1, 7): "python", (2, 7): "Stream #7(Compute)", (2, 8): "Stream #8(MemcpyH2D)", (2, 9): "XLA Ops"}
    events += [
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for (pid, tid), name in threads.items()
    ]
    events += [
        {"ph": "X", "pid": 1, "tid": 7, "name": "dispatch", "ts": 0, "dur": 1000},
        {"ph": "X", "pid": 2, "tid": 9, "name": "fusion", "ts": 0, "dur": 1000},
    ]
    return events + [
        {"ph": "X", "pid": 2, "tid": tid, "name": name, "ts": start, "dur": duration}
        for name, tid, start, duration in kernels
    ]


def test_a_profile_is_read_by_stream_and_kind(device_trace):
    """Kernels of the device's streams alone; equal kernels of all layers count together; overlaps are busy once."""
    events = device_trace.parse_events(
        profiled(
            ("loop_add_fusion_12", 7, 30.0, 5.0), ("loop_add_fusion.3", 7, 10.0, 10.0), ("copy", 8, 15.0, 10.0),
            ("gemm_64x64<2>", 7, 50.0, 7.0),
        )
    )  # fmt: skip
    assert [event.start for event in events] == [10, 15, 30, 50]
    assert device_trace.busy_intervals(events) == [(10, 25), (30, 35), (50, 57)]
    assert device_trace.by_kind(events) == {"loop_add_fusion": (2, 15.0), "copy": (1, 10.0), "gemm_64x64<2>": (1, 7.0)}
    assert device_trace.parse_events(profiled()) == []


def test_the_summary_of_a_step(monkeypatch, device_trace):
    import decode_profile

    kernels = [("fusion_1", 7, 0.0, 4.0), ("fusion_2", 7, 4.5, 4.0), ("copy", 8, 12.5, 2.0)]
    events = device_trace.parse_events(profiled(*kernels))
    found = decode_profile.summary(events, 2, layers=2, top=1)
    assert found["kernels_per_step"] == 1.5
    assert found["kernel_us_per_step"] == 5.0
    assert found["span_us_per_step"] == 7.25
    assert (found["gaps_per_step"], found["gap_us_per_step"]) == (0.5, 2.0), "half a microsecond is no gap"
    (kind,) = found["kinds"]
    assert (kind["kind"], kind["per_step"], kind["us_per_layer"], kind["us_each"]) == ("fusion", 1.0, 2.0, 4.0)
    assert decode_profile.summary([], 2, 2, 1) == {}


def test_the_crossover_is_interpolated(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from kernel_plot import crossover

    sparse = {"kernel": "decode_attention", "rows": 16, "seconds": {"mosaic_gpu": 30e-6, "xla": 1.0}}
    dense = [
        {"kernel": "dense decode", "rows": 16, "context": n, "seconds": {"cudnn": n / 4096 * 20e-6}}
        for n in (4096, 8192)
    ]
    assert crossover([sparse, *dense], "mosaic_gpu", 16) == pytest.approx(6144)
    assert crossover([sparse, dense[0]], "mosaic_gpu", 16) is None
    assert crossover([sparse, dense[1]], "mosaic_gpu", 16) == 8192
    assert crossover(dense, "mosaic_gpu", 16) is None


@pytest.mark.slow
def test_a_decode_profile_without_a_gpu_says_what_is_missing(tmp_path):
    """Times, no kernels, and a line that says why."""
    sizes = ("--shape", "tiny", "--layers", 1, "--rows", 2, "--context", 1024, "--locality", "weights", "--steps", 2)
    done = script("decode_profile.py", *sizes, "--graphs", "default", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kernels are listed on a GPU only" in done.stdout
    report = json.loads((tmp_path / "decode_profile.json").read_text())
    assert report["graphs"]["default"]["step_ms"] > 0
    assert "kinds" not in report["graphs"]["default"]


@pytest.mark.slow
def test_the_kernels_parts_run_up_to_the_kernels(tmp_path):
    """Each in a process of its own; a part that is unknown is refused, and one without time is left out."""
    parts = ("selection", "append", "dense_decode")
    done = script("kernels.py", "--small", "--kernel", "reference", "--parts", *parts, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "kernels.json").read_text())
    assert [figure["kernel"] for figure in report["figures"]] == [
        "select_blocks", "append_token", "dense decode", "dense decode",
    ]  # fmt: skip
    assert report["failures"] == []
    for figure in report["figures"]:
        assert figure["floor_seconds"] > 0
        assert all(value > 0 for value in figure["seconds"].values())
    assert {"reference", "reference, query part only", "xla"} <= set(report["figures"][0]["seconds"])
    assert script("kernels.py", "--parts", "magic").returncode == 2
    late = script("kernels.py", "--small", "--parts", "append", "--seconds", 0, "--out", tmp_path)
    assert "left out: append: no time left" in late.stdout


@pytest.mark.slow
def test_a_kernel_that_does_not_run_does_not_take_the_others_along(tmp_path):
    done = script("kernels.py", "--small", "--no-isolate", "--parts", "selection", "attention", "--out", tmp_path)
    assert done.returncode == 1
    assert "JAX sees no CUDA device" in done.stdout
    report = json.loads((tmp_path / "kernels.json").read_text())
    assert [figure["kernel"] for figure in report["figures"]] == ["select_blocks", "decode_attention"]
    assert all("xla" in figure["seconds"] and "mosaic_gpu" not in figure["seconds"] for figure in report["figures"])
    assert len(report["failures"]) == 4


@pytest.mark.slow
def test_prompts_are_read_by_both_systems_in_one_run(tmp_path):
    options = ("--shape", "tiny", "--layers", 1, "--contexts", 256, "--chunks", 0, 64, "--rounds", 1)
    done = script("prefill.py", *options, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "prefill.json").read_text())
    assert [(row["attention"], row["context"]) for row in report["rows"]] == [("nosa", 256), ("dense", 256)]
    assert all(row[way]["tokens_per_second"] > 0 for row in report["rows"] for way in ("at once", "in pieces of 64"))
    assert report["planned_bytes_all_layers"]["256"] > 0
    assert "256 tokens: block-sparse reads" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["swap_graph.cu", "host_mapping.cu"])
def test_cuda_programs_compile(tmp_path, name):
    """Nothing can run them here."""
    handlers = ["-I", FOLDER.parent / "ffi" / "csrc", "-isystem", jax.ffi.include_dir()]
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", *handlers, FOLDER / name]
    done = subprocess.run([*command, "-o", tmp_path / "program"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
