"""Settings of a training run; the command line is generated from these dataclasses."""

import ast
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import tyro

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.tokenizer import BYTES

Preset = Literal["tiny", "nosa_1b", "nosa_8b", "checkpoint"]
ParameterLayout = Literal["replicated", "fsdp"]


@dataclass(frozen=True)
class Phase:
    """One stretch of training with one kind of attention; the paper trains dense first, then NOSA."""

    steps: int
    """Optimizer steps; 0 leaves the phase out."""
    seq_len: int
    """Tokens of a training window."""
    batch: int
    """Windows per optimizer step, over all devices and all accumulated microbatches."""
    attention: AttentionKind
    """Which keys a query may see."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise InputError(f"steps={self.steps} must not be negative; 0 leaves the phase out")
        for name in ("seq_len", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.attention not in get_args(AttentionKind):
            raise InputError(f"attention={self.attention!r} must be one of {', '.join(get_args(AttentionKind))}")


@dataclass(frozen=True)
class Optimizer:
    """AdamW with linear warm-up, cosine decay over both phases together, and clipping by the global norm."""

    learning_rate: float = 2e-3
    """Peak, reached at the end of the warm-up."""
    warmup_steps: int = 20
    final_ratio: float = 0.1
    """Learning rate of the last step, as a part of the peak."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices only; norms and the eviction head are left alone."""
    clip_norm: float = 1.0
    accumulate: int = 1
    """Microbatches whose gradients make one step; divides the phases' batch."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "clip_norm"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InputError(f"{name}={getattr(self, name)} must be positive and finite")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if not 0 <= self.final_ratio <= 1:
            raise InputError(f"final_ratio={self.final_ratio} must be in [0, 1]")
        for name in ("warmup_steps", "weight_decay"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InputError(f"{name}={getattr(self, name)} must be at least 0 and finite")
        if self.accumulate < 1:
            raise InputError(f"accumulate={self.accumulate} must be at least 1")


@dataclass(frozen=True)
class TrainConfig:
    """Train a NOSA language model on text, first with dense attention, then with NOSA."""

    out: str
    """Folder of the run: checkpoints, metrics, loss.png."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="stdlib|PATH...")] = ("stdlib",)
    """Files, folders, *.jsonl; "stdlib" is the source code of the running Python's standard library."""
    preset: Preset = "tiny"
    """Model dimensions; "checkpoint" takes the whole config of --init-from, with float32 parameters."""
    override: tuple[str, ...] = ()
    """Fields of the preset to change, like num_layers=2 dtype=bfloat16."""
    tokenizer: str = BYTES
    """"bytes", or the path of a tokenizer.json."""
    dense: Phase = Phase(steps=250, seq_len=512, batch=4, attention="dense")
    nosa: Phase = Phase(steps=60, seq_len=1024, batch=2, attention="nosa")
    optimizer: Optimizer = field(default_factory=Optimizer)
    init_from: str | None = None
    """Start from the weights of this run, exported or released checkpoint instead of random ones."""
    train_only: tuple[str, ...] = ()
    """Patterns of parameter names to train, like "*.delta_*" "*.a_k"; everything else stays bit for bit. Empty: all."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameter names to leave as they are."""
    parameters: ParameterLayout = "replicated"
    """Over several devices: a copy each, or split ("fsdp"). The batch is always split."""
    remat: bool | None = None
    """Recompute activations in the backward pass to save memory. Default: from 2048 tokens or 100M parameters on."""
    max_bytes: int | None = None
    """Read no more text than this."""
    text_field: str = "text"
    """Key of the text in JSONL lines."""
    validation: float = 0.02
    """Part of the documents held out for validation, chosen by their content's hash."""
    eval_every: int = 50
    """Steps between validations; each phase also ends with one. 0: only those."""
    eval_windows: int = 32
    """Validation windows, spread evenly over the held-out text."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    keep: int = 2
    """Checkpoints kept, the latest ones."""
    resume: bool = False
    """Go on from the latest complete checkpoint of `out`, if there is one."""
    export: str | None = None
    """Also write the final weights, without optimizer state, to this new folder."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.data:
            raise InputError("data is empty; give files, folders or 'stdlib'")
        if self.total_steps < 1:
            raise InputError(
                f"dense.steps={self.dense.steps} and nosa.steps={self.nosa.steps} leave nothing to train; "
                "give one of them at least 1"
            )
        if not 0 < self.validation < 1:
            raise InputError(f"validation={self.validation} must be between 0 and 1, both excluded")
        for name in ("eval_every", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)} must not be negative; 0 means only at the end")
        for name in ("eval_windows", "keep"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise InputError(f"max_bytes={self.max_bytes} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed={self.seed} must be in 0..{2**32 - 1}")
        for phase in self.phases:
            if phase.batch % self.optimizer.accumulate:
                raise InputError(
                    f"batch={phase.batch} of the {phase.attention} phase must be a multiple of "
                    f"accumulate={self.optimizer.accumulate}"
                )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that have steps, in order."""
        return tuple(p for p in (self.dense, self.nosa) if p.steps)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.dense.steps + self.nosa.steps

    def model_config(self, base: NosaConfig | None = None) -> NosaConfig:
        """The preset, or `base`, with the overrides. Raises InputError naming the field at fault."""
        changes = dict(_override(text) for text in self.override)
        try:
            return getattr(NosaConfig, self.preset)(**changes) if base is None else base.replace(**changes)
        except (ValueError, TypeError) as error:
            raise InputError(f"the model config is not valid: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


# What a resumed run may give otherwise than the run before it: what cannot change the weights' course, and what the
# checkpoint holds by content (model config, tokenizer, corpus, the weights that training began with).
MAY_DIFFER = frozenset(
    {"out", "resume", "export", "keep", "checkpoint_every", "eval_every", "eval_windows", "parameters",
     "preset", "override", "tokenizer", "data", "max_bytes", "text_field", "validation", "init_from"}
)  # fmt: skip


def _override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    fields = {f.name for f in dataclasses.fields(NosaConfig)}
    if not equals or name not in fields:
        raise InputError(
            f"override {text!r} must be FIELD=VALUE with a field of NosaConfig: {', '.join(sorted(fields))}"
        )
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a word such as bfloat16
