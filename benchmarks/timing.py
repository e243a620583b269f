"""How long a function takes on the device, without the host's part in it."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

# On a GPU: everything of a loop's body in one CUDA graph, so that the host's launches are not what is timed.
GRAPH = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,CUDNN,CUBLAS,CUBLASLT", "xla_gpu_graph_min_graph_size": 1}
CHAINED = 4  # runs of a program, one waiting for the other on the device, beside one alone

Contender = tuple[Callable[[Any, Any], Any], Any, Sequence[Any]]


def loop(call: Callable[[Any, Any], Any], repeats: int, unroll: int, *, donate: bool = False) -> jax.stages.Wrapped:
    """A jitted function that calls `call(carry, inputs)` `repeats * unroll` times for every one of several inputs.

    Calls depend on each other through the carry, so they run one after the other without a word from the host, and
    take turns over inputs that together are larger than the caches. With `donate` the carry is updated in place.
    """

    def body(_: Any, state: Any) -> Any:
        carry, inputs = state
        for one in [*inputs] * unroll:
            carry = call(carry, one)
        return carry, inputs

    options = GRAPH if jax.default_backend() == "gpu" else None
    return jax.jit(
        lambda carry, inputs: jax.lax.fori_loop(0, repeats, body, (carry, inputs))[0],
        compiler_options=options,
        donate_argnums=(0,) if donate else (),
    )


def seconds_per_call(
    contenders: dict[str, Contender],
    *,
    repeats: int,
    unroll: int = 1,
    rounds: int = 7,
    failures: dict[str, str] | None = None,
    donate: bool = False,
) -> dict[str, float]:
    """Median seconds of one call of each contender, measured in turns within one run.

    A call's time is the slope between one run of its loop and several runs in a chain: what it takes to dispatch a
    program and to wait for it is not in it.

    Args:
      contenders: name -> (call, first carry, inputs); see `loop`.
      failures: gets the message of every contender that does not compile or run, which is then left out; None raises.
      donate: update a large carry in place instead of copying it whenever a loop begins; it goes on from run to run.
    """
    compiled: dict[str, _Run] = {}
    # Compiling is most of a short measurement's time, and does not hold Python's lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        waiting = {}
        for name, (call, carry, inputs) in contenders.items():
            with _noted(name, failures):
                lowered = loop(call, repeats, unroll, donate=donate).lower(carry, inputs)
                waiting[name] = pool.submit(lowered.compile)
        for name, future in waiting.items():
            with _noted(name, failures):
                _, carry, inputs = contenders[name]
                run = _Run(future.result(), carry, inputs, donate)
                run.seconds(1)
                compiled[name] = run
    taken: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, run in compiled.items():
            alone, chained = run.seconds(1), run.seconds(CHAINED)
            slope = (chained - alone) / (CHAINED - 1)
            # On a busy CPU the slope of something short may be noise; the whole is an upper bound.
            each = slope if slope > 0 else chained / CHAINED
            taken[name].append(each / repeats / unroll / len(run.inputs))
    return {name: statistics.median(values) for name, values in taken.items()}


@contextmanager
def _noted(name: str, failures: dict[str, str] | None) -> Iterator[None]:
    """Keeps the message of an error instead of raising it: what one implementation cannot do, the others can."""
    try:
        yield
    except Exception as error:
        if failures is None:
            raise
        failures[name] = f"{type(error).__name__}: {error}"


class _Run:
    """A compiled loop and its first carry: always the same, or with `donate` a copy that goes on from run to run."""

    def __init__(
        self, program: Callable[[Any, Sequence[Any]], Any], carry: Any, inputs: Sequence[Any], donate: bool
    ) -> None:
        self.program, self.inputs, self.donate = program, inputs, donate
        self.carry = jax.tree.map(jnp.copy, carry) if donate else carry

    def seconds(self, times: int) -> float:
        """Of so many runs, each waiting for the one before."""
        carry = self.carry
        start = time.perf_counter()
        for _ in range(times):
            carry = self.program(carry, self.inputs)
        jax.block_until_ready(carry)
        taken = time.perf_counter() - start
        if self.donate:
            self.carry = carry
        return taken


def matmul_rate(size: int = 8192) -> float:
    """Floating-point operations per second of a large bfloat16 matrix product on random data."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16) / size**0.5
    taken = seconds_per_call({"product": (lambda c, b: c @ b, a, [b])}, repeats=8)
    return 2 * size**3 / taken["product"]
