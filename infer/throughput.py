"""How many tokens a second a system decodes, over a cache that is filled at once or by reading text."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from nosa_jax.ffi import HostPool
from nosa_jax.infer.bench_text import read_state, stretches
from nosa_jax.infer.compiling import jit_in_place, step_options
from nosa_jax.infer.decode import step
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.plan import decode_bytes
from nosa_jax.infer.random_contents import filled_state
from nosa_jax.infer.rates import DeviceRates
from nosa_jax.infer.systems import System
from nosa_jax.infer.trace import SelectionTrace
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import init_state

WARM_UP_STEPS = 64  # until tables of 2C slots hold what a replayed trace leaves in them
BY_WEIGHTS, EVERY_BLOCK = "as it comes from the weights", "every block is attended to"


@dataclass(frozen=True)
class Timing:
    """How a row is timed: `rounds` times at least `steps` steps, of `steps_per_dispatch` each, and the median taken.

    A round begins with an idle device, which waits for the first dispatch: with `steps` as many as this, the host's
    time for that one adds about half a percent.
    """

    steps: int = 128
    rounds: int = 3
    steps_per_dispatch: int = 8

    @property
    def dispatches(self) -> int:
        """Of one round."""
        return max(1, round(self.steps / self.steps_per_dispatch))

    @property
    def warm_up_dispatches(self) -> int:
        """Before the first round."""
        return -(-WARM_UP_STEPS // self.steps_per_dispatch)

    @property
    def total_steps(self) -> int:
        """Steps of everything: warming up, the rounds, and dispatches that are timed without waiting."""
        return (self.warm_up_dispatches + self.rounds * (self.dispatches + 1)) * self.steps_per_dispatch


@dataclass(frozen=True)
class Measurement:
    """One system at one batch and context.

    step_seconds: of one decode step, the median of several rounds. host_seconds: of it, what the host needs to dispatch
    a step to an idle device, without waiting. misses: per layer, row and KV head of a step.
    fetched_bytes: per step, from the host. read_bytes: weights, pooled keys and attended pages of a step.
    floor_seconds: the larger of what the two memories need for them. locality: where the selection comes from.
    planned_bytes: of every part of the device's memory. program_bytes: what the compiled program takes beside its
    arguments. allocator: bytes in use while the row is measured, and the most in use since the process began; None
    where the backend does not tell. shared_pages: how many rows' blocks share a host page, 1 where each has its own.
    trace_seconds: of compile_seconds, until XLA had the program; others were compiled meanwhile.
    """

    system: str
    context: int
    batch: int
    slots: int
    device_budget: str | None
    steps_per_dispatch: int
    overlap: bool
    step_seconds: float
    round_seconds: tuple[float, ...]
    host_seconds: float
    misses: float
    fetched_bytes: float
    read_bytes: float
    floor_seconds: float
    locality: str
    planned_bytes: dict[str, int]
    program_bytes: int
    allocator: dict[str, int] | None
    shared_pages: float
    trace_seconds: float
    compile_seconds: float
    fill_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together."""
        return self.batch / self.step_seconds

    @property
    def selection(self) -> str:
        """In a word, where the selection comes from: weights, synthetic, recorded, or every block."""
        words = {BY_WEIGHTS: "weights", EVERY_BLOCK: "every block"}
        return words.get(self.locality) or ("synthetic" if self.locality.startswith("synthetic: ") else "recorded")

    @property
    def of_floor(self) -> float:
        """Step time as a multiple of the floor."""
        return self.step_seconds / self.floor_seconds

    @property
    def device_bytes(self) -> int:
        """Planned in all."""
        return sum(self.planned_bytes.values())


@dataclass(frozen=True)
class Program:
    """Decode steps of one layout compiled ahead: a function of (the model's leaves, the state's, picks)."""

    layout: CacheLayout
    run: Callable[[list[Any], list[Any], jax.Array | None], list[Any]]
    structure: Any = field(repr=False)  # of the state
    temporary_bytes: int
    trace_seconds: float  # until XLA had the program
    seconds: float  # in all


def beside_weights(layout: CacheLayout) -> int:
    """Device bytes of a layout beside the weights: the cache and a step's workspace."""
    return layout.device_bytes() + decode_bytes(layout)


def compile_steps(
    model: FrozenModel,
    layout: CacheLayout,
    steps: int,
    picks: jax.Array | None,
    compiler_options: dict[str, Any] | None = None,
) -> Program:
    """Compile a program of `steps` greedy decode steps; from several threads at once, if wanted.

    It takes leaves, not trees: taking those apart would be part of every dispatch that is timed.
    picks: [trace steps, streams, picks] to replay, of which the shape counts; None attends to what is selected.
    compiler_options: of XLA, by name, beside those that decode steps have anyway.
    """
    start = time.perf_counter()
    leaves, structure = jax.tree.flatten(model)
    state_structure: Any = None

    def empty() -> list[Any]:
        nonlocal state_structure
        state_leaves, state_structure = jax.tree.flatten(init_state(layout))
        return state_leaves

    def many(leaves: list[Any], state_leaves: list[Any], picks: jax.Array | None) -> list[Any]:
        model = jax.tree.unflatten(structure, leaves)

        def one(_: jax.Array, state: Any) -> Any:
            now = None if picks is None else picks[state.step % picks.shape[0]]
            return step(model, state, state.logits.argmax(-1).astype(jnp.int32), picks=now)[1]

        state = jax.tree.unflatten(state_structure, state_leaves)
        return jax.tree.leaves(one(jnp.zeros(()), state) if steps == 1 else jax.lax.fori_loop(0, steps, one, state))

    options = (step_options(layout.max_batch, replayed=picks is not None) or {}) | (compiler_options or {})
    jitted = jit_in_place(many, donate_argnums=1, compiler_options=options or None)
    lowered = jitted.lower(leaves, jax.eval_shape(empty), picks)
    traced = time.perf_counter() - start
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes if memory else 0
    return Program(layout, compiled, state_structure, beside, traced, time.perf_counter() - start)


