"""Small models, and loops over `decode_step` that keep what every step computed.

Engines of equal layout share their compiled steps, so the tests stay with few layouts and few prompt lengths.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nosa_jax.config import NosaConfig
from nosa_jax.infer import Engine, FrozenModel, decode_step, freeze
from nosa_jax.offload import CacheLayout, DecodeState
from tests.oracle.weights import model_with, random_weights

# C = 8 blocks of 4 tokens, two pooling windows per block, at most 2 blocks fetched a step.
SMALL = NosaConfig(
    vocab_size=61, embed_dim=32, ffn_dim=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, block_size=4,
    pool_window=4, pool_stride=2, sink_blocks=1, local_blocks=2, query_blocks=2, evict_blocks=3, dtype="float32",
)  # fmt: skip
ONE_LAYER = SMALL.replace(num_layers=1)
# Sizes that the GPU kernels take; C blocks of 16 tokens are two parts of four for decode attention.
FOR_KERNELS = ONE_LAYER.replace(
    block_size=16, pool_window=16, pool_stride=8, head_dim=64, num_heads=2, num_kv_heads=1, dtype="bfloat16"
)
P, C = SMALL.block_size, SMALL.budget.total
# Where a prompt may end: in, at and beyond a block, and around the selection budget (CASES B6 and B7).
LENGTHS = (1, P - 1, P, P + 1, 3 * P - 1, C * P - 5, C * P - 1, C * P, C * P + 1)
ROWS = len(LENGTHS)
CONTEXT = C * P + 1 + 200


def random_model(config: NosaConfig = SMALL, seed: int = 1, scale: float = 1.0) -> FrozenModel:
    """Random weights, cis of both signs."""
    return freeze(model_with(config, random_weights(config, seed, scale)))


def random_tokens(shape: tuple[int, ...] | int, seed: int = 2, vocab: int = SMALL.vocab_size) -> np.ndarray:
    """Uniform token ids."""
    return np.random.default_rng(seed).integers(0, vocab, size=shape).astype(np.int32)


def offloaded(model: FrozenModel, **options) -> Engine:
    """An engine of the layout that most tests share, with the fewest slots that are allowed."""
    return Engine(model, **(dict(max_batch=ROWS, max_context=CONTEXT, slots=C) | options))


def resident(model: FrozenModel, **options) -> Engine:
    """The same with every block on the device."""
    return Engine(model, **(dict(max_batch=ROWS, max_context=CONTEXT, offload=False) | options))


class Trace(NamedTuple):
    """What a run of steps computed, step by step, and the state after the last one."""

    logits: np.ndarray  # [steps, B, V]
    ids: np.ndarray  # [steps, L, B, K, C]
    hits: np.ndarray  # [steps, L, B, K]
    misses: np.ndarray
    selected: np.ndarray
    kept: np.ndarray
    state: DecodeState


def run_steps(model: FrozenModel, state: DecodeState, tokens: np.ndarray | int, step=decode_step) -> Trace:
    """Step with given tokens [B, steps], or with the most likely ones for a number of steps."""
    greedy = isinstance(tokens, int)
    records = []
    for t in range(tokens if greedy else tokens.shape[1]):
        chosen = state.logits.argmax(axis=-1) if greedy else jnp.asarray(tokens[:, t])
        logits, state = step(model, state, chosen)
        records.append((logits, selected_ids(state), *(np.asarray(counts) for counts in state.last)))
    return Trace(*(np.stack([np.asarray(x) for x in column]) for column in zip(*records, strict=True)), state=state)


def selected_ids(state: DecodeState) -> np.ndarray:
    """Blocks that the last step selected: [L, B, K, C]."""
    return np.stack([np.asarray(layer.selected) for layer in state.layers])


@jax.jit
def _forward(model: FrozenModel, tokens: jax.Array):
    modules = model.module()
    hidden, blocks = modules.hidden_states_and_blocks(tokens)
    return modules.unembed(hidden), blocks


def forward(model: FrozenModel, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits [B, T, V] and selected ids [L, B, T, K, C] of whole sequences at once."""
    logits, blocks = _forward(model, jnp.asarray(tokens))
    return np.asarray(logits), None if blocks[0] is None else np.stack([np.asarray(b) for b in blocks])


def continuation(tokens: np.ndarray, lengths: tuple[int, ...], steps: int) -> np.ndarray:
    """The `steps` tokens of every row that follow its first `lengths` ones: [B, steps]."""
    return np.stack([row[n : n + steps] for row, n in zip(tokens, lengths, strict=True)])


def cache_leaves(state: DecodeState) -> int:
    """Bytes of all arrays of a state, real or abstract."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def page_of(layout: CacheLayout, state: DecodeState, layer: int, row: int, head: int, block: int) -> int:
    """Number of the host page of one block."""
    group = int(state.page_table[row, block])
    return (group * layout.config.num_layers + layer) * layout.config.num_kv_heads + head
