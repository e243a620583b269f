"""Attention of one query over cache slots against the oracle's attention over the same blocks."""

import jax
import numpy as np
import pytest

from nosa_jax.pallas_kernels import decode_attention
from tests.oracle import nosa_numpy as oracle
from tests.oracle.compare import IMPLEMENTATIONS, assert_close

BLOCK, BLOCKS, SLOTS, KV_HEADS, GROUP, HEAD_DIM = 4, 7, 9, 2, 3, 6
attend = jax.jit(decode_attention, static_argnames="implementation")


def paged(k, v, cis, slot_of):
    """Slots [B,K,slots,2,P,H] that hold the blocks at slot_of[B,K,M] and NaN everywhere else; cis by block."""
    batch = k.shape[0]
    slots = np.full((batch, KV_HEADS, SLOTS, 2, BLOCK, HEAD_DIM), np.nan, np.float32)
    bias = np.full((batch, KV_HEADS, BLOCKS, BLOCK), np.nan, np.float32)
    for b, h, t in np.ndindex(batch, KV_HEADS, k.shape[1]):
        block, offset = divmod(t, BLOCK)
        slots[b, h, slot_of[b, h, block], :, offset] = k[b, t, h], v[b, t, h]
        bias[b, h, block, offset] = cis[b, t, h]
    return slots, bias


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_matches_oracle_wherever_the_blocks_lie(implementation):
    """Ragged lengths, partly filled tails, padding in front of, between and behind ids; NaN in every unused byte."""
    rng = np.random.default_rng(0)
    lengths = np.array([1, 4, 5, 27], np.int32)
    shape = (4, 27, KV_HEADS, HEAD_DIM)
    q = rng.normal(size=(4, 1, KV_HEADS * GROUP, HEAD_DIM)).astype(np.float32)
    k, v, cis = (rng.normal(size=s).astype(np.float32) for s in (shape, shape, shape[:3]))
    ids = np.full((4, KV_HEADS, 5), -1, np.int32)
    for b, h in np.ndindex(4, KV_HEADS):
        existing = np.arange(-(-lengths[b] // BLOCK))
        chosen = np.sort(rng.permutation(existing)[:4])
        ids[b, h, np.sort(rng.permutation(5)[: len(chosen)])] = chosen
    outputs = []
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        slot_of = np.stack([[rng.permutation(SLOTS)[:BLOCKS] for _ in range(KV_HEADS)] for _ in range(4)])
        slots, bias = paged(k, v, cis, slot_of)
        for b, length in enumerate(lengths):  # what lies beyond a row's length is undefined
            for t in range(length, 27):
                for h in range(KV_HEADS):
                    slots[b, h, slot_of[b, h, t // BLOCK], :, t % BLOCK] = np.nan
                    bias[b, h, t // BLOCK, t % BLOCK] = np.nan
        slot_ids = np.where(ids < 0, -1, np.take_along_axis(slot_of, np.maximum(ids, 0), -1)).astype(np.int32)
        outputs.append(attend(q[:, 0], slots, bias, slot_ids, ids, lengths, implementation=implementation))
    np.testing.assert_array_equal(*outputs)
    expected = oracle.sparse_attention(
        *(oracle.f64(x) for x in (q, k, v, cis)), ids[:, None], lengths[:, None] - 1, BLOCK
    )
    assert_close(outputs[0], expected[:, 0], 3e-6)
    empty = attend(q[:, 0], slots, None, np.full_like(ids, -1), ids, lengths, implementation=implementation)
    assert not np.asarray(empty).any()
