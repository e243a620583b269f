"""One computation over two memories, on a GPU: where streams, captured graphs and real device memory are at stake."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import jax
import numpy as np
import pytest

from nosa_jax.pallas_kernels import dispatch
from tests.infer.cases import (
    FOR_KERNELS,
    ONE_LAYER,
    C,
    offloaded,
    random_model,
    random_tokens,
    resident,
    run_steps,
)  # fmt: skip
from tests.offload.disturbed import Disturbed, poison_empty_slots

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def gpu():
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(str(error))
    with jax.default_device(device):
        yield device


GRAPHS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "default": "",
    "forced": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN "
    "--xla_gpu_graph_min_graph_size=1",
}
GENERATE = """
import sys
import jax, numpy as np
from nosa_jax.infer import SamplingParams, step
from tests.infer.cases import FOR_KERNELS, SMALL, offloaded, random_model, random_tokens, run_steps
config, lengths, options = {
    "float32": (SMALL, (33, 11, 64), {}),
    "kernels": (FOR_KERNELS.replace(num_layers=2), (180, 33, 150), dict(max_batch=3, max_context=240, overlap=True)),
}[sys.argv[1]]
model, rows = random_model(config), len(lengths)
with offloaded(model, **options) as engine:
    prompts = [random_tokens(n, seed=n) for n in lengths]
    given = random_tokens((engine.layout.max_batch, 24), seed=9)
    state = engine.prefill(prompts)
    lowered = jax.jit(step).lower(model, state, given[:, 0]).as_text()
    print("lists", lowered.count("nosa_list_blocks"))
    trace = run_steps(model, state, given)
    engine.check()
    print("misses", trace.misses.sum() > 20)
    print(trace.logits.argmax(axis=-1)[:, :rows].tolist(), np.isfinite(trace.logits[:, :rows]).all())
    print(trace.misses[:, :, :rows].tolist(), trace.ids[:, :, :rows].tolist())
    print([r.tokens for r in engine.generate(prompts, SamplingParams(max_new_tokens=14))])
"""


HOLD_A_STATE = """
import gc, json, sys
import jax, numpy as np
from nosa_jax.infer import Engine, decode_step
from tests.infer.cases import SMALL, random_model, random_tokens
config = SMALL.replace(
    embed_dim=64, num_layers=4, head_dim=128, block_size=64, pool_window=32, pool_stride=16, local_blocks=3,
    dtype="bfloat16", max_context=2**17,
)
model, rows, device = random_model(config), 2, jax.devices("cuda")[0]
gc.collect()
before = device.memory_stats()["bytes_in_use"]
engine = Engine(model, max_batch=rows, max_context=int(sys.argv[1]), slots=2 * config.budget.total)
state = engine.prefill([random_tokens(200), random_tokens(100)])
for _ in range(3):
    logits, state = decode_step(model, state, np.zeros(rows, np.int32))
