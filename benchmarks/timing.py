"""How long a function takes on the device, without the host's part in it."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# On a GPU: everything of a loop's body in one CUDA graph, so that the host's launches are not what is timed.
GRAPH = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,CUDNN,CUBLAS,CUBLASLT", "xla_gpu_graph_min_graph_size": 1}
CHAINED = 4  # runs of a program, one waiting for the other on the device, beside one alone

Contender = tuple[Callable[[Any, Any], Any], Any, Sequence[Any]]


def loop(call: Callable[[Any, Any], Any], repeats: int, unroll: int) -> Callable[[Any, Sequence[Any]], Any]:
    """A jitted function that calls `call(carry, inputs)` `repeats * unroll` times for every one of several inputs.

    Calls depend on each other through the carry, so they run one after the other without a word from the host, and
    take turns over inputs that together are larger than the caches.
    """

    def body(_: Any, state: Any) -> Any:
        carry, inputs = state
        for one in [*inputs] * unroll:
            carry = call(carry, one)
        return carry, inputs

    options = GRAPH if jax.default_backend() == "gpu" else None
    return jax.jit(
        lambda carry, inputs: jax.lax.fori_loop(0, repeats, body, (carry, inputs))[0], compiler_options=options
    )


def seconds_per_call(
    contenders: dict[str, Contender],
    *,
    repeats: int,
    unroll: int = 1,
    rounds: int = 7,
    failures: dict[str, str] | None = None,
) -> dict[str, float]:
    """Median seconds of one call of each contender, measured in turns within one run.

    A call's time is the slope between one run of its loop and several runs in a chain: what it takes to dispatch a
    program and to wait for it is not in it.

    Args:
      contenders: name -> (call, first carry, inputs); see `loop`.
      failures: gets the message of every contender that does not compile or run, which is then left out; None raises.
    """
    compiled = {}
    for name, (call, carry, inputs) in contenders.items():
        try:
            run = loop(call, repeats, unroll)
            jax.block_until_ready(run(carry, inputs))
        except Exception as error:  # whatever one implementation cannot do, the others can be timed
            if failures is None:
                raise
            failures[name] = f"{type(error).__name__}: {error}"
            continue
        compiled[name] = run, carry, inputs
    taken: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, (run, carry, inputs) in compiled.items():
            alone, chained = _seconds(run, carry, inputs, 1), _seconds(run, carry, inputs, CHAINED)
            slope = (chained - alone) / (CHAINED - 1)
            # On a busy CPU the slope of something short may be noise; the whole is an upper bound.
            each = slope if slope > 0 else chained / CHAINED
            taken[name].append(each / repeats / unroll / len(inputs))
    return {name: statistics.median(values) for name, values in taken.items()}


def _seconds(run: Callable[[Any, Any], Any], carry: Any, inputs: Any, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        carry = run(carry, inputs)
    jax.block_until_ready(carry)
    return time.perf_counter() - start


def matmul_rate(size: int = 8192) -> float:
    """Floating-point operations per second of a large bfloat16 matrix product on random data."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16) / size**0.5
    taken = seconds_per_call({"product": (lambda c, b: c @ b, a, [b])}, repeats=8)
    return 2 * size**3 / taken["product"]
