"""The compiled decode step: in place, without large temporaries, compiled once (CASES J2 and J4, promise 4)."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from nosa_jax.infer import Engine, RequestStatus, SamplingParams, decode_step, freeze, step
from nosa_jax.infer.compiling import jit_in_place
from nosa_jax.infer.warm_up import pieces_to_compile
from nosa_jax.offload import CacheLayout, init_state
from tests.infer.cases import ONE_LAYER, ROWS, SMALL, C, P, offloaded, random_model, random_tokens


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Collects one entry per program that XLA compiles meanwhile."""
    compiled: list[str] = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(f"{seconds:.3f} s")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_frozen_model_is_a_tuple_of_arrays_to_jax():
    """Taking it apart in every call costs no Python of Flax, and models of one config share their programs."""
    model, other = (freeze(random_model(SMALL)) for _ in range(2))
    structure = jax.tree.structure(model)
    assert structure.num_nodes == 2 + len(model.arrays) == 2 + structure.num_leaves  # the model, and its one tuple
    assert structure == jax.tree.structure(other)
    assert [id(x) for x in jax.tree.leaves(model.parameters)] == [id(x) for x in model.arrays]
    assert [id(x) for x in jax.tree.leaves(nnx.state(model.module()))] == [id(x) for x in model.arrays]


@pytest.mark.parametrize("offload", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_j2_no_temporary_as_large_as_a_layers_slots(offload):
    """J2: the whole state is aliased, and all temporaries together are smaller than the slots of one layer."""
    config = SMALL.replace(block_size=16, head_dim=32, max_context=2**15)
    layout = CacheLayout(config, "nosa", 2, 2**14, offload, 512)
    model, structure = random_model(config), jax.tree.structure(init_state(layout))

    def advance(model, leaves, tokens):
        logits, state = step(model, structure.unflatten(leaves), tokens)
        return jax.tree.leaves(state), logits

    shapes = jax.eval_shape(lambda: jax.tree.leaves(init_state(layout)))
    tokens = jax.ShapeDtypeStruct((2,), jnp.int32)
    compiled = jit_in_place(advance, donate_argnums=1).lower(model, shapes, tokens).compile()
    memory = compiled.memory_analysis()
    slots = 2 * config.num_kv_heads * layout.n_slots * layout.page_bytes
    print(f"temporaries {memory.temp_size_in_bytes:,} B, one layer's slots {slots:,} B")
    assert memory.temp_size_in_bytes < slots / 2
    assert memory.alias_size_in_bytes >= layout.device_bytes()


def test_j2_the_cache_stays_where_it_is_and_the_old_state_is_gone():
    """J2: ten steps with the same buffers, each leaf in its own, so that CUDA graphs of a step need no new addresses; a
    state that was stepped cannot be used again."""
    model = random_model()
    with offloaded(model) as engine:
        state = engine.prefill([random_tokens(33), random_tokens(11)])
        places = [layer.slots.unsafe_buffer_pointer() for layer in state.layers]
        _, state = decode_step(model, state, np.zeros(ROWS, np.int32))
        assert [layer.slots.unsafe_buffer_pointer() for layer in state.layers] == places
        # From here on all of them; a small array that came from the host may have had memory that NumPy owns.
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
        for t in range(9):
            old = state
            _, state = decode_step(model, state, np.full(ROWS, t, np.int32))
            assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] == places
        with pytest.raises(
            ValueError, match=r"this state was given to an earlier decode_step.*go on with the state that"
        ):
            decode_step(model, old, np.zeros(ROWS, np.int32))
        # The refused call has not touched the new one.
        assert np.isfinite(decode_step(model, state, np.zeros(ROWS, np.int32))[0]).all()


def on_a_mesh() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())


