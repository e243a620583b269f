"""The interpreter exits with pools open, and with an engine that serves: status 0 and nothing to say."""

import os
import subprocess
import sys

import pytest

POOL = """
import jax, jax.numpy as jnp
from nosa_jax import ffi

pool = ffi.HostPool(8, 1024)
load = ffi.TransferList(*(jnp.zeros(s, jnp.int32) for s in ((1, 1, 1), (1, 1, 1), (1, 1))))
cache, table = jnp.zeros((1, 1, 1, 2, 8, 32), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32)
step = jax.jit(lambda c: ffi.swap_in(pool.handle, c, load, table, layer=0, n_layers=1))
for _ in range(100):
    cache = step(cache)
print("end")
"""

ENGINE = """
from nosa_jax.infer import SamplingParams
from tests.infer.cases import offloaded, random_model

engine = offloaded(random_model())
serving = engine.serving()
serving.__enter__()
handle = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=20))
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(POOL, id="a pool in use"),
        pytest.param(
            ENGINE + "handle.result(); print('end')", marks=pytest.mark.slow, id="a thread that waits for requests"
        ),
        pytest.param(
            ENGINE + "next(iter(handle)); print('end')", marks=pytest.mark.slow, id="a thread in the midst of a request"
        ),
    ],
)
def test_o5_the_interpreter_exits_cleanly(script):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env=environment)
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")
