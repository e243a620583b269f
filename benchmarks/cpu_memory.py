"""Peak memory of a long training step and of a long prefill on the CPU, each in a process of its own.

    python benchmarks/cpu_memory.py [--train-tokens 16384] [--prefill-tokens 32768]

Beside each figure stands what attention scores of every query against every key would take by themselves.
"""

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.infer import Engine
from nosa_jax.infer.environment import environment
from nosa_jax.train import next_token_loss

MIB = 2**20


@dataclass(frozen=True)
class Options:
    """Measure peak memory on the CPU."""

    train_tokens: int = 16_384
    prefill_tokens: int = 32_768
    out: Path = Path("benchmarks/results/cpu_memory.json")
    part: Annotated[Literal["all", "train", "prefill"], tyro.conf.arg(help="one part runs in this very process")] = (
        "all"
    )


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(fn: Any) -> float:
    """Seconds of one call, its result awaited."""
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


def measure_train(n_tokens: int) -> dict[str, Any]:
    """Loss and gradients of one window with NOSA attention and rematerialisation."""
    config = NosaConfig.tiny()
    graph, parameters = nnx.split(NosaLM.from_config(config))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, n_tokens + 1)), jnp.int32)

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        mask = jnp.ones((1, n_tokens), bool)
        total, count = next_token_loss(nnx.merge(graph, parameters), tokens, mask, "nosa", remat=True)
        return total / count

    step = jax.jit(jax.value_and_grad(loss)).lower(parameters, tokens).compile()
    before = peak_mib()
    seconds = min(timed(lambda: step(parameters, tokens)) for _ in range(2))
    return {
        "tokens": n_tokens,
        "peak_mib": peak_mib(),
        "before_mib": before,
        "planned_temporaries_mib": step.memory_analysis().temp_size_in_bytes / MIB,
        "seconds": seconds,
        "all_scores_mib": config.num_heads * n_tokens**2 * 4 / MIB,
    }


def measure_prefill(n_tokens: int) -> dict[str, Any]:
    """Reading one prompt into an offloaded cache."""
    config = NosaConfig.tiny(max_context=2 * n_tokens)
    prompt = np.random.default_rng(0).integers(0, 256, n_tokens)
    before = peak_mib()
    sizes = dict(max_batch=1, max_context=n_tokens + config.block_size, prefill_chunk=n_tokens)
    with Engine(NosaLM.from_config(config), **sizes) as engine:
        seconds = [timed(lambda: engine.prefill([prompt]).logits) for _ in range(2)]
        return {
            "tokens": n_tokens,
            "peak_mib": peak_mib(),
            "before_mib": before,
            "seconds": seconds[1],
            "seconds_with_compilation": seconds[0],
            "host_pool_mib": engine.plan.host_bytes / MIB,
            "planned_device_mib": engine.plan.device_bytes / MIB,
            "all_scores_mib": config.num_heads * n_tokens**2 * 4 / MIB,
        }


def main() -> int:
    """Run both parts and write their figures."""
    options = tyro.cli(Options, description=__doc__)
    if options.part == "train":
        print(json.dumps(measure_train(options.train_tokens)))
        return 0
    if options.part == "prefill":
        print(json.dumps(measure_prefill(options.prefill_tokens)))
        return 0
    figures: dict[str, Any] = {"environment": environment() | {"cores": os.cpu_count()}}
    for part in ("train", "prefill"):
        command = [sys.executable, __file__, "--part", part]
        command += ["--train-tokens", str(options.train_tokens), "--prefill-tokens", str(options.prefill_tokens)]
        variables = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables)
        figures[part] = json.loads(done.stdout.splitlines()[-1])
        print(part, figures[part])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
