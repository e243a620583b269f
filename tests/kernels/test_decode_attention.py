"""The Mosaic GPU kernel of decode attention: interpreted with race detection and poisoned memory, and on a GPU."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels import decode_attention as public
from nosa_jax.pallas_kernels import decode_attention_partial, merge_partials
from nosa_jax.pallas_kernels.decode_attention import mosaic_gpu, reference
from nosa_jax.pallas_kernels.decode_attention.merge import Partial
from nosa_jax.pallas_kernels.decode_attention.plan import plan_for, unsupported

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
by_lane = pytest.mark.parametrize(
    "interpret", [INTERPRET, pytest.param(None, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)


def paged(lengths, *, kv=1, group=2, head_dim=64, block=64, entries=3, n_slots=5, bias=1.0, seed=0, slot_seed=0):
    """Arguments for rows of these lengths: a random part of each row's blocks, always with its last, in random slots.

    Padding lies anywhere among the ids, and everything that no query may see is NaN. Only where the blocks lie
    depends on slot_seed.
    """
    rng, slot_rng = np.random.default_rng(seed), np.random.default_rng(slot_seed)
    batch, n_blocks = len(lengths), max(1, -(-max(lengths) // block))
    q = rng.normal(size=(batch, kv * group, head_dim))
    slots = np.full((batch, kv, n_slots, 2, block, head_dim), np.nan, np.float32)
    cis = np.full((batch, kv, n_blocks, block), np.nan, np.float32)
    slot_ids, block_ids = np.full((2, batch, kv, entries), -1, np.int32)
    for b, k in np.ndindex(batch, kv):
        existing = -(-lengths[b] // block)
        count = min(existing, entries, n_slots)
        chosen = np.sort(np.r_[rng.permutation(max(existing - 1, 0))[: max(count - 1, 0)], np.arange(existing)[-1:]])
        at = np.sort(rng.permutation(entries)[:count])
        block_ids[b, k, at] = chosen
        slot_ids[b, k, at] = slot_rng.permutation(n_slots)[:count]
        for slot, block_id in zip(slot_ids[b, k, at], chosen, strict=True):
            seen = min(block, lengths[b] - block_id * block)
            slots[b, k, slot, :, :seen] = rng.normal(size=(2, seen, head_dim))
            cis[b, k, block_id, :seen] = bias * rng.normal(size=seen)
    return (
        jnp.asarray(q, jnp.bfloat16),
        jnp.asarray(slots, jnp.bfloat16),
        jnp.asarray(cis),
        jnp.asarray(slot_ids),
        jnp.asarray(block_ids),
        jnp.asarray(lengths, jnp.int32),
    )


def in_float32(args):
    """The reference on the same numbers in float32."""
    wide = [x.astype(jnp.float32) if x is not None and jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
    return np.asarray(reference.decode_attention(*wide))


def assert_near(actual, expected, loosest=2e-2):
    """Within what bfloat16 weights and outputs allow: 99 % of the elements tightly, all of them loosely."""
    error = np.abs(np.asarray(actual, np.float32) - expected)
    scale = max(1.0, np.abs(expected).max())
    assert not np.isnan(error).any()
    assert np.quantile(error, 0.99) <= loosest / 3 * scale
    assert error.max() <= loosest * scale


SHAPES = {
    "one query head": dict(group=1),
    "group of 3": dict(group=3, kv=2),
    "8B": dict(group=16, head_dim=128),
    "head dim 96": dict(head_dim=96),
    "head dim 192": dict(head_dim=192),
    "head dim 256": dict(head_dim=256),
    "blocks of 16": dict(block=16, entries=9, n_slots=12),
    "blocks of 48": dict(block=48, entries=6, n_slots=7),
    "blocks of 128": dict(block=128),
}


@by_lane
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float32(shape, interpret):
    args = paged([300, 65], **SHAPES[shape])
    assert_near(mosaic_gpu.decode_attention(*args, interpret=interpret), in_float32(args))


@by_lane
@pytest.mark.parametrize("shape", ["8B", "blocks of 16"])
def test_without_bias(shape, interpret):
    q, slots, _, *lists = paged([300, 65], **SHAPES[shape])
    args = (q, slots, None, *lists)
    assert_near(mosaic_gpu.decode_attention(*args, interpret=interpret), in_float32(args))


@by_lane
@pytest.mark.parametrize(("entries", "stages"), [(5, 2), (5, 3), (7, 6)])
def test_more_tiles_than_stages(entries, stages, interpret, monkeypatch):
    """One program works through a list longer, and shorter, than what shared memory holds; stages are used again."""
    plan = lambda *sizes: replace(plan_for(*sizes), entries=entries, splits=1, stages=stages)  # noqa: E731
    monkeypatch.setattr(mosaic_gpu, "plan_for", plan)
    args = paged([500, 65], entries=entries, n_slots=9)
    assert_near(mosaic_gpu.decode_attention(*args, interpret=interpret), in_float32(args))


@by_lane
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_several_steps_of_one_program(head_dim, interpret, monkeypatch):
    """Every head dim, with more than one tile after the other: what is kept between them."""
    plan = lambda *sizes: replace(plan_for(*sizes), entries=3, splits=1)  # noqa: E731
    monkeypatch.setattr(mosaic_gpu, "plan_for", plan)
    args = paged([192, 150], head_dim=head_dim)
    assert_near(mosaic_gpu.decode_attention(*args, interpret=interpret), in_float32(args))


@by_lane
def test_every_length_around_a_block_boundary(interpret):
    """B1: the tail block holds 1 token, all but one, or all; what lies behind it is NaN."""
    args = paged([1, 2, 63, 64, 65, 127, 128, 129, 4092, 4095, 4097])
    assert_near(mosaic_gpu.decode_attention(*args, interpret=interpret), in_float32(args))


@by_lane
def test_lists_of_every_length_and_padding_of_every_kind(interpret):
    """B2, B3: 0, 1, C-1 and C entries; -1, M and INT_MAX as padding; the last slot and block hold 1e4, never read."""
    q, slots, cis, slot_ids, block_ids, lengths = paged([0, 64, 128, 192], entries=3, n_slots=4)
    assert [int(n) for n in (block_ids >= 0).sum((1, 2))] == [0, 1, 2, 3]
    slots = jnp.concatenate([slots, jnp.full_like(slots[:, :, :1], 1e4)], axis=2)
    cis = jnp.concatenate([cis, jnp.full_like(cis[:, :, :1], 1e4)], axis=2)
    outputs = [
        mosaic_gpu.decode_attention(
            q, slots, cis, slot_ids, jnp.where(block_ids < 0, padding, block_ids), lengths, interpret=interpret
        )
        for padding in (-1, 4, np.iinfo(np.int32).max)
    ]
    assert not np.asarray(outputs[0][0]).any()
    assert_near(outputs[0], in_float32((q, slots, cis, slot_ids, block_ids, lengths)))
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)
    nowhere = jnp.full_like(slot_ids, -1)
    empty = mosaic_gpu.decode_attention(q, slots, cis, nowhere, block_ids, lengths, interpret=interpret)
    assert not np.asarray(empty).any()


@by_lane
@pytest.mark.parametrize("shift", [1e3, -6e4, -1e5])
def test_a_constant_added_to_all_logits_changes_nothing(shift, interpret):
    """B4, to the resolution that float32 has at such a logit."""
    args = paged([150])
    moved = (*args[:2], args[2] + shift, *args[3:])
    assert_near(mosaic_gpu.decode_attention(*moved, interpret=interpret), in_float32(args), loosest=3e-2)


@by_lane
def test_extreme_biases_give_finite_outputs(interpret):
    """S5: biases of an eviction head with large pre-activations and |A|, of both signs."""
    args = paged([190], bias=1e7)
    assert_near(mosaic_gpu.decode_attention(*args, interpret=interpret), in_float32(args))


@by_lane
def test_bits_depend_neither_on_the_run_nor_on_the_slots(interpret):
    """The same blocks in other slots (as offloading puts them) and a second run: the same bits."""
    cases = [paged([300, 65], slot_seed=seed) for seed in (0, 0, 1)]
    assert (np.asarray(cases[0][3]) != np.asarray(cases[2][3])).any()
    first, *others = (np.asarray(mosaic_gpu.decode_attention(*args, interpret=interpret)) for args in cases)
    for other in others:
        np.testing.assert_array_equal(first, other)


def _partial(implementation, interpret):
    def attend(*args):
        if implementation == "mosaic_gpu":
            result = mosaic_gpu.decode_attention_partial(*args, interpret=interpret)
        else:
            result = decode_attention_partial(*args, implementation=implementation)
        # Operations that wait for an interpreted kernel must not fill the queue that its callbacks need a place in.
        return jax.block_until_ready(result)

    return attend


@by_lane
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_parts_of_the_blocks_merge_into_the_whole(implementation, interpret):
    attend = _partial(implementation, interpret)
    q, slots, cis, slot_ids, block_ids, lengths = paged([300, 0, 65], entries=4)
    first = jnp.arange(4) < 2
    parts = [
        attend(q, slots, cis, jnp.where(keep, slot_ids, -1), block_ids, lengths)
        for keep in (first, ~first, first & ~first)
    ]
    whole, merged = attend(q, slots, cis, slot_ids, block_ids, lengths), merge_partials(*parts)
    np.testing.assert_allclose(merged.out, whole.out, atol=4e-3)
    np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-5)
    assert np.isneginf(whole.lse[1]).all()
    assert not np.asarray(merged.out[1]).any()
    for with_nothing in (merge_partials(parts[0], parts[2]), merge_partials(parts[2], parts[0])):
        np.testing.assert_array_equal(with_nothing.out, parts[0].out)


def test_merging_is_the_softmax_over_all_parts():
    rng = np.random.default_rng(0)
    logits, values = rng.normal(size=(3, 5)) * 30, rng.normal(size=(3, 5, 4))
    weights = np.exp(logits - logits.max())
    expected = (weights[..., None] * values).sum((0, 1)) / weights.sum()

    def part(i):
        w = np.exp(logits[i] - logits[i].max())
        lse = np.log(w.sum()) + logits[i].max()
        return Partial(jnp.asarray((w @ values[i] / w.sum())[None], jnp.float32), jnp.asarray([lse], jnp.float32))

    merged = merge_partials(*map(part, range(3)))
    np.testing.assert_allclose(merged.out[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged.lse[0], np.log(np.exp(logits).sum()), rtol=1e-6)


LAUNCHES = {
    "8B": dict(rows=16, heads=32),
    "8B, 64 rows": dict(rows=64, heads=32),
    "8B, one row": dict(rows=1, heads=32),
    "8B without bias": dict(rows=16, heads=32, bias=False),
    "8B dense over 128K": dict(rows=16, heads=32, entries=2048),
    "8B, 63 blocks": dict(rows=3, heads=32, entries=63),
    "1B": dict(rows=16, heads=16),
    "group 1": dict(rows=16, heads=2),
    "group 3": dict(rows=16, heads=6),
    **{f"head dim {h}": dict(rows=16, heads=32, head_dim=h) for h in (64, 96, 192, 256)},
    **{f"blocks of {p}": dict(rows=16, heads=32, block=p) for p in (16, 32, 48, 96, 128, 256)},
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_lowers_for_cuda(case):
    """Layouts, copies and launch sizes are legal at real sizes; needs no GPU."""
    sizes = {"kv": 2, "head_dim": 128, "block": 64, "entries": 64, "bias": True, **LAUNCHES[case]}
    batch, kv, head_dim, block, n = (sizes[name] for name in ("rows", "kv", "head_dim", "block", "entries"))
    ids = jax.ShapeDtypeStruct((batch, kv, n), jnp.int32)
    args = (
        jax.ShapeDtypeStruct((batch, sizes["heads"], head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, kv, n, 2, block, head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, kv, 2 * n, block), jnp.float32) if sizes["bias"] else None,
        ids,
        ids,
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    assert unsupported(*args) is None
    jax.jit(mosaic_gpu.decode_attention).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("block", [16, 48, 64, 128])
@pytest.mark.parametrize("entries", [1, 2, 63, 64, 65, 2048])
@pytest.mark.parametrize("batch", [1, 16, 64, 100])
def test_splits_cover_the_list_once(batch, entries, block):
    plan = plan_for(batch, 2, 16, 128, block, entries)
    assert (plan.splits - 1) * plan.entries < entries <= plan.splits * plan.entries
    assert plan.entries * block % 64 == 0
    assert plan.entries % plan.align == 0


def test_splits_fill_the_gpu():
    """At least 90 % of the multiprocessors have work where there are blocks enough. With many rows, a list is cut for
    late blocks alone: in parts of 8 blocks, or in 8 parts."""
    for batch in (1, 4, 16, 64):
        plan = plan_for(batch, 2, 16, 128, 64, 64)
        assert batch * 2 * plan.splits >= min(0.9 * 132, batch * 2 * 64)
    for entries, splits in ((8, 1), (16, 2), (64, 8), (1024, 8)):
        assert plan_for(512, 2, 16, 128, 64, entries).splits == splits


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=jnp.float32), "float32"),
        (dict(head_dim=80), "80"),
        (dict(block=40), "40"),
        (dict(block=512), "512"),
        (dict(heads=130), "65"),
        (dict(entries=0), "nothing"),
        (dict(bias=jnp.bfloat16), "bias is bfloat16"),
    ],
)
def test_what_it_does_not_take_is_named(change, reason):
    sizes = {
        "dtype": jnp.bfloat16,
        "head_dim": 128,
        "block": 64,
        "heads": 32,
        "entries": 4,
        "bias": jnp.float32,
        **change,
    }
    block, n = sizes["block"], sizes["entries"]
    args = (
        jax.ShapeDtypeStruct((1, sizes["heads"], sizes["head_dim"]), sizes["dtype"]),
        jax.ShapeDtypeStruct((1, 2, 8, 2, block, sizes["head_dim"]), sizes["dtype"]),
        jax.ShapeDtypeStruct((1, 2, 8, block), sizes["bias"]),
        *(jax.ShapeDtypeStruct((1, 2, n), jnp.int32),) * 2,
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    assert reason in (unsupported(*args) or "")


@pytest.mark.gpu
def test_an_array_of_more_than_2_to_the_31_elements():
    """B5: the last slot of the last row and head is the only one that holds anything."""
    n_slots = 2**31 // (2 * 2 * 64 * 128) + 3
    tail = jax.random.normal(jax.random.key(0), (2, 64, 128), jnp.bfloat16)
    slots = jnp.full((1, 2, n_slots, 2, 64, 128), jnp.nan, jnp.bfloat16).at[0, 1, -1].set(tail)
    assert slots.size > 2**31
    q = jax.random.normal(jax.random.key(1), (1, 32, 128), jnp.bfloat16)
    slot_ids = jnp.array([[[-1, -1], [-1, n_slots - 1]]], jnp.int32)
    out = public(q, slots, None, slot_ids, jnp.zeros_like(slot_ids), jnp.array([64]), implementation="mosaic_gpu")
    logits = np.asarray(q[0, 16:], np.float32) @ np.asarray(tail[0], np.float32).T / math.sqrt(128)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    assert_near(out[0, 16:], weights @ np.asarray(tail[1], np.float32) / weights.sum(-1, keepdims=True))
    assert not np.asarray(out[0, :16], np.float32).any()


@pytest.mark.gpu
def test_is_what_runs_where_no_implementation_is_named():
    args = paged([300, 65], group=16, head_dim=128)
    expected = mosaic_gpu.decode_attention(*args)
    np.testing.assert_array_equal(jax.jit(public)(*args), expected)
    np.testing.assert_array_equal(public(*args, implementation="mosaic_gpu"), expected)
