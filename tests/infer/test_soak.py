"""The engine under everything at once; `benchmarks/soak.py` says what is checked, and runs for longer by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_two_thousand_requests_that_are_cancelled_interrupted_and_failed_lose_nothing(tmp_path):
    out = tmp_path / "soak.json"
    finished = subprocess.run(
        [sys.executable, SOAK, "--requests", "2000", "--sources", "150", "--seed", "1", "--out", out],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False, timeout=440,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    figures = json.loads(out.read_text())
    assert figures["wrong"] == []
    assert sum(figures["ends"].values()) == 2000
    assert figures["injected"]["prompts"] > 10
    assert figures["injected"]["steps"] > 0
    assert figures["replayed"] > 0
