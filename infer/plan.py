"""Where every byte of an engine goes, before anything is allocated."""

import bisect
import re
from dataclasses import dataclass
from typing import get_args

from nosa_jax.checks import is_whole
from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.infer.compiling import overlap_pays
from nosa_jax.infer.prefill import TOKEN_CHUNK
from nosa_jax.offload.layout import CacheLayout, MemoryItem
from nosa_jax.pallas_kernels.decode_attention.plan import MAX_SPLITS
from nosa_jax.pallas_kernels.dispatch import why_no_kernels
from nosa_jax.pallas_kernels.sparse_attention.xla import QUERY_CHUNK
from nosa_jax.selection import KERNEL_QUERY_CHUNK

DEFAULT_PREFILL_CHUNK = 2048
_MAX_ROWS = 4096  # planned at most without being asked for
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


class DoesNotFitError(MemoryError):
    """A memory plan exceeds its budget; nothing was allocated."""


def parse_bytes(size: int | float | str | None) -> int | None:
    """Bytes from a number or a text like "20GiB" or "512 MB"; None stays None.

    Raises:
      InputError: the text is no size.
    """
    if size is None:
        return None
    if isinstance(size, int | float):
        if not 0 < size < 2**63:
            raise InputError(f"a memory size of {size} bytes makes no sense; give a positive number, or like '20GiB'")
        return int(size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
    if not match or match[2].lower() not in _UNITS:
        raise InputError(f"{size!r} is no memory size; write bytes as a number, or like '20GiB' or '512MB'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(nbytes: int) -> str:
    """Bytes in the largest binary unit that gives at least 1."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of an engine. Print it for a table.

    layout: the cache's shapes. items: every part with its bytes and how they come about. page_groups: blocks of
    rows that the host pool holds. device_budget, host_budget: limits in bytes, or None. prefill_chunk: tokens of a
    prompt that are read at once, at most.
    """

    layout: CacheLayout
    items: tuple[MemoryItem, ...]
    page_groups: int
    device_budget: int | None
    host_budget: int | None
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK

    def total(self, memory: str) -> int:
        """Planned bytes of "device" or "host" memory."""
        return sum(item.nbytes for item in self.items if item.memory == memory)

    @property
    def device_bytes(self) -> int:
        """Planned device bytes."""
        return self.total("device")

    @property
    def host_bytes(self) -> int:
        """Planned host bytes."""
        return self.total("host")

    @property
    def group_bytes(self) -> int:
        """Host bytes of one block of one row, over all layers and KV heads."""
        return self.layout.pages_per_block * self.layout.page_bytes

    def __str__(self) -> str:
        layout = self.layout
        lines = [
            f"{layout.max_batch} rows of {layout.max_context} tokens, {layout.attention}; per row and KV head "
            + (
                f"{layout.n_slots} slots for {layout.n_selected} selected blocks; "
                f"{self.page_groups} blocks on the host ({self.page_groups // layout.n_blocks} whole rows)"
                if layout.offload
                else f"all {layout.n_blocks} blocks on the device"
            ),
            f"{'memory':8}{'part':30}{'bytes':>18}  how",
        ]
        for item in self.items:
            lines.append(f"{item.memory:8}{item.name:30}{item.nbytes:>18,}  {item.formula}")
        for memory, budget in (("device", self.device_budget), ("host", self.host_budget)):
            total = self.total(memory)
            limit = "no budget set" if budget is None else f"budget {format_bytes(budget)}"
            lines.append(f"{memory:8}{'total':30}{total:>18,}  {format_bytes(total)}, {limit}")
        return "\n".join(lines)


def kernels_run(config: NosaConfig) -> bool:
    """Whether a model of this config runs through the GPU kernels here; what a shape may keep from it is not seen."""
    return why_no_kernels() is None and config.dtype in ("bfloat16", "float16")


def prefill_bytes(config: NosaConfig, n_tokens: int, chunk: int | None = None) -> int:
    """Upper bound of the memory beside the cache while one row of `n_tokens` is read.

    Hidden states and queries of the tokens that are read at once (6 copies of T x D and of T x N x H), one layer's
    keys and values of the row (6 copies: as projected, padded, paged, gathered), one chunk of attention logits with
    its mask (4 copies), and one chunk of the feed-forward layer, all in float32 at most.

    Where the GPU kernels run, as compiled for an H200: hidden states (2 copies) and the larger of two phases, in 16
    bits. Attention: queries and heads (4 copies), keys or values of the row (5), and in float32 the block scores of a
    chunk of queries (3). Feed-forward: a chunk of it (3) and of hidden states.

    Args:
      n_tokens: of the row, whole blocks.
      chunk: tokens that are read at once; None or more than the row for all.
    """
    piece = n_tokens if chunk is None else min(n_tokens, config.num_blocks(chunk) * config.block_size)
    keys = n_tokens if piece == n_tokens else n_tokens + piece  # a piece is put behind room for a whole row
    hidden, queries = piece * config.embed_dim, piece * config.num_heads * config.head_dim
    keys_values = keys * config.num_kv_heads * config.head_dim
    selection = 2 * config.num_kv_heads * piece * config.budget.total
    feed_forward = min(TOKEN_CHUNK, piece) * config.ffn_dim
    if kernels_run(config):
        scores = config.num_kv_heads * min(KERNEL_QUERY_CHUNK, piece) * config.num_blocks(keys) * 3
        attending = 2 * (4 * queries + 5 * keys_values) + 4 * (scores + selection)
        feeding = 2 * (3 * feed_forward + queries + hidden)
        return 2 * 2 * hidden + max(attending, feeding)
    logits = config.num_heads * min(QUERY_CHUNK, piece) * keys * 4
    return 4 * (6 * (hidden + queries) + 12 * keys_values + logits + selection + 4 * feed_forward)


def decode_bytes(layout: CacheLayout) -> int:
    """Upper bound of the memory beside the cache during one decode step.

    For every row: the selected pages of one layer (3 copies: gathered, and keys and values masked), attention logits
    and scores of all windows (3 copies), block scores (8), and the hidden states with the next token's logits (6),
    all in float32 at most. Where the GPU kernels run, no pages and no attention logits, but partial outputs of as many
    parts as a row's list is cut into, and logits of all windows (2 copies).
    """
    c = layout.config
    if kernels_run(c):
        heads = c.num_kv_heads * 8 * -(-c.num_heads // c.num_kv_heads // 8)  # of a KV head, in eights
        pages = heads * (c.head_dim + 2) * min(layout.n_selected, MAX_SPLITS)
        logits = heads * layout.n_windows * 2
    else:
        pages = c.num_kv_heads * layout.n_selected * 2 * c.block_size * c.head_dim * 3
        logits = c.num_heads * (layout.n_selected * c.block_size + layout.n_windows) * 3
    blocks = c.num_kv_heads * layout.n_blocks * 8
    hidden = (c.embed_dim + c.num_heads * c.head_dim + c.ffn_dim + c.vocab_size) * 6
    return 4 * layout.max_batch * (pages + logits + blocks + hidden)


def make_plan(
    config: NosaConfig,
    *,
    weight_bytes: int,
    attention: AttentionKind,
    max_batch: int | None,
    max_context: int,
    offload: bool = True,
    slots: int | None = None,
    overlap: bool | None = None,
    device_budget: int | float | str | None = None,
    host_budget: int | float | str | None = None,
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
) -> MemoryPlan:
    """Size an engine.

    Args:
      weight_bytes: bytes of the parameters.
      attention, max_context, offload: as for `CacheLayout`.
      overlap: as for `CacheLayout`; None chooses: on a GPU, for many rows.
      max_batch: rows; None takes as many as both budgets hold at their full length, and at least one.
      slots: per row and KV head when offloading, of which no more are made than a row has blocks; None takes twice the
        selected blocks if the device budget allows, else as many as it does allow.
      device_budget, host_budget: bytes or text like "20GiB"; None sets no limit (the host pool is then checked
        against free memory when it is made).
      prefill_chunk: tokens of a prompt that are read at once, at most.

    Raises:
      InputError: sizes that do not fit together, or no `max_batch` and no device budget to find one for.
      DoesNotFitError: the budgets are too small; names the bytes needed and available.
    """
    device_limit, host_limit = parse_bytes(device_budget), parse_bytes(host_budget)
    if attention not in get_args(AttentionKind):
        raise InputError(f"attention={attention!r} is none of {', '.join(get_args(AttentionKind))}")
    sizes = {"max_batch": max_batch, "max_context": max_context, "slots": slots, "prefill_chunk": prefill_chunk}
    for name, value in sizes.items():
        if value is not None and not is_whole(value):
            raise InputError(f"{name}={value!r} must be a whole number")
    if prefill_chunk < 1:
        raise InputError(f"prefill_chunk={prefill_chunk} must be at least 1 token")
    if max_batch is None and device_limit is None:
        raise InputError("max_batch=None takes as many rows as fit; give the device_budget that they are to fit into")

    def items_for(rows: int, n_slots: int) -> tuple[CacheLayout, list[MemoryItem]]:
        try:
            layout = CacheLayout(
                config, attention, rows, max_context, offload, n_slots,
                overlap=offload and overlap_pays(rows * config.num_kv_heads) if overlap is None else overlap,
            )  # fmt: skip
        except ValueError as error:
            raise InputError(str(error)) from error
        padded = layout.n_blocks * config.block_size
        reading, stepping = prefill_bytes(config, padded, prefill_chunk), decode_bytes(layout)
        return layout, [
            MemoryItem("weights", "device", weight_bytes, "all parameters in the compute dtype"),
            *layout.device_items(),
            MemoryItem(
                "workspace", "device", max(reading, stepping),
                f"the larger of {reading:,} (reading {min(prefill_chunk, padded)} tokens of a row of {padded}) and "
                f"{stepping:,} (a step)",
            ),
        ]  # fmt: skip

    def device_bytes(rows: int, n_slots: int) -> int:
        return sum(item.nbytes for item in items_for(rows, n_slots)[1])

    def fits(rows: int, n_slots: int) -> bool:
        return device_limit is None or device_bytes(rows, n_slots) <= device_limit

    layout = items_for(max_batch or 1, config.budget_for(attention).total if slots is None else slots)[0]
    group_bytes = layout.pages_per_block * layout.page_bytes
    n_slots = layout.n_selected if slots is None else min(slots, max(layout.n_selected, layout.n_blocks))
    if slots is None and offload:
        n_slots = max(layout.n_selected, min(2 * layout.n_selected, layout.n_blocks))
        while n_slots > layout.n_selected and not fits(max_batch or 1, n_slots):
            n_slots -= 1
    if max_batch is None:
        most = _MAX_ROWS
        if offload and host_limit is not None:
            most = min(most, max(1, host_limit // (layout.n_blocks * group_bytes)))
        # Bytes grow with the rows: the last number that fits, by halving.
        max_batch = max(1, bisect.bisect_right(range(1, most + 1), False, key=lambda rows: not fits(rows, n_slots)))
    layout, items = items_for(max_batch, n_slots)
    total = sum(item.nbytes for item in items)
    if device_limit is not None and total > device_limit:
        raise DoesNotFitError(
            f"the plan needs {total:,} bytes of device memory ({format_bytes(total)}) and the budget is "
            f"{device_limit:,} ({format_bytes(device_limit)}) for max_batch={max_batch}, max_context={max_context}, "
            f"{layout.n_slots} slots per row and KV head; the weights are {format_bytes(weight_bytes)} of it. Raise "
            "device_budget, or lower max_batch, max_context or prefill_chunk"
            + ("" if offload else ", or keep the KV cache on the host with offload=True")
        )

    groups = 0
    if offload:
        groups = max_batch * layout.n_blocks
        if host_limit is not None:
            groups = min(groups, host_limit // group_bytes)
            if groups < 1:
                raise DoesNotFitError(
                    f"host_budget={host_limit:,} bytes cannot hold one block of one row ({group_bytes:,} bytes); a "
                    f"row of max_context={max_context} tokens has {layout.n_blocks} of them: raise host_budget"
                )
        items.append(
            MemoryItem(
                "KV pages", "host", groups * group_bytes,
                f"{groups} blocks x {config.num_layers} layers x {config.num_kv_heads} KV heads "
                f"x {layout.page_bytes} B",
            )
        )  # fmt: skip
    return MemoryPlan(layout, tuple(items), groups, device_limit, host_limit, prefill_chunk)