jax.block_until_ready(state)
del logits
gc.collect()
print(json.dumps({
    "rows": rows,
    "in_use": device.memory_stats()["bytes_in_use"] - before,
    "arrays": sum(x.nbytes for x in jax.tree.leaves(state)),
    "formula": engine.layout.bytes_per_token(),
    "kv_bytes": 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2,
}))
"""


@pytest.mark.timeout(450)
@pytest.mark.parametrize("model", ["float32", "kernels"])
def test_j3_cuda_graphs_off_on_by_default_and_forced_give_the_same_tokens(model):
    """J3: 24 steps by hand and 14 through `generate`, each setting in a process of its own; in float32 through XLA,
    and in 16 bits with overlap, through `list_blocks` and the kernels."""
    if model == "kernels" and (reason := dispatch.why_no_kernels()):
        pytest.skip(reason)
    outcomes = {}
    for name, flags in GRAPHS.items():
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flags}".strip(),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        command = [sys.executable, "-c", GENERATE, model]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=140, check=False)
        assert run.returncode == 0, run.stderr
        outcomes[name] = run.stdout
    lists, misses, logits, *_ = outcomes["off"].splitlines()
    assert (int(lists.split()[1]) > 0) is (model == "kernels"), "steps that are not those of this case"
    assert misses == "misses True"
    assert logits.endswith(" True"), "logits that are not finite have no largest"
    assert outcomes["off"] == outcomes["default"] == outcomes["forced"]


@pytest.mark.parametrize(
    ("config", "overlap"), [(ONE_LAYER, False), (ONE_LAYER, True), (FOR_KERNELS, True)], ids=["", "overlap", "kernels"]
)
def test_o1_a_delay_before_the_kv_write_and_every_freed_slot_poisoned(config, overlap):
    """O1: C + 1 slots; a slot is filled with NaN when its block is evicted; keys arrive late at the tail block, so that
    a write to the host or an attention that did not wait would see what was there before."""
    model, prompts = random_model(config), [random_tokens(33), random_tokens(11)]
    options = dict(max_batch=2, max_context=33 + 200)
    with offloaded(model, slots=C + 1, overlap=overlap, **options) as engine, Disturbed(delay=2048) as disturbed:
        moved = run_steps(model, poison_empty_slots(engine.prefill(prompts)), 200, disturbed.step)
        engine.check()
    assert disturbed.traced == {"attend_while_fetching" if overlap else "bring_in": config.num_layers}
    stayed = run_steps(model, resident(model, **options).prefill(prompts), 200)
    np.testing.assert_array_equal(moved.logits, stayed.logits)
    np.testing.assert_array_equal(moved.ids, stayed.ids)
    assert moved.misses.sum() > (100 if config is ONE_LAYER else 10)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_o1_repeated_through_the_kernels_at_several_batch_sizes(batch):
    """O1: 20 repeats of 200 steps in 16 bits, with overlap at 32 rows, where an engine chooses it by itself."""
    config = FOR_KERNELS.replace(num_layers=2)
    block, budget = config.block_size, config.budget.total * config.block_size
    lengths = [budget + 1, 1, block - 1, block, block + 1, budget - 5, budget - 1, budget]
    model, prompts = random_model(config), [random_tokens(lengths[i % 8], seed=i) for i in range(batch)]
    options = dict(max_batch=batch, max_context=max(lengths) + 200)
    stayed = run_steps(model, resident(model, **options).prefill(prompts), 200)
    for _ in range(20):
        with offloaded(model, overlap=batch == 32, **options) as engine:
            moved = run_steps(model, engine.prefill(prompts), 200)
            engine.check()
        assert moved.logits.tobytes() == stayed.logits.tobytes()
        np.testing.assert_array_equal(moved.ids, stayed.ids)
        assert moved.misses.sum() > 10


def test_o7_device_memory_grows_with_context_as_the_formula_says():
    """O7: bytes in use on the device with the state of an engine of 32K, 64K and 128K tokens, after steps.

    Each in a process of its own that takes its memory in one piece: of memory that somebody freed, or that was taken
    piece by piece, the allocator hands out more than is asked for, and counts it.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.02"}

    def told(context: int) -> dict[str, int]:
        command = [sys.executable, "-c", HOLD_A_STATE, str(context)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=140, check=False)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout.splitlines()[-1])

    contexts = (2**15, 2**16, 2**17)
    with ThreadPoolExecutor(len(contexts)) as threads:
        found = list(threads.map(told, contexts))
    for (short, before), (long, after) in pairwise(zip(contexts, found, strict=True)):
        slope = (after["in_use"] - before["in_use"]) / (long - short) / after["rows"]
        print(f"{short} to {long} tokens: {slope:.2f} bytes per token, {before}, {after}")
        assert slope == pytest.approx(after["formula"], rel=0.03)
        assert after["in_use"] == pytest.approx(after["arrays"], rel=0.03), "nothing else is held"
        assert slope < after["kv_bytes"] / 8