@pytest.mark.parametrize(
    ("place", "rows"),  # as many rows, and so wide a model, as in no other test: nothing is compiled already
    [
        pytest.param(None, 7, marks=pytest.mark.slow, id="made here"),
        pytest.param(lambda: SingleDeviceSharding(jax.devices()[0]), 11, id="of a checkpoint"),
        pytest.param(on_a_mesh, 13, marks=pytest.mark.slow, id="trained here"),
    ],
)
def test_warm_up_compiles_each_program_once_and_requests_compile_none(place, rows, caplog):
    """Promise 4 where parameters are committed to a device, too. Programs that read prompts are compiled several at a
    time ahead, and the requests that are run then find them."""
    model = freeze(random_model(ONE_LAYER.replace(embed_dim=8 * rows)))
    if place is not None:
        model = jax.device_put(model, place())
    with Engine(model, max_batch=rows, max_context=60, prefill_chunk=16) as engine:
        pieces = pieces_to_compile(engine.plan)
        assert len({earlier for _, earlier in pieces}) > 2
        with caplog.at_level("WARNING"):
            jax.config.update("jax_log_compiles", True)  # in all threads, unlike `jax.log_compiles`
            try:
                engine.warm_up()
            finally:
                jax.config.update("jax_log_compiles", False)
        with count_compilations() as compiled:
            kept, ended = (engine.submit(random_tokens(n), SamplingParams(max_new_tokens=6)) for n in (40, 9))
            while ended.status is not RequestStatus.DECODING:
                engine._driver.turn(lambda: True)
            ended.cancel()
            engine.run_until_idle()
            assert (kept.result().finish_reason, ended.result().finish_reason) == ("length", "cancelled")
        assert compiled == []
    counts = Counter(re.findall(r"^Compiling jit\((\w+)\)", "\n".join(caplog.messages), re.MULTILINE))
    assert counts["_prefill_layer"] == len(pieces)
    assert counts["_embed"] == counts["_last_logits"] == len({length for length, _ in pieces})
    assert counts["generate_steps"] == counts["first_token"] == 2  # greedy, and with a temperature
    assert counts["_start_row"] == counts["_set_row"] == counts["deactivate"] == 1


def test_a_warm_up_that_fails_gives_up_what_has_not_begun(monkeypatch):
    """And the engine goes on: it compiles what requests need."""
    begun = []

    def fails(model, layout, *sizes):
        begun.append(sizes)
        if len(begun) > 1:
            time.sleep(1)  # begun already when the first one's failure is noticed
        raise RuntimeError("out of memory")

    with Engine(random_model(ONE_LAYER), max_batch=2, max_context=60, prefill_chunk=16) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("nosa_jax.infer.prefill._compile_layer", fails)
            patch.setattr("nosa_jax.infer.prefill._COMPILING_TOGETHER", 1)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.warm_up()
        assert len(begun) <= 2 < len(pieces_to_compile(engine.plan))
        assert len(engine.generate([[1, 2]], SamplingParams(max_new_tokens=2))[0].tokens) == 2


@pytest.mark.parametrize("at_once", [1, 2])
def test_j2_dispatches_of_an_engine_move_nothing(at_once):
    """J2: state, tokens and sampling stay where they are, leaf by leaf, while no request comes or goes."""
    with Engine(random_model(ONE_LAYER), max_batch=2, max_context=60, steps_per_dispatch=at_once) as engine:
        engine.submit(random_tokens(5), SamplingParams(max_new_tokens=40))
        scheduler = engine._scheduler
        places = []
        for _ in range(8):
            engine._driver.turn(lambda: True)
            arrays = jax.tree.leaves((scheduler.state, scheduler._tokens, scheduler._sampling))
            places.append([leaf.unsafe_buffer_pointer() for leaf in arrays])
        assert engine.metrics().steps > 4
        # The first turns read the prompt; what came from the host may have memory that NumPy owns.
        assert places[3:] == [places[3]] * 5


@pytest.mark.slow
def test_nothing_compiles_after_warm_up_whatever_the_length():
    """Promise 4: after one prompt of each padded length, prompts of every length the plan allows, in full and partly
    filled batches, through `generate` and by hand, with other parameters, compile nothing."""
    model, context, rows = random_model(ONE_LAYER), 16, 2
    engine = Engine(model, max_batch=rows, max_context=context, slots=C)

    def use(lengths, **params):
        prompts = [random_tokens(n, seed=n) for n in lengths]
        engine.generate(prompts, SamplingParams(max_new_tokens=2, **params))

    def by_hand(lengths):
        state = engine.prefill([random_tokens(n, seed=n) for n in lengths])
        for _ in range(3):
            _, state = decode_step(model, state, np.zeros(rows, np.int32))
        state.stats()

    for params in ({}, dict(temperature=1.0)):
        use([4, 8, 12, 14], **params)
    by_hand([4, 8])
    with count_compilations() as compiled:
        use(range(1, context - 1))
        use([3], eos_ids=(5, 6))
        use([7, 2, 14, 1], temperature=0.3, top_k=5, top_p=0.5, seed=9)
        for n in range(1, context):
            by_hand([n])
        by_hand([5, 15])
        engine.close()
        engine = Engine(model, max_batch=rows, max_context=context, slots=C)
        use([9, 10])
        assert compiled == []
        use([5], eos_ids=())
        jax.jit(lambda x: x + 3.25)(np.ones(7))
        assert len(compiled) == 1, "compilations are not counted"


