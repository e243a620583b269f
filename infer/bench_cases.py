"""What `nosa-bench throughput` measures: rows as text, the suite of the rows that matter most, and what they show."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nosa_jax.config import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.infer.plan import parse_bytes
from nosa_jax.infer.systems import SYSTEMS, System
from nosa_jax.infer.throughput import Measurement, beside_weights
from nosa_jax.offload.layout import CacheLayout

# Misses of InfLLMv2 with exactly C slots that the throughputs published with NOSA imply, at 16K tokens and 16 rows on
# an H100 (arXiv 2510.13602): 16/1762.16 - 16/2551.66 = 2.81 ms more a step, which a link of 50 GB/s fills with 4.2
# blocks of 32 KiB per layer (32), row and KV head (2), beside NOSA's 3.58. An inference, not a measurement.
INFLLMV2_MISSES = 7.8

ROW_FORM = "SYSTEM:CONTEXT:ROWS[,budget=24GiB][,locality=weights|published|MISSES][,steps=N][,overlap=on|off]"


@dataclass(frozen=True)
class Case:
    """One row to measure.

    rows: 0 for as many as the budget holds. budget: of device memory beside the weights, as text; None for no limit.
    locality: "published", "weights", or the misses a step at C slots of a synthetic trace; None for the command's.
    steps_per_dispatch, overlap: None for the command's.
    """

    system: System
    context: int
    rows: int
    budget: str | None = None
    locality: str | None = None
    steps_per_dispatch: int | None = None
    overlap: bool | None = None

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Read `ROW_FORM`; numbers may end in K (1024) or M (1024 K), rows may be "max".

        Raises:
          InputError: the text has another form; names the part.
        """
        head, *options = text.split(",")
        parts = head.split(":")
        if len(parts) != 3:
            raise InputError(f"{text!r} is no row to measure; write {ROW_FORM}, like nosa:64K:16")
        name, context, rows = parts
        case = cls(system_named(name), _number(context, text), 0 if rows == "max" else _number(rows, text))
        for option in options:
            key, _, value = option.partition("=")
            match key:
                case "budget":
                    parse_bytes(value)
                    case = dataclasses.replace(case, budget=value)
                case "locality":
                    _check_locality(value, text)
                    case = dataclasses.replace(case, locality=value)
                case "steps":
                    case = dataclasses.replace(case, steps_per_dispatch=_number(value, text))
                case "overlap":
                    if value not in ("on", "off"):
                        raise InputError(f"overlap={value} in {text!r} must be on or off")
                    case = dataclasses.replace(case, overlap=value == "on")
                case _:
                    raise InputError(f"{text!r} has the unknown option {key!r}; write {ROW_FORM}")
        return case

    def layout(self, config: NosaConfig) -> CacheLayout:
        """The cache; of one row where the number is still to be found."""
        try:
            return self.system.layout(config, max(self.rows, 1), self.context, overlap=bool(self.overlap))
        except ValueError as error:
            raise InputError(f"{self} cannot be measured: {error}") from error

    def fit(self, config: NosaConfig, most: int) -> "Case | None":
        """The case with its number of rows; None if the budget does not hold them.

        Raises:
          InputError: as many rows as fit are asked for, and nothing says into what.
        """
        budget = parse_bytes(self.budget)
        if self.rows == 0:
            if budget is None:
                raise InputError("as many rows as fit need a budget: --device-budget, or budget= in the row")
            found = largest_batch(self.system, config, self.context, budget, most)
            return dataclasses.replace(self, rows=found) if found else None
        return self if budget is None or beside_weights(self.layout(config)) <= budget else None

    def __str__(self) -> str:
        budget = "" if self.budget is None else f", {self.budget}"
        rows = f"{self.rows} rows" if self.rows else "as many rows as fit"
        return f"{self.system.name}, {self.context} tokens, {rows}{budget}{', overlap' if self.overlap else ''}"


