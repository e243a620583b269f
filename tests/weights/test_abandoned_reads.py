"""A damaged checkpoint is reported once: what orbax's other reads have to say of it later is not."""

import gc
import os
import shutil
import sys
import time

import pytest

from nosa_jax.abandoned_reads import ignore_abandoned_reads
from nosa_jax.checkpoint import export_model, load_model
from nosa_jax.errors import InputError
from tests.oracle.weights import model_with, random_weights
from tests.weights.cases import SMALL


@pytest.fixture
def unraisable(monkeypatch):
    """What reaches the hook that was there before."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(str(info.exc_value)))
    return seen


def test_damaged_arrays_leave_nothing_behind(tmp_path, unraisable) -> None:
    export_model(tmp_path / "good", model_with(SMALL, random_weights(SMALL, 1)))
    for keep in (0.9, 0.5, 0.0):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        for path in (tmp_path / "bad").glob("params/ocdbt.process_0/d/*"):
            os.truncate(path, int(path.stat().st_size * keep))
        with pytest.raises(InputError, match="cannot be read"):
            load_model(tmp_path / "bad")
        time.sleep(0.05)
        gc.collect()
    assert unraisable == []


def test_other_complaints_go_on_to_the_hook(unraisable) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("mine")

    ignore_abandoned_reads()
    ignore_abandoned_reads()  # once is enough
    Broken()
    gc.collect()
    assert unraisable == ["mine"]
