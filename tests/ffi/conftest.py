"""Fixtures of the extension's tests: they run on the CPU, and with `-m gpu` on a CUDA device."""

from collections.abc import Callable, Iterator

import jax
import pytest

from nosa_jax import ffi

PLATFORMS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLATFORMS)
def device(request: pytest.FixtureRequest) -> Iterator[jax.Device]:
    """The device under test, made the default one; skipped where it (or its library) is missing."""
    if request.param == "cuda" and not ffi.has_cuda():
        pytest.skip(ffi.status())
    try:
        found = jax.devices(request.param)[0]
    except RuntimeError as error:
        pytest.skip(str(error))
    with jax.default_device(found):
        yield found


@pytest.fixture
def make_pool(device: jax.Device) -> Iterator[Callable[..., ffi.HostPool]]:
    """Make pools for the device under test; all are closed at the end."""
    made: list[ffi.HostPool] = []

    def make(n_pages: int, page_bytes: int, **options: int) -> ffi.HostPool:
        made.append(ffi.HostPool(n_pages, page_bytes, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
