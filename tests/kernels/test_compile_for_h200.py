"""The programs that a GPU runs, compiled for an H200 without one: they compile, copy no cache, and spill no registers
where a token waits for them (decoding), within bounds elsewhere.

Each in a process of its own, under a limit; this one does without JAX.
"""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.deviceless]

ROOT = Path(__file__).parents[2]
LAYER_CACHE = {  # bytes of one layer's slots in the decode cases of compile_for_h200.py
    "decode, offloaded": 16 * 2 * 128 * 2 * 64 * 128 * 2,
    "decode, resident": 4 * 2 * 1024 * 2 * 64 * 128 * 2,
    "decode, eight steps at once": 16 * 2 * 128 * 2 * 64 * 128 * 2,
    "decode, overlapped": 16 * 2 * 128 * 2 * 64 * 128 * 2,
    "decode, eight steps at once, overlapped": 16 * 2 * 128 * 2 * 64 * 128 * 2,
    "decode, many rows of small matrices": 64 * 2 * 128 * 2 * 64 * 128 * 2,
}


@pytest.fixture(scope="session")
def cuda_plugin() -> Path:
    """JAX's CUDA plugin of this very version, in a folder of its own: where it is installed, JAX looks for a driver."""
    folder = ROOT / "build" / f"cuda-plugin-{version('jax')}"
    if not (folder / "complete").exists():
        wanted = [f"jax-cuda13-{part}=={version('jax')}" for part in ("plugin", "pjrt")]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", folder]
        try:
            found = run([*command, *wanted], seconds=240)
        except subprocess.TimeoutExpired as error:
            pytest.skip(f"JAX's CUDA plugin cannot be installed here: {error}")
        if found.returncode:
            pytest.skip(f"JAX's CUDA plugin cannot be installed here: {found.stderr.strip().splitlines()[-1:]}")
        (folder / "complete").touch()
    return folder


def run(command: list[str | Path], *, seconds: float, **environment: str) -> subprocess.CompletedProcess:
    """Run a command that takes seconds, and kill it if it takes minutes."""
    return subprocess.run(
        command, env=os.environ | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=seconds,
    )  # fmt: skip


def compiled(case: str, plugin: Path) -> dict:
    """What compile_for_h200.py says of a case, with the bytes that each kernel spills under "spills"."""
    script = Path(__file__).with_name("compile_for_h200.py")
    found = run(
        [sys.executable, script, case],
        seconds=240,
        PYTHONPATH=str(plugin),
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",  # no cuDNN or driver to ask for its version
        JAX_PLATFORMS="",
        MOSAIC_GPU_DUMP_PTXAS="1",
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    report = json.loads(next(line for line in found.stdout.splitlines() if line.startswith("{")))
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", found.stdout + found.stderr)
    report["spills"] = [int(stores) + int(loads) for stores, loads in spilled]
    return report


@pytest.mark.parametrize("case", LAYER_CACHE)
def test_j2_a_decode_step_copies_no_cache(case, cuda_plugin):
    """J2 for the GPU's program: temporaries are far below a layer's cache, and nothing of its size is copied."""
    report = compiled(case, cuda_plugin)
    # Logits, scores, selection, attention (with overlap, it copies late blocks too), merging.
    assert report["calls"] == 2 * 5
    assert report["temporaries"] < LAYER_CACHE[case] / 4
    assert max(report["copied"], default=0) * 4 < LAYER_CACHE[case] / 4
    assert max(report["joined"], default=0) < 2**20  # no weights side by side in every step
    assert len(report["spills"]) >= 5
    assert not any(report["spills"])
    assert report["temporaries"] + report["not_aliased"] <= report["bound"]
    # A loop whose length is known is not asked about by the host after every step.
    assert report["trips"] == ([8] if "eight" in case else [])


@pytest.mark.parametrize("case", ["prefill, 128K at once", "prefill, a piece of 128K"])
def test_a_prefill_of_128k_tokens_stays_within_its_plan(case, cuda_plugin):
    """One layer of the 8B shape: scores, selection and attention by kernels, and memory below the planned workspace."""
    report = compiled(case, cuda_plugin)
    assert report["calls"] >= 3
    assert report["temporaries"] + report["not_aliased"] <= report["bound"] < 14 * 2**30
    assert max(report["spills"]) <= 1800  # outside the loops, in the kernel of the scores


SPILLS = {  # bytes that a kernel may keep in local memory: the sums of the backward pass fill the registers
    "attention": 0,
    "attention, gradient": 64,
    "attention, gradient, small heads": 0,
    "attention, gradient, 192": 512,
    "attention, gradient, 256": 1024,
}


@pytest.mark.parametrize("case", SPILLS)
def test_sparse_attention_compiles(case, cuda_plugin):
    """128K tokens of the 8B shape, three query heads per KV head of 64 dimensions, and the largest head dimensions."""
    report = compiled(case, cuda_plugin)
    assert report["calls"] >= 1
    assert report["spills"]
    assert max(report["spills"]) <= SPILLS[case]
    assert report["temporaries"] < 5 * 2**30  # queries and their gradient alone are 2 GiB at 128K
