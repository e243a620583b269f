"""Memory plans: every byte before anything is allocated, refusals with numbers, and a bound that holds."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.config import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.infer import DoesNotFitError, Engine, SamplingParams, make_plan, step
from nosa_jax.infer.compiling import jit_in_place
from nosa_jax.infer.plan import decode_bytes, format_bytes, parse_bytes, prefill_bytes
from nosa_jax.infer.prefill import prefill_row
from nosa_jax.offload import CacheLayout, init_state
from tests.infer.cases import ONE_LAYER, ROWS, SMALL, C, P, cache_leaves, offloaded, random_model, random_tokens

SIZES = dict(weight_bytes=1000, attention="nosa", max_batch=2, max_context=400)


def test_the_plan_is_what_is_allocated():
    """Device items are the bytes of the state and the parameters, host items those of the pool."""
    model = random_model()
    with offloaded(model) as engine:
        items = {item.name: item for item in engine.plan.items}
        assert items["weights"].nbytes == sum(x.nbytes for x in model.arrays)
        cache = engine.plan.device_bytes - items["weights"].nbytes - items["workspace"].nbytes
        assert cache == cache_leaves(init_state(engine.layout))
        assert engine.plan.host_bytes == items["KV pages"].nbytes == engine._pool.nbytes
        text = str(engine.plan)
    for item in items.values():
        assert f"{item.nbytes:,}" in text
        assert item.formula in text
    assert f"{engine.plan.device_bytes:,}" in text


@pytest.mark.parametrize(
    ("context", "slots"), [(400, 2 * C), (C * P, C), (C * P + P, C + 1), (1, C), (2 * C * P, 2 * C)]
)
def test_slots_default_to_twice_the_selection_or_the_whole_context(context, slots):
    assert make_plan(SMALL, **(SIZES | dict(max_context=context))).layout.n_slots == slots


def test_slots_shrink_to_the_device_budget_and_no_further():
    """Byte by byte: the budget of the full plan keeps it, one byte less takes one slot, and C slots are the least."""
    full = make_plan(SMALL, **SIZES)
    slot = full.layout.device_bytes() - make_plan(SMALL, **SIZES, slots=2 * C - 1).layout.device_bytes()
    least = full.device_bytes - C * slot
    for budget, slots in ((full.device_bytes, 2 * C), (full.device_bytes - 1, 2 * C - 1), (least, C)):
        plan = make_plan(SMALL, **SIZES, device_budget=budget)
        assert plan.layout.n_slots == slots
        assert plan.device_bytes <= budget
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(SMALL, **SIZES, device_budget=least - 1)
    for part in (f"{least:,} bytes", f"{least - 1:,}", "max_batch=2", "max_context=400", f"{C} slots"):
        assert part in str(caught.value)


def test_rows_default_to_what_the_device_budget_holds():
    """Byte by byte: the budget for n rows holds n, one byte less holds n - 1; slots stay at 2C."""
    options = SIZES | dict(max_batch=None)
    for rows in (1, 2, 7, 64):
        needed = make_plan(SMALL, **(SIZES | dict(max_batch=rows))).device_bytes
        plan = make_plan(SMALL, **options, device_budget=needed)
        assert (plan.layout.max_batch, plan.layout.n_slots, plan.device_bytes) == (rows, 2 * C, needed)
        assert plan.page_groups == rows * plan.layout.n_blocks
        fewer = make_plan(SMALL, **options, device_budget=needed - 1)
        assert fewer.layout.max_batch == max(1, rows - 1)
        assert fewer.layout.n_slots == (2 * C if rows > 1 else 2 * C - 1), "the only row gives up slots"
    least = make_plan(SMALL, **(SIZES | dict(max_batch=1, slots=C))).device_bytes
    with pytest.raises(DoesNotFitError, match=f"needs {least:,} bytes.*max_batch=1"):
        make_plan(SMALL, **options, device_budget=least - 1)
    with pytest.raises(InputError, match="max_batch=None takes as many rows as fit; give the device_budget"):
        make_plan(SMALL, **options)


def test_rows_default_to_what_the_host_budget_holds_in_full():
    """Rows beyond the pages for their full length are not planned unless they are asked for."""
    options = SIZES | dict(max_batch=None, device_budget="1GiB")
    whole = 2 * 2 * 2 * SMALL.head_dim * 4 * 400  # K and V, layers, KV heads; bytes of a row of 400 tokens
    for budget, rows in ((5 * whole, 5), (5 * whole - 1, 4), (whole // 2, 1)):
        plan = make_plan(SMALL, **options, host_budget=budget)
        assert plan.layout.max_batch == rows
        assert plan.host_bytes <= budget
    assert plan.page_groups == 50, "the only row may be for shorter requests"
    assert make_plan(SMALL, **(options | dict(max_batch=9)), host_budget=5 * whole).layout.max_batch == 9


def test_the_table_says_what_a_row_gets():
    text = str(make_plan(SMALL, **SIZES))
    assert f"2 rows of 400 tokens, nosa; per row and KV head {2 * C} slots for {C} selected blocks" in text
    assert "200 blocks on the host (2 whole rows)" in text
    assert "all 100 blocks on the device" in str(make_plan(SMALL, **SIZES, offload=False))


@pytest.mark.parametrize("offload", [True, False])
def test_o7_device_bytes_grow_per_token_as_documented(offload):
    """O7 by plan, at the 8B shape: from 32K over 64K to 128K tokens the cache's device bytes grow by
    `bytes_per_token`, a twentieth of the KV bytes when offloading; beside the weights it stays under 24 GiB."""
    plans = [
        make_plan(NosaConfig.nosa_8b(), **(SIZES | dict(max_batch=1, max_context=n)), offload=offload)
        for n in (32_768, 65_536, 131_072)
    ]
    cache = [plan.layout.device_bytes() for plan in plans]
    per_token = plans[0].layout.bytes_per_token()
    assert (cache[1] - cache[0]) / 32_768 == pytest.approx(per_token, abs=1)
    assert (cache[2] - cache[1]) / 65_536 == pytest.approx(per_token, abs=1)
    assert plans[2].device_bytes - 1000 < 24 * 2**30
    if offload:
        assert per_token < 32_768 / 20


def test_refusals_name_what_is_needed_and_leave_the_process_usable():
    model = random_model()
    with pytest.raises(DoesNotFitError, match=r"needs [\d,]+ bytes of device memory .* budget is 4,096 .*offload=True"):
        Engine(model, max_batch=2, max_context=400, offload=False, device_budget="4KiB")
    group = 2 * 2 * 2 * P * SMALL.head_dim * 4
    with pytest.raises(DoesNotFitError, match=rf"host_budget={group - 1:,} bytes .*\({group:,} bytes\)"):
        Engine(model, max_batch=2, max_context=400, host_budget=group - 1)
    with pytest.raises(
        DoesNotFitError, match=r"the weights are [\d.]+ \w+ of it\. Raise device_budget, or lower max_batch"
    ):
        Engine(model, max_batch=1, max_context=400, device_budget="4KiB")
    with pytest.raises(InputError, match=f"slots={C - 1} cannot hold"):
        Engine(model, max_batch=2, max_context=400, slots=C - 1)
    with pytest.raises(InputError, match="max_context=0 must lie in"):
        Engine(model, max_batch=2, max_context=0)
    with pytest.raises(InputError, match="max_batch=0 must be"):
        Engine(model, max_batch=0, max_context=10)
    with offloaded(model) as engine:
        assert engine.prefill([random_tokens(5)]).lengths[0] == 5


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("512mb", 512 * 10**6),
        ("7", 7),
        (" 3 B ", 3),
        (9, 9),
        (None, None),
    ],
)
def test_sizes_as_text(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 furlong", "1e9", "1,5 GB"])
def test_texts_that_are_no_size(text):
    with pytest.raises(InputError, match="is no memory size"):
        parse_bytes(text)


def test_sizes_for_reading():
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**29, 2**50)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 GiB", "1024.00 TiB",
    ]  # fmt: skip


WORKSPACES = {
    "wide": (NosaConfig.tiny(num_layers=1), 2048),
    "many heads, short": (ONE_LAYER.replace(num_heads=16, num_kv_heads=2, head_dim=16), 96),
    "wide feed-forward, bfloat16": (NosaConfig.tiny(num_layers=1, ffn_dim=2048, dtype="bfloat16"), 1024),
}


@pytest.mark.parametrize("name", ["many heads, short", *(pytest.param(n, marks=pytest.mark.slow) for n in
                                                         ("wide", "wide feed-forward, bfloat16"))])  # fmt: skip
@pytest.mark.parametrize("piece", ["whole", *(pytest.param(p, marks=pytest.mark.slow) for p in ("rest", "small"))])
def test_prefill_stays_within_its_planned_workspace(name, piece):
    """Temporaries and results of the compiled prefill of a whole row, of all but its first block, and of a sixth of it
    behind others; nothing is run."""
    config, n = WORKSPACES[name]
    model = random_model(config)
    layout = make_plan(config, **(SIZES | dict(max_context=n))).layout
    shapes = jax.eval_shape(lambda: jax.tree.leaves(init_state(layout)))
    structure = jax.tree.structure(init_state(layout))
    start = {"whole": 0, "rest": config.block_size, "small": n // 3 * 2}[piece]
    chunk = n // 6 if piece == "small" else None
    tokens = random_tokens(chunk or n - start, vocab=config.vocab_size)

    def read(leaves):
        return jax.tree.leaves(prefill_row(model, structure.unflatten(leaves), 0, tokens, start))

    memory = jax.jit(read, donate_argnums=0).lower(shapes).compile().memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    bound = prefill_bytes(config, layout.n_blocks * config.block_size, chunk)
    print(f"{name}: {beside:,} of {bound:,} bytes")
    assert beside <= bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "attention", "batch", "context", "offload"),
    [
        ({}, "nosa", 4, 8192, True),
        (dict(dtype="bfloat16"), "nosa", 16, 1024, True),
        (dict(num_heads=16, head_dim=64), "infllmv2", 4, 4096, True),
        ({}, "dense", 2, 2048, False),
    ],
    ids=str,
)
def test_a_step_stays_within_its_planned_workspace(change, attention, batch, context, offload):
    config = NosaConfig.tiny(num_layers=2, **change)
    model, layout = random_model(config), CacheLayout(config, attention, batch, context, offload, 16)
    shapes = jax.eval_shape(lambda: jax.tree.leaves(init_state(layout)))
    structure = jax.tree.structure(init_state(layout))

    def advance(model, leaves, tokens):
        return jax.tree.leaves(step(model, structure.unflatten(leaves), tokens)[1])

    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    memory = jit_in_place(advance, donate_argnums=1).lower(model, shapes, tokens).compile().memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    print(f"{beside:,} of {decode_bytes(layout):,} bytes")
    assert beside <= decode_bytes(layout)


MISTAKES = """
import numpy as np
from nosa_jax import NosaConfig, NosaLM
from nosa_jax.infer import Engine, SamplingParams, decode_step

