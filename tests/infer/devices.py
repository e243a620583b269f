"""Where tests of engines run: on JAX's default device, and with `-m gpu` on a GPU whatever else they are marked."""

import jax
import pytest

from nosa_jax import ffi


@pytest.fixture(params=["default", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> jax.Device:
    """JAX's default device; "cuda" names a GPU as that, and is skipped elsewhere or without the CUDA library."""
    found = jax.devices()[0]
    if request.param == "cuda":
        if not ffi.has_cuda():
            pytest.skip(ffi.status())
        assert found.platform == "gpu"
    return found


on_gpu_too = pytest.mark.usefixtures("device")
