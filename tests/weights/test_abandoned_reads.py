"""A damaged checkpoint is reported once: what orbax's other reads have to say of it, sooner or later, is not."""

import gc
import logging
import subprocess
import sys

import pytest

from nosa_jax import abandoned_reads
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


class Broken:
    def __init__(self, message: str) -> None:
        self.message = message

    def __del__(self) -> None:
        raise RuntimeError(self.message)


@pytest.fixture
def complain(monkeypatch, caplog):
    """A function that complains in every way of an error, and returns how much of it is heard."""
    heard = []
    caplog.set_level(logging.ERROR, logger="asyncio")  # commands that ran in this process have set another
    monkeypatch.setattr(abandoned_reads, "_failed", False)
    monkeypatch.setattr(sys, "unraisablehook", lambda info: heard.append(str(info.exc_value)))

    def complain(message: str) -> int:
        heard.clear()
        caplog.clear()
        Broken(message)
        gc.collect()
        logging.getLogger("asyncio").error("Task exception was never retrieved", exc_info=ValueError(message))
        return heard.count(message) + len(caplog.records)

    return complain


def failed_read() -> None:
    with ignore_abandoned_reads():
        raise KeyError


COMPLAINTS = [
    "Event loop is closed",
    "Encountered error while reading array index: (slice(0, 24, 1),). See full\nTensorStore details",
    'OUT_OF_RANGE: Error reading shard entry {0} in "lm_head" in OCDBT database at local file "params/": [0, 1)',
]
OTHERS = ["mine", "Event loop is closed (mine)", "NOT_FOUND: Error reading my own file"]


@pytest.mark.parametrize("message", COMPLAINTS)
def test_complaints_are_dropped_while_reading_and_after_a_failure_alone(complain, message) -> None:
    assert complain(message) == 2
    with ignore_abandoned_reads():
        assert complain(message) == 0
        with ignore_abandoned_reads():  # of another thread, say
            pass
        assert complain(message) == 0
    assert complain(message) == 2, "nothing has failed"
    with pytest.raises(KeyError):
        failed_read()
    assert complain(message) == 0


@pytest.mark.parametrize("message", OTHERS)
def test_what_others_say_is_heard(complain, message) -> None:
    with ignore_abandoned_reads():
        assert complain(message) == 2
    with pytest.raises(KeyError):
        failed_read()
    assert complain(message) == 2


def test_lines_without_an_exception_are_heard(complain, caplog) -> None:
    with ignore_abandoned_reads():
        logging.getLogger("asyncio").error("Event loop is closed")
    assert [record.message for record in caplog.records] == ["Event loop is closed"]
