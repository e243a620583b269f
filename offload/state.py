"""The state that a decode step takes and returns."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nosa_jax.offload.layout import CacheLayout
from nosa_jax.pallas_kernels import NO_BLOCK


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """What one layer remembers of its rows.

    slots: keys (0) and values (1) of the block in each slot; beyond a row's length the contents are undefined.
    slot_block, last_used: the block in each slot (-1: none) and the step that selected it last.
    cis: eviction score of every token, by block.
    pooled_k: window means of keys. block_rank: the largest window mean of the ranking scores of every block, over the
      windows that are complete; -inf where there is none.
    key_sums, rank_sums: sums over the latest pooling strides; stride j is kept at j modulo the strides of a window.
    selected: the blocks that the last step attended to.
    """

    slots: Float[Array, "B K S 2 P H"]
    slot_block: Int[Array, "B K S"]
    last_used: Int[Array, "B K S"]
    cis: Float[Array, "B K M P"]
    pooled_k: Float[Array, "B K W H"]
    block_rank: Float[Array, "B K M"]
    key_sums: Float[Array, "B K R H"]
    rank_sums: Float[Array, "B K R"]
    selected: Int[Array, "B K C"]


class StepCounts(NamedTuple):
    """Counts per layer, row and KV head, of one step or summed over steps: int32 [L, B, K].

    hits, misses: selected blocks that were in a slot, and those fetched from the host; a block that did not exist
    in the step before is neither. selected: |Γ(t)|. kept: |Γ(t) ∩ Γ(t-1)|.
    """

    hits: Int[Array | np.ndarray, "L B K"]
    misses: Int[Array | np.ndarray, "L B K"]
    selected: Int[Array | np.ndarray, "L B K"]
    kept: Int[Array | np.ndarray, "L B K"]


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache as NumPy arrays; index layers first, then rows, then KV heads.

    last: the most recent step. total: since prefill, int64. min_locality: smallest |Γ(t) ∩ Γ(t-1)| / |Γ(t)| of the
    steps that selected C blocks, NaN where there was none. bytes_last, bytes_total: moved from host to device per
    layer. locality_bound: what the budget guarantees.
    """

    steps: int
    last: StepCounts
    total: StepCounts
    min_locality: np.ndarray
    bytes_last: np.ndarray
    bytes_total: np.ndarray
    locality_bound: float

    @property
    def hit_rate(self) -> float:
        """Hits over hits and misses since prefill; NaN before the first step."""
        asked = self.total.hits.sum() + self.total.misses.sum()
        return float(self.total.hits.sum() / asked) if asked else float("nan")

    @property
    def locality_last(self) -> np.ndarray:
        """Locality of the last step per layer, row and KV head, float64; NaN for rows that did not take part."""
        selected = np.asarray(self.last.selected, np.float64)
        return np.divide(self.last.kept, selected, out=np.full(selected.shape, np.nan), where=selected > 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The KV cache of a batch as a pytree; a decode step takes it, donated, and returns the next one.

    lengths: tokens in each row. capacity: tokens each row may reach; a full row stops. active: rows that decode.
    logits: next-token logits of each row. page_table: page group of every block, -1 where none is reserved.
    handle: the host pool. step: steps taken, for recency.
    """

    layers: tuple[LayerCache, ...]
    lengths: Int[Array, "B"]
    capacity: Int[Array, "B"]
    active: Bool[Array, "B"]
    logits: Float[Array, "B V"]
    page_table: Int[Array, "B M"]
    handle: Int[Array, "2"]
    step: Int[Array, ""]
    last: StepCounts
    total: StepCounts
    min_locality: Float[Array, "L B K"]
    layout: CacheLayout = dataclasses.field(metadata={"static": True})

    def replace(self, **changes: object) -> "DecodeState":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def used_up(self) -> bool:
        """Whether a step was given this state, whose memory then belongs to the state that it returned."""
        return not isinstance(self.lengths, jax.core.Tracer) and self.lengths.is_deleted()

    def stats(self) -> CacheStats:
        """Hits, misses, bytes and locality so far; waits for the step to finish.

        Raises:
          ValueError: the state was given to a step.
        """
        if self.used_up:
            raise ValueError(
                "this state was given to a step, which has used it up; ask the state that was returned (if the step "
                "failed there is none: prefill again)"
            )
        last = StepCounts(*(np.asarray(x) for x in self.last))
        total = StepCounts(*(np.asarray(x, np.int64) for x in self.total))
        smallest = np.asarray(self.min_locality)
        page = self.layout.page_bytes
        return CacheStats(
            steps=int(self.step),
            last=last,
            total=total,
            min_locality=np.where(np.isinf(smallest), np.nan, smallest),
            bytes_last=np.sum(last.misses, axis=(1, 2), dtype=np.int64) * page,
            bytes_total=np.sum(total.misses, axis=(1, 2), dtype=np.int64) * page,
            locality_bound=self.layout.config.budget_for(self.layout.attention).locality_bound,
        )


def empty_counts(layout: CacheLayout) -> StepCounts:
    """Zeros of the shape of a step's counts, each in a buffer of its own so that they can be donated."""
    shape = (layout.config.num_layers, layout.max_batch, layout.config.num_kv_heads)
    return StepCounts(*(jnp.zeros(shape, jnp.int32) for _ in StepCounts._fields))


def init_state(layout: CacheLayout, handle: Int[np.ndarray, "2"] | None = None) -> DecodeState:
    """An empty cache: no row is active.

    Args:
      layout: the shapes.
      handle: `HostPool.handle` of the pool with the host pages; None when every block has a slot.
    """
    c = layout.config
    batch, heads = layout.max_batch, c.num_kv_heads
    dtype = jnp.dtype(c.dtype)

    def layer() -> LayerCache:
        own = jnp.broadcast_to(jnp.arange(layout.n_slots, dtype=jnp.int32), (batch, heads, layout.n_slots))
        return LayerCache(
            slots=jnp.zeros((batch, heads, layout.n_slots, 2, c.block_size, c.head_dim), dtype),
            slot_block=jnp.full(own.shape, NO_BLOCK, jnp.int32) if layout.offload else jnp.array(own),
            last_used=jnp.full(own.shape, -1, jnp.int32),
            cis=jnp.zeros((batch, heads, layout.n_blocks, c.block_size), jnp.float32),
            pooled_k=jnp.zeros((batch, heads, layout.n_windows, c.head_dim), dtype),
            block_rank=jnp.full((batch, heads, layout.n_blocks), -jnp.inf, jnp.float32),
            key_sums=jnp.zeros((batch, heads, layout.n_strides, c.head_dim), jnp.float32),
            rank_sums=jnp.zeros((batch, heads, layout.n_strides), jnp.float32),
            selected=jnp.full((batch, heads, layout.n_selected), NO_BLOCK, jnp.int32),
        )

    return DecodeState(
        layers=tuple(layer() for _ in range(c.num_layers)),
        lengths=jnp.zeros(batch, jnp.int32),
        capacity=jnp.zeros(batch, jnp.int32),
        active=jnp.zeros(batch, bool),
        logits=jnp.zeros((batch, c.vocab_size), jnp.float32),
        page_table=jnp.full((batch, layout.n_blocks), -1, jnp.int32),
        handle=jnp.asarray(np.zeros(2, np.int32) if handle is None else handle, jnp.int32),
        step=jnp.zeros((), jnp.int32),
        last=empty_counts(layout),
        total=empty_counts(layout),
        min_locality=jnp.full((c.num_layers, batch, heads), jnp.inf, jnp.float32),
        layout=layout,
    )
