"""A damaged checkpoint is reported once: what orbax's other reads have to say of it, sooner or later, is not."""

import gc
import logging
import subprocess
import sys

import pytest

from nosa_jax.abandoned_reads import ignore_abandoned_reads
from nosa_jax.checkpoint import export_model
from tests.oracle.weights import model_with, random_weights
from tests.weights.cases import SMALL

READ_DAMAGED = """
import gc, os, shutil, sys, time
from pathlib import Path
from nosa_jax.checkpoint import load_model
from nosa_jax.errors import InputError

good, bad = Path(sys.argv[1]), Path(sys.argv[2])
for keep in (0.9, 0.5, 0.0):
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good, bad)
    for path in bad.glob("params/ocdbt.process_0/d/*"):
        os.truncate(path, int(path.stat().st_size * keep))
    try:
        load_model(bad)
    except InputError as error:
        print(error)
    time.sleep(0.05)
    gc.collect()
"""


def test_damaged_arrays_are_reported_once(tmp_path) -> None:
    """In a process of its own: what earlier tests left behind would be reported here too."""
    export_model(tmp_path / "good", model_with(SMALL, random_weights(SMALL, 1)))
    command = [sys.executable, "-c", READ_DAMAGED, str(tmp_path / "good"), str(tmp_path / "bad")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.count("cannot be read") == 3
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == ""


@pytest.fixture
def unraisable(monkeypatch):
    """What reaches the hook that was there before."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(str(info.exc_value)))
    return seen


class Broken:
    def __init__(self, message: str) -> None:
        self.message = message

    def __del__(self) -> None:
        raise RuntimeError(self.message)


def test_only_complaints_of_reads_are_kept_from_the_hook(unraisable) -> None:
    ignore_abandoned_reads()
    ignore_abandoned_reads()  # once is enough
    for message in ("mine", "Event loop is closed"):
        Broken(message)
    gc.collect()
    assert unraisable == ["mine"]


def test_only_complaints_of_reads_are_kept_from_the_log(caplog) -> None:
    ignore_abandoned_reads()
    for message in ("mine", "Encountered error while reading array index: (slice(0, 24, 1),)"):
        logging.getLogger("asyncio").error("Task exception was never retrieved", exc_info=RuntimeError(message))
    logging.getLogger("asyncio").error("a line without an exception")
    assert [record.exc_info and str(record.exc_info[1]) for record in caplog.records] == ["mine", None]
