"""Compiles what a GPU runs for an H200, on a machine without one: `python compile_for_h200.py CASE`, with JAX's CUDA
plugin on the path. Prints a line of JSON: bytes of temporaries, elements of what is copied and joined, the plan's
bound, custom calls, loops.

XLA and the kernels' compiler need a description of the device, not the device. Only what runs is missing.
"""

import json
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nosa_jax import NosaConfig, NosaLM, selection
from nosa_jax.infer import compiling, decode, freeze, plan, prefill
from nosa_jax.infer.row_steps import steps_function
from nosa_jax.infer.sampling import empty_sampling
from nosa_jax.offload import CacheLayout, init_state
from nosa_jax.pallas_kernels import dispatch, sparse_attention

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def compile_for_h200(fn, *args, **jit_options):
    """The compiled program of `fn` for arguments of these shapes."""
    topology = topologies.get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1")
    sharding = NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    traced = jax.jit(fn, **jit_options).trace(*jax.tree.map(place, args))
    return traced.lower(lowering_platforms=("cuda",)).compile()


def options_on_a_gpu(rows: int):
    """XLA's options for decode steps, as they are where there is a GPU."""
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        return compiling.step_options(rows)


def decode_step(batch: int, context: int, *, offload: bool, overlap: bool = False, shape=NosaConfig.nosa_8b):
    config = shape(num_layers=2, param_dtype="bfloat16")
    layout = CacheLayout(config, "nosa", batch, context, offload, 2 * config.budget.total, overlap)
    model = jax.eval_shape(lambda: freeze(NosaLM.from_config(config)))
    state = jax.eval_shape(lambda: init_state(layout))
    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    options = options_on_a_gpu(batch)
    compiled = compile_for_h200(
        decode._step_in_place, model, state, tokens, donate_argnums=1, keep_unused=True, compiler_options=options
    )
    return compiled, plan.decode_bytes(layout)


def decode_steps(batch: int, context: int, *, steps: int, greedy: bool, overlap: bool = False):
    """What the engine dispatches: steps with their sampling, in a loop."""
    config = NosaConfig.nosa_8b(num_layers=2, param_dtype="bfloat16")
    layout = CacheLayout(config, "nosa", batch, context, True, 2 * config.budget.total, overlap)
    model = jax.eval_shape(lambda: freeze(NosaLM.from_config(config)))
    state = jax.eval_shape(lambda: init_state(layout))
    sampling = jax.eval_shape(lambda: empty_sampling(batch))
    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def run(*args):
        return steps_function(batch).__wrapped__(*args, steps=steps, greedy=greedy, record=False)

    options = options_on_a_gpu(batch)
    compiled = compile_for_h200(
        run, model, state, tokens, sampling, donate_argnums=(1, 2, 3), keep_unused=True, compiler_options=options
    )
    return compiled, plan.decode_bytes(layout)


def prefill_layer(context: int, piece: int):
    config = NosaConfig.nosa_8b(num_layers=1, param_dtype="bfloat16")
    layout = CacheLayout(config, "nosa", 1, context, True, 2 * config.budget.total)
    state = jax.eval_shape(lambda: init_state(layout))
    graph, parameters = nnx.split(nnx.eval_shape(lambda: NosaLM.from_config(config)).layers[0])
    number = jax.ShapeDtypeStruct((), jnp.int32)
    x = jax.ShapeDtypeStruct((1, piece, config.embed_dim), jnp.bfloat16)

    def layer(parameters, x, cache, *rest):
        run = prefill._prefill_layer.__wrapped__
        return run(graph, parameters, x, cache, *rest, layout=layout, earlier=0 if piece == context else context)

    rest = (*[number] * 5, state.page_table, state.handle)
    cache = jax.tree.leaves(state.layers[0])
    compiled = compile_for_h200(layer, parameters, x, cache, *rest, donate_argnums=(1, 2))
    return compiled, plan.prefill_bytes(config, context, piece)


def attention(length: int, *, heads: int, kv_heads: int, head_dim: int, gradient: bool, block_size: int = 64):
    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    def run(q, k, v, cis, ids):
        return sparse_attention(q, k, v, cis, ids, block_size=block_size)

    def loss(*args):
        return run(*args).astype(jnp.float32).sum()

    arrays = (
        shape(1, length, heads, head_dim), shape(1, length, kv_heads, head_dim), shape(1, length, kv_heads, head_dim),
        shape(1, length, kv_heads, dtype=jnp.float32), shape(1, length, kv_heads, 64, dtype=jnp.int32),
    )  # fmt: skip
    return compile_for_h200(jax.grad(loss, argnums=(0, 1, 2, 3)) if gradient else run, *arrays), None


CASES = {
    "decode, offloaded": lambda: decode_step(16, 65_536, offload=True),
    "decode, resident": lambda: decode_step(4, 65_536, offload=False),
    "decode, eight steps at once": lambda: decode_steps(16, 65_536, steps=8, greedy=False),
    "decode, overlapped": lambda: decode_step(16, 65_536, offload=True, overlap=True),
    "decode, many rows of small matrices": lambda: decode_step(
        64, 65_536, offload=True, overlap=True, shape=NosaConfig.nosa_1b
    ),
    "decode, eight steps at once, overlapped": lambda: decode_steps(16, 65_536, steps=8, greedy=False, overlap=True),
    "prefill, 128K at once": lambda: prefill_layer(131_072, 131_072),
    "prefill, a piece of 128K": lambda: prefill_layer(131_072, 8192),
    "attention": lambda: attention(131_072, heads=32, kv_heads=2, head_dim=128, gradient=False),
    "attention, gradient": lambda: attention(131_072, heads=32, kv_heads=2, head_dim=128, gradient=True),
    "attention, gradient, small heads": lambda: attention(4096, heads=6, kv_heads=2, head_dim=64, gradient=True),
    "attention, gradient, 192": lambda: attention(16_384, heads=16, kv_heads=2, head_dim=192, gradient=True),
    "attention, gradient, 256": lambda: attention(
        16_384, heads=16, kv_heads=2, head_dim=256, gradient=True, block_size=256
    ),
}


def made_by(operation: str, text: str) -> list[int]:
    """Elements of every result of an operation in a compiled program, ascending."""
    shapes = re.findall(rf" = \w+\[([\d,]+)\]\S* {operation}\(", text)
    return sorted(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)


def main() -> None:
    for module in (dispatch, selection, plan):
        module.why_no_kernels = lambda: None  # there is no device to ask
    compiled, bound = CASES[sys.argv[1]]()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    print(
        json.dumps(
            {
                "temporaries": memory.temp_size_in_bytes,
                "not_aliased": memory.output_size_in_bytes - memory.alias_size_in_bytes,
                "copied": made_by("copy", text),
                "joined": made_by("concatenate", text),
                "bound": bound,
                "calls": text.count('custom_call_target="mosaic_gpu_v2"'),
                "trips": [int(n) for n in re.findall(r'"known_trip_count":\{"n":"(\d+)"', text)],
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
