"""What the parts of kernels.py share: shapes, options, and the figures measured so far."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from timing import Contender, seconds_per_call


@dataclass(frozen=True)
class Shape:
    """Of a layer and of its selection; the defaults are those of NOSA-8B at 64K tokens."""

    heads: int = 32
    kv_heads: int = 2
    head_dim: int = 128
    block: int = 64
    window: int = 32
    stride: int = 16
    sink: int = 1
    local: int = 17
    query: int = 15
    evict: int = 31
    context: int = 65_536

    @property
    def budget(self) -> dict[str, int]:
        """Blocks by rule."""
        return {name: getattr(self, name) for name in ("sink", "local", "query", "evict")}

    @property
    def selected(self) -> int:
        """C."""
        return sum(self.budget.values())

    @property
    def pooling(self) -> dict[str, int]:
        """As `pooled_scores` takes it."""
        return {"block_size": self.block, "window": self.window, "stride": self.stride}

    @property
    def page_bytes(self) -> int:
        """Keys and values of one block of one KV head, in 16 bits."""
        return 2 * self.block * self.head_dim * 2


SMALL = Shape(heads=4, kv_heads=2, head_dim=64, block=16, window=8, stride=4, local=4, query=3, evict=8, context=1024)


@dataclass(frozen=True)
class Options:
    """Time the kernels."""

    parts: tuple[str, ...] = ()
    """Parts to run, in this order; all of them by default."""
    rows: tuple[int, ...] = (16, 64)
    """Requests in a decoding batch."""
    contexts: tuple[int, ...] = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
    """Context lengths of the dense decode that decode_attention is compared with."""
    lengths: tuple[int, ...] = (32_768, 65_536, 131_072)
    """Sequence lengths of sparse_attention."""
    changed_picks: float = 3.6
    """Selected blocks that change from one token to the next (3.58 was published for NOSA-8B at 16K)."""
    kernel: Literal["mosaic_gpu", "reference", "xla"] = "mosaic_gpu"
    """What is timed as the kernel. The others run anywhere, to see that all of it works up to the kernels."""
    small: bool = False
    """Tiny shapes and few repeats, for a CPU."""
    seconds: float = 3600.0
    """Begin no further case when they are over."""
    part_seconds: float = 150.0
    """Most seconds for one part."""
    rates: tuple[float, float] | None = None
    """Bytes and matrix operations per second, if measured before; parts of one run share them."""
    isolate: bool = True
    """Every part in a process of its own, so that one which breaks or hangs costs no other."""
    out: Path = Path("benchmarks/results")


class OutOfTimeError(Exception):
    """The time given is over; what was measured before stands."""


@dataclass
class Bench:
    """Times contenders and keeps the figures; `deadline` is of `time.monotonic`, `keep` is called after each figure."""

    options: Options
    bandwidth: float
    matmul: float
    deadline: float
    keep: Callable[["Bench"], None] = lambda bench: None
    figures: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        """Of the layer."""
        return SMALL if self.options.small else Shape()

    @property
    def on_gpu(self) -> bool:
        """Whether cuDNN and the handlers' kernels are there to be compared with."""
        return jax.default_backend() == "gpu"

    @property
    def implementations(self) -> tuple[str, ...]:
        """The kernel, and XLA to compare it with."""
        return tuple(dict.fromkeys((self.options.kernel, "xla")))

    def seconds(
        self,
        case: str,
        contenders: dict[str, Contender],
        *,
        repeats: int,
        unroll: int = 1,
        rounds: int = 7,
        donate: bool = False,
    ) -> dict[str, float]:
        """As `seconds_per_call`; what fails is noted, printed and left out.

        Raises:
          OutOfTimeError: before anything is timed.
          RuntimeError: none of them runs.
        """
        if time.monotonic() > self.deadline:
            raise OutOfTimeError(case)
        if self.options.small:
            repeats, unroll, rounds = 1, 1, 2
        failed: dict[str, str] = {}
        found = seconds_per_call(
            contenders, repeats=repeats, unroll=unroll, rounds=rounds, failures=failed, donate=donate
        )
        for name, message in failed.items():
            self.failures.append(f"{case}, {name}: {message}")
            print(f"FAILED {self.failures[-1][:600]}", flush=True)
        if not found:
            raise RuntimeError(f"{case}: nothing runs")
        return found

    def add(self, kernel: str, case: str, seconds: dict[str, float], floor: float, **more: Any) -> None:
        """Keep and print one row: the seconds of each contender and the floor."""
        self.figures.append({"kernel": kernel, "case": case, "seconds": seconds, "floor_seconds": floor, **more})
        times = ", ".join(f"{name} {value * 1e6:,.1f}" for name, value in seconds.items())
        rest = ", ".join(f"{name} {value:.3g}" for name, value in more.items() if isinstance(value, float))
        print(f"{kernel:17} {case:38} us: {times}; floor {floor * 1e6:,.2f}{f' ({rest})' if rest else ''}", flush=True)
        self.keep(self)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random values of a shape."""
    return jax.jit(partial(jax.random.normal, shape=shape, dtype=dtype))(jax.random.key(seed, impl="rbg"))


def chain(carry: jax.Array, value: jax.Array) -> jax.Array:
    """A carry that needs a result and stays as it was."""
    # In floating point: an integer 0 would be folded away.
    return carry + value.reshape(-1)[0].astype(carry.dtype) * 0
