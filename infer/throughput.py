"""How many tokens a second a system decodes, over a cache that is filled at once instead of by a prefill."""

import statistics
import time
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.ffi import HostPool
from nosa_jax.infer.decode import step
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.plan import decode_bytes
from nosa_jax.infer.rates import DeviceRates
from nosa_jax.infer.trace import SelectionTrace
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import DecodeState, init_state


@dataclass(frozen=True)
class System:
    """What decodes: which attention, and how many slots hold its blocks (None: every block has one)."""

    name: str
    attention: AttentionKind
    slots_per_selected: float | None

    def layout(self, config: NosaConfig, batch: int, context: int) -> CacheLayout:
        """The cache of so many rows of so many tokens."""
        offload = self.slots_per_selected is not None
        selected = config.budget_for(self.attention).total
        slots = round(selected * self.slots_per_selected) if self.slots_per_selected is not None else selected
        n_blocks = config.num_blocks(context)
        return CacheLayout(config, self.attention, batch, context, offload, min(slots, max(selected, n_blocks)))


SYSTEMS = {
    system.name: system
    for system in (
        System("dense", "dense", None),
        System("infllmv2", "infllmv2", 1.0),
        System("nosa, C slots", "nosa", 1.0),
        System("nosa", "nosa", 2.0),
        System("nosa, resident", "nosa", None),
    )
}


@dataclass(frozen=True)
class Measurement:
    """One system at one batch and context.

    step_seconds: of one decode step, within dispatches of many. misses: per layer, row and KV head of a step.
    fetched_bytes: per step, from the host. read_bytes: weights, pooled keys and attended pages of a step.
    floor_seconds: the larger of what the two memories need for them. locality: where the selection comes from.
    """

    system: str
    context: int
    batch: int
    slots: int
    step_seconds: float
    misses: float
    fetched_bytes: float
    read_bytes: float
    floor_seconds: float
    device_bytes: int
    locality: str

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together."""
        return self.batch / self.step_seconds

    @property
    def of_floor(self) -> float:
        """Step time as a multiple of the floor."""
        return self.step_seconds / self.floor_seconds


def beside_weights(layout: CacheLayout) -> int:
    """Device bytes of a layout beside the weights: the cache and a step's workspace."""
    return layout.device_bytes() + decode_bytes(layout)


def filled_state(layout: CacheLayout, pool: HostPool | None, length: int) -> DecodeState:
    """A state whose rows hold `length` tokens of random contents, the latest blocks in the slots.

    Rows share host pages in turn where the pool has fewer than they need: what is read is random either way.
    """
    config = layout.config
    n_groups = layout.max_batch * layout.n_blocks
    if pool is not None:
        n_groups = pool.n_pages // layout.pages_per_block
    table = np.arange(layout.max_batch * layout.n_blocks, dtype=np.int32).reshape(layout.max_batch, -1) % n_groups

    @jax.jit
    def fill(state: DecodeState) -> DecodeState:
        first = max(0, config.num_blocks(length) - layout.n_slots)
        held = jnp.broadcast_to(jnp.arange(first, first + layout.n_slots, dtype=jnp.int32), layers_shape)
        exists = jnp.arange(layout.n_blocks) < config.num_blocks(length)
        layers = []
        for index, layer in enumerate(state.layers):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(0), index), 3)
            ranks = jax.random.normal(keys[2], layer.block_rank.shape)
            layers.append(
                type(layer)(
                    **{name: getattr(layer, name) for name in ("key_sums", "rank_sums", "selected", "cis")},
                    slots=jax.random.normal(keys[0], layer.slots.shape, layer.slots.dtype),
                    slot_block=held if layout.offload else layer.slot_block,
                    last_used=layer.last_used,
                    pooled_k=jax.random.normal(keys[1], layer.pooled_k.shape, layer.pooled_k.dtype),
                    block_rank=jnp.where(exists, ranks, -jnp.inf),
                )
            )
        return state.replace(
            layers=tuple(layers),
            lengths=jnp.full(layout.max_batch, length, jnp.int32),
            capacity=jnp.full(layout.max_batch, layout.max_context, jnp.int32),
            active=jnp.ones(layout.max_batch, bool),
            page_table=jnp.asarray(table),
        )

    layers_shape = (layout.max_batch, config.num_kv_heads, layout.n_slots)
    return jax.jit(fill, donate_argnums=0)(init_state(layout, None if pool is None else pool.handle))


def measure(
    model: FrozenModel,
    system: System,
    *,
    batch: int,
    context: int,
    rates: DeviceRates,
    trace: SelectionTrace | None = None,
    pool: HostPool | None = None,
    steps: int = 32,
    repeats: int = 3,
) -> Measurement:
    """Time decode steps of a full batch just below `context` tokens.

    Args:
      trace: picks to replay; None takes what the weights select. Systems that select nothing ignore it.
      pool: host pages for an offloaded system; the caller's, since pinning many takes seconds.
      steps: of one dispatch. repeats: dispatches, of which the median counts.

    Raises:
      ValueError: an offloaded system without a pool.
    """
    config = model.config
    layout = system.layout(config, batch, context)
    if layout.offload and pool is None:
        raise ValueError(f"{system.name} keeps its blocks in host memory and needs a pool")
    replays = trace is not None and system.attention == "nosa"
    state = filled_state(layout, pool if layout.offload else None, context - (repeats + 1) * steps - 1)
    picks = jnp.asarray(trace.picks) if trace is not None and replays else None

    @partial(jax.jit, donate_argnums=1)
    def many(model: FrozenModel, state: DecodeState, picks: jax.Array | None) -> DecodeState:
        def one(_: jax.Array, state: DecodeState) -> DecodeState:
            now = None if picks is None else picks[state.step % picks.shape[0]]
            return step(model, state, state.logits.argmax(-1).astype(jnp.int32), picks=now)[1]

        return jax.lax.fori_loop(0, steps, one, state)

    state = jax.block_until_ready(many(model, state, picks))
    before = int(np.sum(state.stats().total.misses))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        state = jax.block_until_ready(many(model, state, picks))
        taken.append((time.perf_counter() - start) / steps)
    if layout.offload and pool is not None:
        pool.check()
    misses = (int(np.sum(state.stats().total.misses)) - before) / repeats / steps
    itemsize = jnp.dtype(config.dtype).itemsize
    read = model.nbytes - config.vocab_size * config.embed_dim * itemsize  # all weights but the embedding
    attended = min(layout.n_selected, config.num_blocks(context))
    per_head = attended * layout.page_bytes
    if config.budget_for(system.attention).query and system.attention != "dense":
        per_head += config.num_windows(context) * config.head_dim * itemsize
    read += config.num_layers * batch * config.num_kv_heads * per_head
    fetched = misses * layout.page_bytes
    return Measurement(
        system=system.name,
        context=context,
        batch=batch,
        slots=layout.n_slots,
        step_seconds=statistics.median(taken),
        misses=misses / (config.num_layers * batch * config.num_kv_heads),
        fetched_bytes=float(fetched),
        read_bytes=float(read),
        floor_seconds=max(read / rates.memory, fetched / rates.link),
        device_bytes=beside_weights(layout),
        locality=trace.origin if replays and trace is not None else "as it comes from the weights",
    )
