"""Attention of one query per row over cache slots, by Mosaic GPU kernels for Hopper: splits, then their merge."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels.decode_attention.merge import Partial, merge_partials
from nosa_jax.pallas_kernels.decode_attention.mosaic_merge import merge_splits
from nosa_jax.pallas_kernels.decode_attention.mosaic_splits import Arriving, Splits, attend_splits
from nosa_jax.pallas_kernels.decode_attention.plan import ROWS, Plan, plan_for, unsupported

__all__ = ["decode_attention", "decode_attention_partial", "decode_attention_while_fetching", "unsupported"]


def decode_attention(
    q: jax.Array,
    slots: jax.Array,
    cis: jax.Array | None,
    slot_ids: jax.Array,
    block_ids: jax.Array,
    lengths: jax.Array,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """[B, N, H] in the dtype of q; as `reference.decode_attention`, with float32 logits, softmax and sums."""
    plan = _plan(q, slots, slot_ids)
    splits, _ = _attend(q, slots, cis, slot_ids, block_ids, lengths, plan, interpret)
    return _merged(splits, q, slots, plan, interpret)


def decode_attention_while_fetching(
    q: jax.Array,
    slots: jax.Array,
    cis: jax.Array | None,
    slot_ids: jax.Array,
    block_ids: jax.Array,
    lengths: jax.Array,
    arriving: Arriving,
) -> tuple[jax.Array, jax.Array]:
    """`decode_attention` and the filled slots; late blocks are copied from host pages by the same launch.

    The interpreter cannot run it.
    """
    plan = _plan(q, slots, slot_ids)
    splits, slots = _attend(q, slots, cis, slot_ids, block_ids, lengths, plan, None, arriving)
    return _merged(splits, q, slots, plan, None), slots


def decode_attention_partial(
    q: jax.Array,
    slots: jax.Array,
    cis: jax.Array | None,
    slot_ids: jax.Array,
    block_ids: jax.Array,
    lengths: jax.Array,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Partial:
    """Out [B, N, H] and lse [B, N], float32; as `reference.decode_attention_partial`."""
    plan = _plan(q, slots, slot_ids)
    splits, _ = _attend(q, slots, cis, slot_ids, block_ids, lengths, plan, interpret)
    merged = _merged_partials(splits, plan)
    return Partial(_heads(merged.out, q, slots), _heads(merged.lse[..., None], q, slots)[..., 0])


# One program. As operations of their own, they would fill the CPU's queue while the interpreted kernel, whose callbacks
# need a place in it, is still running; neither would ever end.
@partial(jax.jit, static_argnames="plan")
def _merged_partials(splits: Splits, plan: Plan) -> Partial:
    out, lse = splits
    out, lse = out.reshape(-1, plan.splits, plan.rows, out.shape[1]), lse.reshape(-1, plan.splits, plan.rows)
    return merge_partials(*(Partial(out[:, i], lse[:, i]) for i in range(plan.splits)))


def _plan(q: jax.Array, slots: jax.Array, slot_ids: jax.Array) -> Plan:
    (batch, n_heads, head_dim), (n_kv, _, _, block) = q.shape, slots.shape[1:5]
    return plan_for(batch, n_kv, n_heads // n_kv, head_dim, block, slot_ids.shape[2])


def _merged(
    splits: Splits, q: jax.Array, slots: jax.Array, plan: Plan, interpret: plgpu.InterpretGPUParams | None
) -> jax.Array:
    """[B, N, H] in the dtype of q."""
    out, lse = splits
    out = merge_splits(out, lse, plan.splits, q.dtype, interpret) if plan.splits > 1 else out.astype(q.dtype)
    return _heads(out.reshape(-1, plan.rows, q.shape[2]), q, slots)


def _heads(x: jax.Array, q: jax.Array, slots: jax.Array) -> jax.Array:
    """The query heads out of rows that are padded per KV head: [B*K, rows, X] to [B, N, X]."""
    return x[:, : q.shape[1] // slots.shape[1]].reshape(*q.shape[:2], -1)


def _attend(
    q: jax.Array,
    slots: jax.Array,
    cis: jax.Array | None,
    slot_ids: jax.Array,
    block_ids: jax.Array,
    lengths: jax.Array,
    plan: Plan,
    interpret: plgpu.InterpretGPUParams | None,
    arriving: Arriving | None = None,
) -> tuple[Splits, jax.Array]:
    """Pad what the kernel takes in whole tiles, and run it."""
    pairs, group, head_dim = q.shape[0] * slots.shape[1], q.shape[1] // slots.shape[1], q.shape[2]
    padding = ((0, 0), (0, 0), (0, -slot_ids.shape[2] % plan.align))
    slot_ids, block_ids = (jnp.pad(ids, padding, constant_values=-1) for ids in (slot_ids, block_ids))
    if cis is not None and plan.align > 1:
        # Blocks smaller than a tile: biases in the order of the list, so that those of a tile lie side by side.
        cis = jnp.take_along_axis(cis, jnp.maximum(block_ids, 0)[..., None], axis=2)
    rows = jnp.pad(q.reshape(pairs, group, head_dim), ((0, 0), (0, plan.rows - group), (0, 0))).reshape(-1, head_dim)
    rows = jnp.pad(rows, ((0, max(0, ROWS - rows.shape[0])), (0, 0)))
    if arriving is not None:
        arriving = arriving._replace(late=jnp.pad(arriving.late, padding))
    return attend_splits(rows, slots, cis, slot_ids, block_ids, lengths, arriving, plan, interpret)