@pytest.mark.parametrize(
    ("offload", "at_once"),
    [(True, 4), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((True, 1), (True, 14), (True, 15), (False, 4)))],
)
def test_nothing_compiles_after_warm_up(offload, at_once):
    """Promise 4: after `warm_up`, requests of every length that the plan allows compile nothing, however their prompts
    are cut, whether they are sampled, cancelled, stopped or share steps, however many of those are dispatched at once
    (14 are the most that a request within 16 tokens takes). The metrics start anew."""
    model, context, chunk = random_model(ONE_LAYER), 16, 8
    rows = 3 if at_once == 4 else 2  # of another layout: nothing is compiled already
    options = dict(max_batch=rows, max_context=context, slots=C, prefill_chunk=chunk, steps_per_dispatch=at_once)
    with Engine(model, offload=offload, **options) as engine:
        assert engine.warm_up() > 0
        now = engine.metrics()
        assert (now.submitted, now.steps, now.generated_tokens, now.busy_seconds) == (0, 0, 0, 0)
        with count_compilations() as compiled:
            handles = []
            for n in range(1, context):
                params = SamplingParams(
                    max_new_tokens=context - n, temperature=float(n % 2), eos_ids=(3,) if n % 3 else ()
                )
                handles.append(engine.submit(random_tokens(n, seed=n), params))
                engine._driver.turn(lambda: True)
                if handles[-1].status is RequestStatus.DECODING and n % 2:
                    handles[-1].cancel()
            engine.run_until_idle()
            engine.generate([random_tokens(n, seed=n) for n in range(1, context)], SamplingParams(max_new_tokens=1))
        assert compiled == []
        assert engine.metrics().cancelled > 0
        # The pool may hold less than a row: what cannot be asked for is not compiled, and nothing is refused.
    if offload:
        group = model.config.num_kv_heads * engine.layout.page_bytes
        with Engine(model, host_budget=2 * group, **options) as small:
            small.warm_up(sampling=False)


@pytest.mark.parametrize(("context", "blocks"), [(5, None), pytest.param(16, 1, marks=pytest.mark.slow)])
def test_nothing_compiles_after_warm_up_of_a_plan_for_little_more_than_a_block(context, blocks):
    """Promise 4: where no prompt that fills the first padded length leaves room for a step, and requests take some."""
    model, rows = random_model(ONE_LAYER), 1
    budget = None if blocks is None else blocks * ONE_LAYER.num_kv_heads * 2 * P * ONE_LAYER.head_dim * 4
    with Engine(model, max_batch=rows, max_context=context, slots=C, host_budget=budget) as engine:
        assert engine.plan.page_groups == (blocks or -(-context // P))
        engine.warm_up()
        room = min(context, engine.plan.page_groups * P)
        with count_compilations() as compiled:
            for n in range(1, room):
                for heat in (0.0, 1.0):
                    engine.generate([random_tokens(n)], SamplingParams(max_new_tokens=room - n, temperature=heat))
        assert compiled == []
        assert engine.metrics().steps == sum(2 * (room - n - 1) for n in range(1, room))


IMPORTS = """
import nosa_jax, nosa_jax.ffi, nosa_jax.infer, nosa_jax.offload, nosa_jax.pallas_kernels, nosa_jax.train
import jax
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
print(jax.device_count(), jax.default_backend(), nosa_jax.ffi.status())
"""


def test_j4_importing_needs_no_gpu_and_starts_no_backend():
    """J4: with no GPU visible, everything imports, no backend is started by it, and the CPU is used."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    result = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", IMPORTS],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 cpu "), result.stdout


@pytest.mark.gpu
def test_j4_arrays_on_the_cpu_beside_a_gpu_take_the_cpu_handlers():
    """J4: the same tokens from an engine on the CPU of a machine that has a GPU."""
    outcomes = []
    for platform in ("cpu", "gpu"):
        with jax.default_device(jax.devices(platform)[0]):
            model = random_model()
            with offloaded(model) as engine:
                results = engine.generate([random_tokens(33), random_tokens(11)], SamplingParams(max_new_tokens=20))
                assert engine._pool.pinned == (platform == "gpu")
            outcomes.append([r.tokens for r in results])
    assert outcomes[0] == outcomes[1]
