"""The static shapes of a KV cache, and the bytes that each of its parts takes."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from nosa_jax.config import AttentionKind, NosaConfig


class MemoryItem(NamedTuple):
    """One line of a memory plan; `formula` says how the bytes come about."""

    name: str
    memory: str  # "device" or "host"
    nbytes: int
    formula: str


@dataclass(frozen=True)
class CacheLayout:
    """Shapes of the cache of one batch of rows. Hashable: two caches of equal layout share compiled steps.

    Args:
      config: the model's config.
      attention: which system decodes; "dense" needs `offload=False`.
      max_batch: rows, B.
      max_context: tokens a row may reach; rounded up to whole blocks.
      offload: keep blocks on host pages and the selected ones in slots. Otherwise every block has its own slot.
      slots: slots per row and KV head when offloading, at least C.
      overlap: attend to the blocks that are in slots while the others arrive (docs/04). The same bits.

    Raises:
      ValueError: sizes that do not fit together; the message names them.
    """

    config: NosaConfig
    attention: AttentionKind
    max_batch: int
    max_context: int
    offload: bool
    slots: int
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"max_batch={self.max_batch} must be at least 1")
        if not 1 <= self.max_context <= self.config.max_context:
            raise ValueError(
                f"max_context={self.max_context} must lie in 1 .. {self.config.max_context}, the config's max_context"
            )
        if self.attention == "dense" and self.offload:
            raise ValueError("attention='dense' reads every block in every step; use offload=False for it")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap={self.overlap!r} must be True or False")
        if self.overlap and not self.offload:
            raise ValueError(
                "overlap=True hides the fetching of blocks; with offload=False there is none: drop one of them"
            )
        if self.offload and self.slots < self.n_selected:
            raise ValueError(
                f"slots={self.slots} cannot hold the {self.n_selected} blocks that one step selects; "
                f"use at least {self.n_selected}"
            )

    @property
    def reads_pooled_keys(self) -> bool:
        """Whether a step selects by them."""
        return self.attention != "dense" and self.config.budget_for(self.attention).query > 0

    @property
    def n_blocks(self) -> int:
        """M, blocks per row."""
        return self.config.num_blocks(self.max_context)

    @property
    def n_windows(self) -> int:
        """W, room for pooled windows per row: of a multiple of eight blocks, as the GPU kernel reads them."""
        return -(-self.n_blocks // 8) * 8 * (self.config.block_size // self.config.pool_stride)

    @property
    def n_strides(self) -> int:
        """Pooling strides per window."""
        return self.config.pool_window // self.config.pool_stride

    @property
    def n_slots(self) -> int:
        """Slots per row and KV head."""
        return self.slots if self.offload else self.n_blocks

    @property
    def n_selected(self) -> int:
        """C, the width of the list of selected blocks."""
        return self.n_blocks if self.attention == "dense" else self.config.budget_for(self.attention).total

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of one block of one KV head."""
        itemsize = jnp.dtype(self.config.dtype).itemsize
        return 2 * self.config.block_size * self.config.head_dim * itemsize

    @property
    def pages_per_block(self) -> int:
        """Host pages that one block of a row takes: one per layer and KV head."""
        return self.config.num_layers * self.config.num_kv_heads

    def device_items(self) -> list[MemoryItem]:
        """What the cache takes on the device, part by part."""
        c = self.config
        itemsize = jnp.dtype(c.dtype).itemsize
        heads = c.num_layers * self.max_batch * c.num_kv_heads
        lbk = f"{c.num_layers} layers x {self.max_batch} rows x {c.num_kv_heads} KV heads"
        # Per row and KV head: block and last use of each slot, the selection, 4 counts of the last step and in all,
        # and the locality. Per row: page table, length, capacity and activity. Once: pool handle and step.
        tables = heads * (2 * self.n_slots + self.n_selected + 9) * 4
        tables += self.max_batch * (self.n_blocks * 4 + 4 + 4 + 1) + 3 * 4
        return [
            MemoryItem(
                "KV slots", "device", heads * self.n_slots * self.page_bytes,
                f"{lbk} x {self.n_slots} slots x {self.page_bytes} B",
            ),
            MemoryItem(
                "pooled keys", "device", heads * self.n_windows * c.head_dim * itemsize,
                f"{lbk} x {self.n_windows} windows x {c.head_dim} x {itemsize} B",
            ),
            MemoryItem(
                "cis and pooled cis", "device", heads * self.n_blocks * (c.block_size + 1) * 4,
                f"{lbk} x {self.n_blocks} blocks x ({c.block_size} tokens + 1) x 4 B",
            ),
            MemoryItem(
                "window sums", "device", heads * self.n_strides * (c.head_dim + 1) * 4,
                f"{lbk} x {self.n_strides} strides x {c.head_dim + 1} x 4 B",
            ),
            MemoryItem("tables and counters", "device", tables, "block tables, recency, page table, counters"),
            MemoryItem(
                "logits", "device", self.max_batch * c.vocab_size * 4, f"{self.max_batch} rows x {c.vocab_size} x 4 B"
            ),
        ]  # fmt: skip

    def device_bytes(self) -> int:
        """Sum of `device_items`."""
        return sum(item.nbytes for item in self.device_items())

    def bytes_per_token(self) -> int:
        """Device bytes that one more token of context costs a row: pooled keys, cis, pooled cis and page table.

        KV bytes per token are `2 * num_layers * num_kv_heads * head_dim * itemsize`; they are not in it when
        offloading.
        """
        c = self.config
        heads = c.num_layers * c.num_kv_heads
        itemsize = jnp.dtype(c.dtype).itemsize
        per_token = heads * (4 + c.head_dim * itemsize / c.pool_stride + 4 / c.block_size) + 4 / c.block_size
        if not self.offload:
            per_token += heads * (self.page_bytes + 8) / c.block_size
        return math.ceil(per_token)
