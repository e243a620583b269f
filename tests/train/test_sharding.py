"""C1: several devices, and moving between numbers of them."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from nosa_jax.checkpoint import split_model
from nosa_jax.train import InputError, Phase, load_model, train
from nosa_jax.train.sharding import leaf_sharding, make_mesh


@pytest.fixture(scope="module")
def eight(tmp_path_factory, small):
    """What `eight_devices.py` reports, and the folder of its checkpoint; several test processes share one run of it."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    folder = tmp_path_factory.getbasetemp() if alone else tmp_path_factory.getbasetemp().parent
    folder, report = folder / "eight", folder / "eight.json"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not report.exists():
            report.write_text(_run_on_eight(folder, small))
    return json.loads(report.read_text()), folder


def _run_on_eight(folder, small) -> str:
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("eight_devices.py")), str(folder), json.dumps(small.to_dict())],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_c1_eight_devices_train_like_one(eight) -> None:
    losses = eight[0]["losses"]
    np.testing.assert_allclose(losses["8 fsdp"], losses["1 replicated"], rtol=2e-5)


@pytest.mark.slow
def test_c1_parameters_and_moments_are_split(eight) -> None:
    assert eight[0]["split"] > 8
    assert eight[0]["split_moments"] == eight[0]["split"]


@pytest.mark.slow
def test_c1_saved_on_eight_restored_on_two_and_one(eight) -> None:
    """Every leaf has the sharding asked for and the bits that were saved, and training goes on."""
    restored = eight[0]["restored"]
    assert [(r["placed"], r["equal"]) for r in restored] == [(True, True)] * 2
    np.testing.assert_allclose([r["next_loss"] for r in restored], restored[0]["next_loss"], rtol=2e-5)


@pytest.mark.slow
def test_c1_parameters_alone_restore_in_a_process_with_one_device(eight, small) -> None:
    model, _, _ = load_model(eight[1])
    _, params = split_model(model)
    assert all(value.sharding.device_set == {jax.devices()[0]} for value in params.values())
    assert all(bool(np.isfinite(value).all()) for value in params.values())


def test_largest_fitting_dimension_is_split() -> None:
    mesh = make_mesh(jax.devices()[:1])
    assert leaf_sharding((3, 4), mesh, "fsdp").spec == PartitionSpec(None, None)
    assert leaf_sharding((), mesh, "fsdp").spec == PartitionSpec()


def test_batch_must_divide_over_the_devices(tmp_path, run_config, small) -> None:
    device = jax.devices()[0]
    config = run_config(tmp_path / "run", dense=Phase(steps=1, seq_len=8, batch=3, attention="dense"))
    with pytest.raises(InputError, match=r"batch=3 of the dense phase must be a multiple of 2 devices"):
        train(config, model_config=small, devices=[device, device])