def measure(
    model: FrozenModel,
    system: System,
    program: Program,
    *,
    rates: DeviceRates,
    timing: Timing,
    trace: SelectionTrace | None = None,
    picks: jax.Array | None = None,
    pool: HostPool | None = None,
    device_budget: str | None = None,
    text: Int[np.ndarray, " n"] | None = None,
) -> Measurement:
    """Time decode steps of a full batch just below the context of the program's layout.

    Args:
      program: of `timing.steps_per_dispatch` steps.
      trace, picks: what is replayed, and the same on the device; None for what the weights select.
      pool: host pages for an offloaded system; the caller's, since pinning many takes seconds.
      device_budget: that the batch was chosen for, to be noted.
      text: token ids to fill the cache with, a stretch for each row, by the engine's prefill; None for random contents.

    Raises:
      ValueError: an offloaded system without a pool.
      InputError: a text, and a pool that cannot hold one for every row.
    """
    layout, config = program.layout, model.config
    if layout.offload and pool is None:
        raise ValueError(f"{system.name} keeps its blocks in host memory and needs a pool")
    steps = timing.steps_per_dispatch
    start = time.perf_counter()
    length, pages = layout.max_context - timing.total_steps - 1, pool if layout.offload else None
    if text is None:
        first = filled_state(layout, pages, length)
    else:
        first = read_state(model, layout, pages, stretches(text, layout.max_batch, length))
    leaves, state = jax.tree.leaves(model), jax.block_until_ready(jax.tree.leaves(first))
    del first  # its arrays are given away by the first dispatch
    fill_seconds = time.perf_counter() - start

    def counted(state: list[Any]) -> int:
        return int(np.asarray(jax.tree.unflatten(program.structure, state).total.misses).sum(dtype=np.int64))

    for _ in range(timing.warm_up_dispatches):
        state = program.run(leaves, state, picks)
    before, taken = counted(state), []
    for _ in range(timing.rounds):
        start = time.perf_counter()
        for _ in range(timing.dispatches):
            state = program.run(leaves, state, picks)
        jax.block_until_ready(state)
        taken.append((time.perf_counter() - start) / timing.dispatches / steps)
    misses = (counted(state) - before) / timing.rounds / timing.dispatches / steps
    dispatching = []
    for _ in range(timing.rounds):
        start = time.perf_counter()
        state = program.run(leaves, state, picks)
        dispatching.append((time.perf_counter() - start) / steps)
        jax.block_until_ready(state)
    if layout.offload and pool is not None:
        pool.check()
    told = allocator_bytes()
    groups = pool.n_pages // layout.pages_per_block if layout.offload and pool is not None else 0
    read = read_bytes(model, system, layout)
    fetched = misses * layout.page_bytes
    return Measurement(
        system=system.name,
        context=layout.max_context,
        batch=layout.max_batch,
        slots=layout.n_slots,
        device_budget=device_budget,
        steps_per_dispatch=steps,
        overlap=layout.overlap,
        step_seconds=statistics.median(taken),
        round_seconds=tuple(taken),
        host_seconds=statistics.median(dispatching),
        misses=misses / (config.num_layers * layout.max_batch * config.num_kv_heads),
        fetched_bytes=float(fetched),
        read_bytes=float(read),
        floor_seconds=max(read / rates.memory, fetched / rates.link),
        locality=_locality(system, trace),
        planned_bytes={
            "parameters": model.nbytes,
            **{item.name: item.nbytes for item in layout.device_items()},
            "workspace": decode_bytes(layout),
        },
        program_bytes=program.temporary_bytes,
        allocator=told,
        shared_pages=max(1.0, layout.max_batch * layout.n_blocks / groups) if groups else 1.0,
        trace_seconds=program.trace_seconds,
        compile_seconds=program.seconds,
        fill_seconds=fill_seconds,
    )


def allocator_bytes() -> dict[str, int] | None:
    """Bytes that the device's allocator has given out now, and at most since the process began; None if it is mute."""
    told = jax.devices()[0].memory_stats() or {}
    if "bytes_in_use" not in told:
        return None
    return {"in_use": told["bytes_in_use"], "peak_of_process": told.get("peak_bytes_in_use", 0)}


def _locality(system: System, trace: SelectionTrace | None) -> str:
    if system.attention == "dense":
        return EVERY_BLOCK
    return BY_WEIGHTS if trace is None else trace.origin


def read_bytes(model: FrozenModel, system: System, layout: CacheLayout) -> int:
    """Bytes of device memory that a step must read: all weights but the embedding, pooled keys, attended pages."""
    config = layout.config
    itemsize = jnp.dtype(config.dtype).itemsize
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.embed_dim * itemsize
    per_head = min(layout.n_selected, layout.n_blocks) * layout.page_bytes
    if layout.reads_pooled_keys:
        per_head += config.num_windows(layout.max_context) * config.head_dim * itemsize
    return model.nbytes - embedding + config.num_layers * layout.max_batch * config.num_kv_heads * per_head