model = NosaLM.from_config(NosaConfig.tiny(num_layers=1))
sizes = dict(max_batch=1, max_context=64)
with Engine(model, **sizes) as engine:
    state = engine.prefill([[1, 2]])
    for make in (
        lambda: Engine(model, **sizes, attention="foo"),
        lambda: Engine(model, **sizes, slots=16.5),
        lambda: Engine(model, **sizes | {"max_context": "64K"}),
        lambda: Engine(model, **sizes | {"max_batch": True}),
        lambda: Engine(model, **sizes, prefill_chunk=1.0),
        lambda: Engine("a/folder", **sizes),
        lambda: Engine(model, **sizes, tokenizer="bytes"),
        lambda: Engine(model, **sizes, max_queue="a"),
        lambda: engine.submit([1], {"max_new_tokens": 3}),
        lambda: engine.submit([1], SamplingParams(max_new_tokens=2), timeout="5"),
        lambda: engine.submit([1], SamplingParams(max_new_tokens=2), stream="a"),
        lambda: SamplingParams(temperature="0.8"),
        lambda: SamplingParams(temperature=10**400),
        lambda: SamplingParams(top_p=None),
        lambda: SamplingParams(max_new_tokens=True),
        lambda: SamplingParams(eos_ids=(5.9,)),
        lambda: decode_step(engine.model, state, state.logits.max(axis=-1)),
        lambda: (decode_step(engine.model, state, np.array([1])), decode_step(engine.model, state, np.array([1]))),
        lambda: state.stats(),
    ):
        try:
            make()
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
given = SamplingParams(max_new_tokens=np.int64(4), seed=np.uint32(7), eos_ids=(np.int32(3),))
print(*(f"{type(value).__name__} {value}" for value in (given.max_new_tokens, given.seed, *given.eos_ids)))
"""


@pytest.mark.slow
def test_mistakes_of_type_are_named_without_a_type_checker():
    """As a user's own Python finds them: the tests' type checker would refuse them first."""
    command = [sys.executable, "-c", MISTAKES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    for said, expected in zip(
        done.stdout.splitlines(),
        (
            "InputError: attention='foo' is none of dense, infllmv2, dma, nosa",
            "InputError: slots=16.5 must be a whole number",
            "InputError: max_context='64K' must be a whole number",
            "InputError: max_batch=True must be a whole number",
            "InputError: prefill_chunk=1.0 must be a whole number",
            "InputError: a str is no model; ",
            "InputError: tokenizer='bytes' is a name; give nosa_jax.tokenizer.load_tokenizer of it",
            "InputError: max_queue='a' must be a whole number of at least 1",
            "InputError: {'max_new_tokens': 3} are no sampling parameters; give SamplingParams(max_new_tokens=...)",
            "InputError: timeout='5' must be a positive number of seconds",
            "InputError: stream='a' must be a whole number of at least 0 and below 4,294,967,296",
            "InputError: temperature='0.8' must be a number of at least 0 (0 is greedy) and finite in float32",
            "InputError: temperature=1000000000",
            "InputError: top_p=None must be above 0 and at most 1",
            "InputError: max_new_tokens=True must be an integer of at least 0",
            "InputError: eos_ids=(5.9,) must be a tuple of ids, like (257,)",
            "ValueError: tokens are float32; they must be integer ids, like logits.argmax(axis=-1)",
            "ValueError: this state was given to an earlier decode_step",
            "ValueError: this state was given to a step, which has used it up",
            "int 4 int 7 int 3",
        ),
        strict=True,
    ):
        assert said.startswith(expected)


def test_no_more_slots_than_a_row_has_blocks():
    """A billion slots would be a thousand gigabytes, of which nothing but a block each is ever used."""
    with Engine(random_model(), max_batch=1, max_context=400, slots=10**9) as engine:
        assert engine.layout.n_slots == engine.layout.n_blocks
        (result,) = engine.generate([random_tokens(5)], SamplingParams(max_new_tokens=2))
    assert len(result.tokens) == 2


def test_prompts_that_cannot_be_read():
    """Each refusal names the prompt, the value and the way out, and starts nothing."""
    with offloaded(random_model()) as engine:
        room = engine.layout.max_context
        for prompts, message in [
            ([[]], "prompt 0 is empty; give at least one token"),
            ([[1], np.array([], np.int32)], "prompt 1 is empty"),
            ([[1, 61]], r"prompt 0 holds token id 61; the model's ids are 0 \.\. 60"),
            ([[1], [5, -3]], "prompt 1 holds token id -3"),
            ([np.array([1.5])], "prompt 0 must be a flat list of integer ids, not float64"),
            ([np.array([[1, 2]])], r"prompt 0 must be a flat list of integer ids, not int64 \(1, 2\)"),
            (["text"], "prompt 0 is text, but the engine has no tokenizer"),
            ("text", "must be a list of prompts"),
            ([random_tokens(room + 1)], f"prompt 0 has {room + 1} tokens .* the plan holds {room} per row"),
        ]:
            with pytest.raises(InputError, match=message):
                engine.generate(prompts)
            with pytest.raises(InputError, match=message):
                engine.prefill(prompts)
        with pytest.raises(InputError, match=rf"asks for up to 128 more; .* ask for at most {room - 200} new tokens"):
            engine.generate([random_tokens(200)])
        with pytest.raises(InputError, match=rf"{ROWS + 1} prompts do not fit into max_batch={ROWS} rows"):
            engine.prefill([[1]] * (ROWS + 1))
        with pytest.raises(InputError, match="chunk=0 must be at least 1"):
            engine.prefill([[1]], chunk=0)
        assert engine.allocator.n_free == engine.plan.page_groups
        assert jnp.isfinite(engine.prefill([[1], np.array([2], np.uint8), (3, 4)]).logits).all()
