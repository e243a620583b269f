"""What the handlers must do, in plain Python, and the small shapes the tests use."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from nosa_jax import ffi

INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    """Sizes of a small cache over one pool."""

    rows: int = 2
    heads: int = 2
    slots: int = 4
    block: int = 4
    dim: int = 8
    blocks: int = 5
    layers: int = 2
    dtype: str = "float32"

    @property
    def cache(self) -> tuple[int, ...]:
        return (self.rows, self.heads, self.slots, 2, self.block, self.dim)

    @property
    def page_bytes(self) -> int:
        return 2 * self.block * self.dim * jnp.dtype(self.dtype).itemsize

    @property
    def n_pages(self) -> int:
        return self.rows * self.blocks * self.layers * self.heads

    def page_table(self, seed: int = 0) -> jax.Array:
        """Every block somewhere else in the pool."""
        order = np.random.default_rng(seed).permutation(self.rows * self.blocks)
        return jnp.asarray(order.reshape(self.rows, self.blocks), jnp.int32)

    def random_cache(self, seed: int) -> jax.Array:
        """Random bits: among them NaNs with payloads, which a copy must keep."""
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[jnp.dtype(self.dtype).itemsize]
        bits = np.random.default_rng(seed).integers(0, np.iinfo(unsigned).max, self.cache, unsigned, endpoint=True)
        return jnp.asarray(bits.view(jnp.dtype(self.dtype)))


def as_bytes(array: jax.Array | np.ndarray) -> np.ndarray:
    """The array's bytes, the last dimension in bytes."""
    return np.ascontiguousarray(array).view(np.uint8)


def transfer(moves: dict[tuple[int, int], list[tuple[int, int]]], shape: Shape, n: int) -> ffi.TransferList:
    """A list of (block, slot) per (row, KV head), padded with numbers that must never be looked at."""
    block = np.full((shape.rows, shape.heads, n), INT_MAX, np.int32)
    slot = np.full((shape.rows, shape.heads, n), -INT_MAX, np.int32)
    count = np.zeros((shape.rows, shape.heads), np.int32)
    for (row, head), pairs in moves.items():
        count[row, head] = len(pairs)
        for j, (b, s) in enumerate(pairs):
            block[row, head, j], slot[row, head, j] = b, s
    return ffi.TransferList(jnp.asarray(block), jnp.asarray(slot), jnp.asarray(count))


def all_blocks(shape: Shape, blocks: list[int]) -> ffi.TransferList:
    """Block blocks[i] <-> slot i, in every row and KV head."""
    pairs = [(block, slot) for slot, block in enumerate(blocks)]
    where = [(row, head) for row in range(shape.rows) for head in range(shape.heads)]
    return transfer(dict.fromkeys(where, pairs), shape, len(blocks))


@dataclass
class Head:
    """The slots of one (row, KV head)."""

    slot_block: list[int]
    last_used: list[int]
    slot_ids: list[int] = field(default_factory=list)
    load: list[tuple[int, int]] = field(default_factory=list)
    hits: int = 0
    misses: int = 0


def assign_head(
    wanted: list[int], slot_block: list[int], last_used: list[int], step: int, fresh_from: int, n_blocks: int
) -> Head:
    """assign_slots of one (row, KV head), word by word."""
    head = Head(list(slot_block), list(last_used))
    distinct = [b for b in dict.fromkeys(wanted) if 0 <= b < n_blocks]
    place = {b: slot_block.index(b) for b in distinct if b in slot_block}
    head.hits = len(place)
    for b in distinct:
        if b in place:
            continue
        taken = set(place.values())
        free = [s for s in range(len(slot_block)) if s not in taken]
        slot = min(free, key=lambda s: (head.slot_block[s] >= 0, last_used[s] if head.slot_block[s] >= 0 else 0, s))
        place[b] = slot
        head.slot_block[slot] = b
        if b < fresh_from:
            head.load.append((b, slot))
            head.misses += 1
    for slot in place.values():
        head.last_used[slot] = step
    head.slot_ids = [place.get(b, -1) for b in wanted]
    return head
