"""What the swaps cost a decode step, on whatever device JAX runs on.

    python benchmarks/decode_step.py [--layers 4] [--batch 16] [--context 16384] [--out benchmarks/results]

Layers of the 8B shape with random weights over a cache of random contents. Four steps are timed side by side: the
whole cache in slots without the handlers; with the handlers, every block in a slot, so that nothing moves; and with
2C slots, where random queries want blocks that are not there, one after the other and with overlap. Beside each: the
bytes it reads over the memory bandwidth given, and the bytes it fetches over the link's; and on a GPU, the time in
which a profile shows kernels.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from device_trace import device_events

from nosa_jax import NosaConfig
from nosa_jax.ffi import HostPool
from nosa_jax.infer import FrozenModel, decode_step, step
from nosa_jax.infer.compiling import jit_in_place
from nosa_jax.infer.environment import environment
from nosa_jax.infer.random_contents import filled_state, random_model
from nosa_jax.offload import CacheLayout, DecodeState

PRESETS = {"8b": NosaConfig.nosa_8b, "1b": NosaConfig.nosa_1b, "tiny": NosaConfig.tiny}


@dataclass(frozen=True)
class Options:
    """Time decode steps with and without the handlers."""

    shape: Literal["8b", "1b", "tiny"] = "8b"
    layers: int = 4
    batch: int = 16
    context: int = 16_384
    steps: int = 50
    """Steps of one dispatch."""
    memory_gb_per_s: float = 4_300.0
    """Device memory bandwidth, for the floor."""
    link_gb_per_s: float = 55.0
    """Host link bandwidth, for the floor."""
    out: Path = Path("benchmarks/results")


def busy_seconds(model: FrozenModel, state: DecodeState, tokens: jax.Array) -> tuple[float, DecodeState]:
    """Seconds of a step in which the device runs something, the sum over its kernels and copies; 0 on a CPU."""
    steps = 8

    def run() -> None:
        nonlocal state
        for _ in range(steps):
            _, state = decode_step(model, state, tokens)
        jax.block_until_ready(state.logits)

    return sum(event.duration for event in device_events(run)) / steps / 1e6, state


def time_steps(model: FrozenModel, layout: CacheLayout, options: Options) -> dict[str, Any]:
    """Seconds of a step, within one dispatch of many and dispatched and awaited alone, and what the steps fetched."""
    pool = None
    if layout.offload:
        pool = HostPool(layout.max_batch * layout.n_blocks * layout.pages_per_block, layout.page_bytes)
    state = filled_state(layout, pool, options.context - 4 * options.steps - 60)
    tokens = jnp.zeros(layout.max_batch, jnp.int32)

    @partial(jit_in_place, donate_argnums=1)
    def many_steps(model: FrozenModel, state: DecodeState) -> DecodeState:
        return jax.lax.fori_loop(0, options.steps, lambda _, s: step(model, s, s.logits.argmax(-1))[1], state)

    state = many_steps(model, state)
    jax.block_until_ready(state.logits)
    before = int(np.sum(state.stats().total.misses))
    in_loop, single = [], []
    for _ in range(2):
        start = time.perf_counter()
        state = many_steps(model, state)
        jax.block_until_ready(state.logits)
        in_loop.append((time.perf_counter() - start) / options.steps)
    misses = (int(np.sum(state.stats().total.misses)) - before) / 2 / options.steps
    for _ in range(40):
        start = time.perf_counter()
        _, state = decode_step(model, state, tokens)
        jax.block_until_ready(state.logits)
        single.append(time.perf_counter() - start)
    busy, state = busy_seconds(model, state, tokens)
    if pool is not None:
        pool.check()
        pool.close()
    config = layout.config
    read = model.nbytes - config.vocab_size * config.embed_dim * 2  # all weights but the embedding
    read += sum(layer.pooled_k.nbytes for layer in state.layers)
    read += config.num_layers * layout.max_batch * config.num_kv_heads * layout.n_selected * layout.page_bytes
    fetched = misses * layout.page_bytes
    return {
        "step_seconds": min(in_loop),
        "single_step_seconds": statistics.median(single),
        "busy_seconds": busy,
        "fetched_bytes_per_step": fetched,
        "misses_per_layer_row_head": misses / (config.num_layers * layout.max_batch * config.num_kv_heads),
        "floor_memory_seconds": read / options.memory_gb_per_s / 1e9,
        "floor_link_seconds": fetched / options.link_gb_per_s / 1e9,
    }


def main() -> int:
    """Time the steps and write the figures."""
    options = tyro.cli(Options, description=__doc__)
    config = PRESETS[options.shape](num_layers=options.layers)
    model = random_model(config)
    n_blocks = config.num_blocks(options.context)
    needed = config.budget.total
    layouts = {
        "no handlers": CacheLayout(config, "nosa", options.batch, options.context, False, needed),
        "handlers, nothing moves": CacheLayout(config, "nosa", options.batch, options.context, True, n_blocks),
        "handlers, 2C slots": CacheLayout(config, "nosa", options.batch, options.context, True, 2 * needed),
        "overlap, 2C slots": CacheLayout(config, "nosa", options.batch, options.context, True, 2 * needed, True),
    }
    results = {}
    for name, layout in layouts.items():
        results[name] = time_steps(model, layout, options)
        print(name, {key: float(f"{value:.4g}") for key, value in results[name].items()}, flush=True)
    extra = {
        kind: (results["handlers, nothing moves"][kind] - results["no handlers"][kind]) / options.layers
        for kind in ("step_seconds", "busy_seconds")
    }
    print(
        f"handlers that move nothing cost {extra['busy_seconds'] * 1e6:.2f} us a layer of the device's time, "
        f"{extra['step_seconds'] * 1e6:.2f} us of a step's"
    )
    sizes = f"{options.layers} layers, {options.batch} rows, {options.context} tokens"
    report = {
        "environment": environment(),
        "shape": f"{options.shape} width, {sizes}, random weights",
        "steps": results,
        "handlers_seconds_per_layer": {"step": extra["step_seconds"], "busy": extra["busy_seconds"]},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decode_step.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
