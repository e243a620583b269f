"""Model and selection configuration, validated where it is made."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

AttentionKind = Literal["dense", "infllmv2", "dma", "nosa"]
EvictionVariant = Literal["ed_dma", "dma", "none"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SelectionBudget:
    """How many KV blocks each rule of the block selection may take, per query and KV head.

    sink, local: the first and the most recent blocks, always selected; `local` counts the current block.
    query: picks by the query-aware score. evict: picks by the query-agnostic score (pooled cis).
    """

    sink: int
    local: int
    query: int
    evict: int

    @property
    def total(self) -> int:
        """C, the number of selected blocks once a sequence has that many."""
        return self.sink + self.local + self.query + self.evict

    @property
    def max_fetched(self) -> int:
        """The most blocks that one decode step can need which the previous step did not select.

        A block that did not exist at the previous step is not counted: it is written, not fetched.
        """
        return min(self.query, self.total)

    @property
    def locality_bound(self) -> float:
        """Lower bound of |selected(t) ∩ selected(t-1)| / C for every step with C blocks selected.

        Up to `query` blocks are new by choice and one more can be new because it did not exist before.
        """
        return max(0.0, 1.0 - (self.query + 1) / self.total)


@dataclass(frozen=True)
class NosaConfig:
    """Dimensions, positions, selection budgets and number formats of a NOSA language model.

    The letters in brackets are the ones that shapes use in docstrings and annotations.
    """

    vocab_size: int  # [V]
    embed_dim: int  # [D]
    ffn_dim: int  # [F]
    num_layers: int  # [L]
    num_heads: int  # [N] query heads
    num_kv_heads: int  # [K]
    head_dim: int = 128  # [H]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    # LongRoPE: one factor per pair of head dimensions divides its frequency; cos and sin are scaled.
    rope_factors: tuple[float, ...] | None = None
    rope_attention_factor: float = 1.0
    tie_embeddings: bool = False
    # The scalings of MiniCPM's checkpoints (arXiv 2404.06395); the defaults scale nothing.
    scale_emb: float = 1.0  # embeddings are multiplied by it
    scale_depth: float | None = None  # attention and feed-forward are multiplied by scale_depth / sqrt(L)
    dim_model_base: float | None = None  # hidden states are divided by D / dim_model_base before the logits
    # Blocks and pooling, in tokens.
    block_size: int = 64  # [P]
    pool_window: int = 32
    pool_stride: int = 16
    # Selection budget, in blocks; local_blocks includes the current block.
    sink_blocks: int = 1
    local_blocks: int = 17
    query_blocks: int = 15
    evict_blocks: int = 31
    attention: AttentionKind = "nosa"
    eviction: EvictionVariant = "ed_dma"
    dtype: ComputeDtype = "bfloat16"  # activations and KV cache; scores, cis and softmax stay float32
    param_dtype: ComputeDtype = "float32"
    max_context: int = 131_072  # tokens; positions from here on are refused

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "ffn_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "block_size", "pool_window", "pool_stride", "local_blocks", "max_context"):  # fmt: skip
            if not _is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be an integer of at least 1")
        for name in ("sink_blocks", "query_blocks", "evict_blocks"):
            if not _is_integer(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be an integer of at least 0")
        for name in (
            "rms_norm_eps",
            "rope_theta",
            "rope_attention_factor",
            "scale_emb",
            "scale_depth",
            "dim_model_base",
        ):
            value = getattr(self, name)
            if value is None and name in ("scale_depth", "dim_model_base"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} must be a positive, finite number")
        for name, kinds in (("attention", AttentionKind), ("eviction", EvictionVariant),
                            ("dtype", ComputeDtype), ("param_dtype", ComputeDtype)):  # fmt: skip
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(kinds))}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs of dimensions")
        if self.rope_factors is not None:
            object.__setattr__(self, "rope_factors", tuple(self.rope_factors))  # hashable: configs are static arguments
            if len(self.rope_factors) != self.head_dim // 2:
                raise ValueError(
                    f"rope_factors has {len(self.rope_factors)} entries; head_dim={self.head_dim} needs "
                    f"{self.head_dim // 2}"
                )
            if not all(math.isfinite(f) and f > 0 for f in self.rope_factors):
                raise ValueError("rope_factors must be positive and finite")
        if self.block_size % self.pool_stride:
            raise ValueError(f"block_size={self.block_size} must be a multiple of pool_stride={self.pool_stride}")
        if self.pool_window % self.pool_stride:
            raise ValueError(f"pool_window={self.pool_window} must be a multiple of pool_stride={self.pool_stride}")
        if self.max_context > 2**22:
            raise ValueError(
                f"max_context={self.max_context} exceeds 4,194,304 (2**22), where RoPE angles lose accuracy"
            )
        self._require_locality_proof()

    def _require_locality_proof(self) -> None:
        """The bound on fetched blocks needs a block's static score to be final when it leaves the local window."""
        final_after = self.block_size - self.pool_stride + self.pool_window - 1
        if self.local_blocks * self.block_size < final_after:
            needed = -(-final_after // self.block_size)
            raise ValueError(
                f"local_blocks={self.local_blocks} breaks the locality guarantee: with block_size={self.block_size}, "
                f"pool_window={self.pool_window} and pool_stride={self.pool_stride} the pooled score of a block "
                f"changes until {final_after} tokens after its first one, but the block leaves the local window after "
                f"{self.local_blocks * self.block_size}. Set local_blocks to at least {needed}."
            )

    # Derived sizes.
    @property
    def group_size(self) -> int:
        """G, the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def residual_scale(self) -> float:
        """What every layer's attention and feed-forward outputs are multiplied by."""
        return 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.num_layers)

    @property
    def logit_divisor(self) -> float:
        """What hidden states are divided by before the logits."""
        return 1.0 if self.dim_model_base is None else self.embed_dim / self.dim_model_base

    @property
    def budget(self) -> SelectionBudget:
        """The selection budget of `self.attention`; see `budget_for`."""
        return self.budget_for(self.attention)

    def budget_for(self, attention: AttentionKind) -> SelectionBudget:
        """How one of the compared systems divides the same C blocks (page 2 of docs/).

        nosa: as configured. infllmv2: everything not forced goes to the query-aware score. dma: to pooled cis.
        dense selects nothing; its budget is that of nosa, for caches that hold every block anyway.
        """
        free = self.query_blocks + self.evict_blocks
        query, evict = {"infllmv2": (free, 0), "dma": (0, free)}.get(attention, (self.query_blocks, self.evict_blocks))
        return SelectionBudget(self.sink_blocks, self.local_blocks, query, evict)

    def uses_eviction_head(self, attention: AttentionKind | None = None) -> bool:
        """Whether cis biases the attention (and ranks blocks) under `attention`."""
        return self.eviction != "none" and (attention or self.attention) in ("nosa", "dma")

    def num_blocks(self, num_tokens: int) -> int:
        """M, the blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_windows(self, num_tokens: int) -> int:
        """W, the complete pooling windows of `num_tokens` tokens."""
        return max(0, (num_tokens - self.pool_window) // self.pool_stride + 1)

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from `to_dict`'s output. Raises ValueError naming keys that are unknown or missing."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - set(fields)):
            raise ValueError(f"unknown config keys: {', '.join(unknown)}")
        required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
        if missing := sorted(required - set(values)):
            raise ValueError(f"missing config keys: {', '.join(missing)}")
        if isinstance(values.get("rope_factors"), list):  # JSON has no tuples
            values = values | {"rope_factors": tuple(values["rope_factors"])}
        return cls(**values)

    # Presets.
    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """A byte-level model that trains in minutes on a laptop CPU; 16 blocks of 16 tokens selected.

        Its budget has the shape of the published one: locality bound 0.75, at most 3 of 16 blocks fetched a step.
        """
        values: dict[str, Any] = dict(
            vocab_size=259, embed_dim=128, ffn_dim=384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
            block_size=16, pool_window=8, pool_stride=4, sink_blocks=1, local_blocks=4, query_blocks=3,
            evict_blocks=8, dtype="float32", max_context=16_384,
        )  # fmt: skip
        return cls(**(values | changes))

    @classmethod
    def nosa_1b(cls, **changes: Any) -> Self:
        """The published 1B shape: 1,622,179,896 parameters."""
        values: dict[str, Any] = dict(
            vocab_size=73_448, embed_dim=2048, ffn_dim=6144, num_layers=28, num_heads=16, num_kv_heads=2
        )
        return cls(**(values | changes))

    @classmethod
    def nosa_8b(cls, **changes: Any) -> Self:
        """The published 8B shape: 8,185,270,336 parameters."""
        values: dict[str, Any] = dict(
            vocab_size=73_448, embed_dim=4096, ffn_dim=16_384, num_layers=32, num_heads=32, num_kv_heads=2
        )
        return cls(**(values | changes))
