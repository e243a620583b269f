"""What the Mosaic GPU kernel of decode attention takes, and how a launch is cut up: from shapes and dtypes alone."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

Shaped = jax.Array | jax.ShapeDtypeStruct

HEAD_DIMS = (64, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16")
MAX_BLOCK = 256
TILE = 64  # tokens multiplied at a time: the depth of one swizzled wgmma operand
ROWS = 64  # rows of one wgmma: the query heads of a group lie in them
FLOOR = -1e30  # below any logit, and finite: the difference of two of them is no NaN
MULTIPROCESSORS = 132  # of an H100 or H200
PROGRAM_BYTES = 112 * 1024  # shared memory of one program, so that two fit on a multiprocessor
MULTIPROCESSOR_BYTES = 224 * 1024
MAX_STAGES = 6
MAX_SPLITS = 64  # the merge is unrolled over them
# A late block holds up those that share its split, so a split has at most so many units ...
MAX_UNITS = 8
ENOUGH_SPLITS = 8  # ... unless the list is longer than those of sparse attention, which are in so many parts then


@dataclass(frozen=True)
class Plan:
    """Static sizes of a launch.

    Attributes:
      rows: query heads per KV head, rounded up to the 8 rows of a swizzled tile.
      entries: entries of the list per split, a multiple of `align`.
      splits: programs per row and KV head.
      align: entries that together fill whole tiles.
      stages: tiles of keys and values in shared memory at once.
    """

    rows: int
    entries: int
    splits: int
    align: int
    stages: int


def unsupported(
    q: Shaped, slots: Shaped, cis: Shaped | None, slot_ids: Shaped, block_ids: Shaped, lengths: Shaped
) -> str | None:
    """Why the kernel does not take these arguments, or None if it does."""
    (n_heads, head_dim), (n_kv, _, _, block) = q.shape[1:], slots.shape[1:5]
    if q.dtype != slots.dtype or q.dtype.name not in DTYPES:
        return f"queries are {q.dtype} and slots {slots.dtype}; the tensor cores take both in {' or '.join(DTYPES)}"
    if head_dim not in HEAD_DIMS:
        return f"head dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if block % 16 or not 16 <= block <= MAX_BLOCK:
        return f"block size {block} is not a multiple of 16 up to {MAX_BLOCK}"
    if n_heads // n_kv > ROWS:
        return f"{n_heads // n_kv} query heads per KV head are more than the {ROWS} rows of a wgmma"
    if cis is not None and cis.dtype != jnp.float32:
        return f"the bias is {cis.dtype}, not float32"
    if 0 in (*q.shape, slots.shape[2], slot_ids.shape[2]):
        return "there is nothing to attend to"
    if any(ids.dtype != jnp.int32 for ids in (slot_ids, block_ids, lengths)):
        return f"ids and lengths are {slot_ids.dtype}, {block_ids.dtype} and {lengths.dtype}, not int32"
    return None


def plan_for(batch: int, n_kv: int, group: int, head_dim: int, block: int, n_entries: int) -> Plan:
    """The fewest splits that come within a few percent of the shortest launch, and as many stages as fit.

    The splits are part of the result's bits, so they are the same whether blocks come late or not.
    """
    stage = TILE * (2 * head_dim * 2 + 4)  # keys, values, biases
    two_fit = 2 * stage <= PROGRAM_BYTES
    slots = MULTIPROCESSORS * (2 if two_fit else 1)
    align = TILE // math.gcd(block, TILE)
    units = math.ceil(n_entries / align)
    pairs = batch * n_kv

    def steps(splits: int) -> int:  # units one after the other, and about two more to start and end a program
        return math.ceil(pairs * splits / slots) * (math.ceil(units / splits) + 2)

    choices = range(min(math.ceil(units / MAX_UNITS), ENOUGH_SPLITS), min(units, MAX_SPLITS) + 1)
    shortest = min(map(steps, choices))
    splits = next(s for s in choices if steps(s) <= 1.05 * shortest)
    per_split = math.ceil(units / splits)
    return Plan(
        rows=math.ceil(group / 8) * 8,
        entries=per_split * align,
        splits=math.ceil(units / per_split),
        align=align,
        stages=max(2, min(MAX_STAGES, (PROGRAM_BYTES if two_fit else MULTIPROCESSOR_BYTES) // stage)),
    )
