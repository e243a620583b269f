"""Which handlers there are on platform CUDA, and what they say where they were not built."""

import jax
import jax.numpy as jnp
import pytest

from nosa_jax import ffi
from nosa_jax.ffi import _cpu, registration


def test_every_cuda_handler_has_one_that_stands_in_for_it():
    assert _cpu.not_built_handlers().keys() > _cpu.handlers().keys()
    if not ffi.has_cuda():
        pytest.skip(ffi.status())
    from nosa_jax.ffi import _cuda

    assert _cpu.not_built_handlers().keys() == _cuda.handlers().keys()


def test_without_the_cuda_library_all_names_are_registered(monkeypatch):
    monkeypatch.setattr(registration, "has_cuda", lambda: False)
    assert registration.cuda_handlers().keys() == _cpu.not_built_handlers().keys()


@pytest.mark.parametrize("name", _cpu.not_built_handlers())
def test_a_handler_that_was_not_built_says_how_to_build_it(name):
    """Under another name, on the CPU; any operands, results and attributes are taken."""
    jax.ffi.register_ffi_target(f"{name}_not_built", _cpu.not_built_handlers()[name], platform="cpu")

    @jax.jit
    def step(x):
        call = jax.ffi.ffi_call(f"{name}_not_built", (jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2)
        return call(x, x.astype(jnp.int32), layer=3)

    says = rf"{name}: nosa_jax.ffi was built without its CUDA library.*nvcc >= 12\.8.*`make setup`"
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        jax.block_until_ready(step(jnp.ones((2, 3))))