def system_named(name: str) -> System:
    """One of `SYSTEMS`. Raises InputError naming them."""
    if name not in SYSTEMS:
        raise InputError(f"unknown systems {name}; known: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def compiler_options(texts: Sequence[str]) -> dict[str, str | bool] | None:
    """XLA's options by name, true and false as such. Raises InputError for what is no NAME=VALUE."""
    pairs = [text.partition("=") for text in texts]
    for name, sign, _ in pairs:
        if not (name and sign):
            raise InputError(f"--xla-options {name!r} is no NAME=VALUE")
    return {name: {"true": True, "false": False}.get(value, value) for name, _, value in pairs} or None


def largest_batch(system: System, config: NosaConfig, context: int, budget: int, most: int) -> int:
    """The most rows, up to a limit, whose cache and workspace fit into the budget; 0 if not even one does."""
    fits, too_many = 0, most + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if beside_weights(system.layout(config, middle, context)) <= budget:
            fits = middle
        else:
            too_many = middle
    return fits


def _number(value: str, text: str) -> int:
    factor = {"K": 1024, "M": 1024**2}.get(value[-1:].upper(), 1)
    digits = value if factor == 1 else value[:-1]
    if not digits.isdecimal() or int(digits) < 1:
        raise InputError(f"{value!r} in {text!r} is no positive number like 65536, 64K or 1M; write {ROW_FORM}")
    return int(digits) * factor


def _check_locality(value: str, text: str) -> None:
    if value in ("weights", "published"):
        return
    try:
        positive = 0 < float(value) < math.inf
    except ValueError:
        positive = False
    if not positive:
        raise InputError(f"locality={value} in {text!r} must be weights, published or a positive number of misses")


def target_cases() -> list[Case]:
    """The rows that the project's targets speak of, the most important first."""
    infllmv2 = f"locality={INFLLMV2_MISSES}"
    rows = (
        "nosa:64K:16,overlap=on",
        "nosa:64K:64,overlap=on",
        "nosa:64K:32,overlap=on",
        "dense:96K:max,budget=24GiB",
        "nosa:96K:max,budget=24GiB,overlap=on",
        "nosa-c:16K:16",
        f"infllmv2-c:16K:16,{infllmv2}",
        "nosa-c:64K:16",
        "nosa-c:64K:64",
        "nosa-resident:32K:16",
        "nosa:32K:16,overlap=on",
        "nosa:64K:16",
        "nosa:64K:64",
        "nosa:64K:32",
        "nosa:16K:16,overlap=on",
        "infllmv2-c:16K:16,locality=weights",
        f"infllmv2:16K:16,{infllmv2},overlap=on",
        "dense:64K:16",
        "dense:16K:16",
        "nosa-c:96K:max,budget=24GiB",
    )
    dispatched = [Case.parse(f"{row},steps=1") for row in rows]
    return [*dispatched, Case.parse("nosa:64K:16,overlap=on,steps=8")]


@dataclass(frozen=True)
class Target:
    """A figure to reach: what it says, its value from the rows there are, and the limit with its direction."""

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def reached(self) -> bool:
        """Whether the value is on the right side of the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return (
            f"{self.name}: {self.value:.2f} (target {sign} {self.limit:g}, {'reached' if self.reached else 'missed'})"
        )


def targets(rows: Sequence[Measurement]) -> list[Target]:
    """Every target whose rows were measured; of rows that differ in dispatch or overlap alone, the fastest counts."""
    found: list[Target] = []

    def best(*systems: str, where: Callable[[Measurement], bool]) -> float | None:
        """Tokens per second of the fastest row of some systems."""
        return max((r.tokens_per_second for r in rows if r.system in systems and where(r)), default=None)

    def at(context: int, batch: int) -> Callable[[Measurement], bool]:
        return lambda r: (r.context, r.batch) == (context, batch)

    def plain(context: int, batch: int, origin: str | None = None) -> Callable[[Measurement], bool]:
        return lambda r: at(context, batch)(r) and not r.overlap and origin in (None, r.locality)

    def within(context: int, budget: str | None) -> Callable[[Measurement], bool]:
        return lambda r: (r.context, r.device_budget) == (context, budget)

    def ratio(name: str, limit: float, one: float | None, other: float | None) -> None:
        if one is not None and other is not None:
            found.append(Target(name, one / other, limit, at_least=True))

    for budget in dict.fromkeys(r.device_budget for r in rows if r.context == 98_304):
        name = f"tokens/s of NOSA over dense, 96K, {budget or 'no limit'}"
        there = within(98_304, budget)
        ratio(name, 5.04, best("nosa", "nosa-c", where=there), best("dense", where=there))
    for origin in dict.fromkeys(r.locality for r in rows if r.system == "infllmv2-c"):
        name = f"tokens/s of NOSA over InfLLMv2 ({origin}), C slots, 16K, 16 rows"
        ratio(name, 1.45, best("nosa-c", where=plain(16_384, 16)), best("infllmv2-c", where=plain(16_384, 16, origin)))
    for batch in (16, 64):
        ratio(
            f"tokens/s of NOSA over its authors' setting, 64K, {batch} rows", 1.4,
            best("nosa", where=at(65_536, batch)), best("nosa-c", where=plain(65_536, batch)),
        )  # fmt: skip
    for batch in (16, 32, 64):
        own = [r.of_floor for r in rows if r.system == "nosa" and at(65_536, batch)(r)]
        if own:
            found.append(Target(f"step over its floor, 64K, {batch} rows", min(own), 1.35, at_least=False))
    offloaded, resident = (best(name, where=at(32_768, 16)) for name in ("nosa", "nosa-resident"))
    if offloaded is not None and resident is not None:
        found.append(Target("time lost to offloading, 32K, 16 rows", resident / offloaded - 1, 0.25, at_least=False))
    return found
