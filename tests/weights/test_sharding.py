"""C1: weights of both formats go to any number of devices, each leaf where it was asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from nosa_jax import NosaLM
from nosa_jax.checkpoint import split_model
from tests.oracle.weights import model_with, random_weights
from tests.weights.cases import SMALL, assert_same_bits

CONFIG = SMALL.replace(vocab_size=64, num_heads=8, num_kv_heads=4)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """What `eight_devices.py` reports, and the folder with the checkpoints that it wrote from eight devices."""
    folder = tmp_path_factory.mktemp("eight")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("eight_devices.py")), str(folder), json.dumps(CONFIG.to_dict())],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), folder


def test_c1_every_leaf_has_the_sharding_asked_for(eight) -> None:
    """Written from eight devices with split matrices; read onto 8, 2 (both split, and as a 2-d mesh) and 1."""
    reports, _ = eight
    assert len(reports) == 8
    for name, report in reports.items():
        assert report["placed"], name
        assert report["equal"], name
        assert (report["split"] > 20) == (report["devices"] > 1), name


@pytest.mark.parametrize("kind", ["orbax", "safetensors"])
def test_c1_parameters_alone_in_a_process_with_one_device(eight, kind) -> None:
    model = NosaLM.from_pretrained(eight[1] / kind)
    assert_same_bits(model, model_with(CONFIG, random_weights(CONFIG, 1)))
    for value in split_model(model)[1].values():
        assert value.sharding.device_set == {jax.devices()[0]}
