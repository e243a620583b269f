"""Shared by all tests: hypothesis profiles, the GPU lane, poisoned memory, and the folder of full golden vectors."""

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# XLA takes the size of its CPU thread pool from here when JAX starts. The interpreter of GPU kernels runs a thread for
# each warpgroup, and they wait for each other: with a pool of two, as on a machine with two cores, some never start.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))

# On a GPU, XLA measures matrix products to choose among them. Two programs, say offloaded and resident decode, would
# choose and so round differently by chance; here they are compared bit for bit.
AUTOTUNING_OFF = "--xla_gpu_autotune_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {AUTOTUNING_OFF}".strip()

# The same examples on every run, so that a failure on one machine is a failure on all; `--hypothesis-profile=explore`
# draws new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=12, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=200)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden", type=Path, default=None, help="folder with the whole set of the authors' vectors and weights"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where JAX sees no GPU; JAX starts only if there are such tests."""
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import jax

    if jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def golden_folder(request: pytest.FixtureRequest) -> Path:
    """The folder given by --golden; the test is skipped without it."""
    folder = request.config.getoption("--golden")
    if folder is None:
        pytest.skip("needs --golden FOLDER with weights_l0.npz and prefill_L1024.npz")
    return folder


@pytest.fixture
def poison_free_memory() -> Callable[[], None]:
    """A function that fills freed memory of many sizes with NaN, so that reading uninitialised bytes shows up."""

    def poison() -> None:
        import jax.numpy as jnp

        sizes = [2**i for i in range(4, 22)]
        held = [jnp.full(n, jnp.nan).block_until_ready() for n in sizes for _ in range(2)]
        held_numpy = [np.full(n, np.nan, np.float32) for n in sizes]
        del held, held_numpy

    return poison
