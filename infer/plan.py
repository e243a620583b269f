"""Where every byte of an engine goes, before anything is allocated."""

import re
from dataclasses import dataclass

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.infer.prefill import TOKEN_CHUNK
from nosa_jax.offload.layout import CacheLayout, MemoryItem
from nosa_jax.pallas_kernels.sparse_attention.xla import QUERY_CHUNK

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
    rows that the host pool holds. device_budget, host_budget: limits in bytes, or None.
    """

    layout: CacheLayout
    items: tuple[MemoryItem, ...]
    page_groups: int
    device_budget: int | None
    host_budget: int | None

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
        lines = [f"{'memory':8}{'part':30}{'bytes':>18}  how"]
        for item in self.items:
            lines.append(f"{item.memory:8}{item.name:30}{item.nbytes:>18,}  {item.formula}")
        for memory, budget in (("device", self.device_budget), ("host", self.host_budget)):
            total = self.total(memory)
            limit = "no budget set" if budget is None else f"budget {format_bytes(budget)}"
            lines.append(f"{memory:8}{'total':30}{total:>18,}  {format_bytes(total)}, {limit}")
        return "\n".join(lines)


def prefill_bytes(config: NosaConfig, n_tokens: int) -> int:
    """Upper bound of the memory beside the cache while one row of `n_tokens` is read.

    Hidden states and queries of the row (6 copies of T x D and of T x N x H), one layer's keys and values (6 copies:
    as projected, padded, paged, gathered), one chunk of attention logits with its mask (4 copies), and one chunk of
    the feed-forward layer, all in float32 at most.
    """
    wide = n_tokens * (config.embed_dim + config.num_heads * config.head_dim) * 6
    keys_values = 2 * n_tokens * config.num_kv_heads * config.head_dim * 6
    logits = config.num_heads * min(QUERY_CHUNK, n_tokens) * n_tokens * 4
    selection = 2 * config.num_kv_heads * n_tokens * config.budget.total
    chunk = min(TOKEN_CHUNK, n_tokens) * config.ffn_dim * 4
    return 4 * (wide + keys_values + logits + selection + chunk)


def decode_bytes(layout: CacheLayout) -> int:
    """Upper bound of the memory beside the cache during one decode step.

    For every row: the selected pages of one layer (3 copies: gathered, and keys and values masked), attention logits
    and scores of all windows (3 copies), block scores (8), and the hidden states with the next token's logits (3),
    all in float32 at most.
    """
    c = layout.config
    pages = c.num_kv_heads * layout.n_selected * 2 * c.block_size * c.head_dim * 3
    logits = c.num_heads * (layout.n_selected * c.block_size + layout.n_windows) * 3
    blocks = c.num_kv_heads * layout.n_blocks * 8
    hidden = (c.embed_dim + c.num_heads * c.head_dim + c.ffn_dim + c.vocab_size) * 3
    return 4 * layout.max_batch * (pages + logits + blocks + hidden)


def make_plan(
    config: NosaConfig,
    *,
    weight_bytes: int,
    attention: AttentionKind,
    max_batch: int,
    max_context: int,
    offload: bool = True,
    slots: int | None = None,
    device_budget: int | float | str | None = None,
    host_budget: int | float | str | None = None,
) -> MemoryPlan:
    """Size an engine.

    Args:
      weight_bytes: bytes of the parameters.
      attention, max_batch, max_context, offload: as for `CacheLayout`.
      slots: per row and KV head; None takes twice the selected blocks if the device budget allows, else as many as
        it does allow.
      device_budget, host_budget: bytes or text like "20GiB"; None sets no limit (the host pool is then checked
        against free memory when it is made).

    Raises:
      InputError: sizes that do not fit together.
      DoesNotFitError: the budgets are too small; names the bytes needed and available.
    """
    device_limit, host_limit = parse_bytes(device_budget), parse_bytes(host_budget)
    needed = config.budget_for(attention).total
    n_blocks = config.num_blocks(max_context) if max_context > 0 else 1

    def items_for(n_slots: int) -> tuple[CacheLayout, list[MemoryItem]]:
        try:
            layout = CacheLayout(config, attention, max_batch, max_context, offload, n_slots)
        except ValueError as error:
            raise InputError(str(error)) from error
        padded = layout.n_blocks * config.block_size
        return layout, [
            MemoryItem("weights", "device", weight_bytes, "all parameters in the compute dtype"),
            *layout.device_items(),
            MemoryItem(
                "workspace", "device", max(reading := prefill_bytes(config, padded), decode_bytes(layout)),
                f"the larger of {reading:,} (reading a row of {padded} tokens) and {decode_bytes(layout):,} (a step)",
            ),
        ]  # fmt: skip

    if slots is not None or not offload:
        layout, items = items_for(slots if slots is not None else needed)
    else:
        wanted = max(needed, min(2 * needed, n_blocks))
        for n_slots in range(wanted, needed - 1, -1):
            layout, items = items_for(n_slots)
            if device_limit is None or sum(item.nbytes for item in items) <= device_limit:
                break
    total = sum(item.nbytes for item in items)
    if device_limit is not None and total > device_limit:
        raise DoesNotFitError(
            f"the plan needs {total:,} bytes of device memory ({format_bytes(total)}) and the budget is "
            f"{device_limit:,} ({format_bytes(device_limit)}) for max_batch={max_batch}, max_context={max_context}, "
            f"{layout.n_slots} slots per row and KV head; lower max_batch or max_context"
            + ("" if offload else ", or keep the KV cache on the host with offload=True")
        )

    groups = 0
    if offload:
        group_bytes = layout.pages_per_block * layout.page_bytes
        groups = max_batch * layout.n_blocks
        if host_limit is not None:
            groups = min(groups, host_limit // group_bytes)
            if groups < 1:
                raise DoesNotFitError(
                    f"host_budget={host_limit:,} bytes cannot hold one block of one row ({group_bytes:,} bytes)"
                )
        items.append(
            MemoryItem(
                "KV pages", "host", groups * group_bytes,
                f"{groups} blocks x {config.num_layers} layers x {config.num_kv_heads} KV heads "
                f"x {layout.page_bytes} B",
            )
        )  # fmt: skip
    return MemoryPlan(layout, tuple(items), groups, device_limit, host_limit)
