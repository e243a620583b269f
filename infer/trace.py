"""Selections to replay: which blocks a step picks beside the forced ones, recorded from a model or made up.

How fast an offloaded step is depends on how many selected blocks are not in a slot, and random weights do not select as
trained ones do. A trace fixes the selection, so that systems can be timed on the locality of a trained model.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import get_args
from zipfile import BadZipFile

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.errors import InputError

# Misses per layer, KV head, row and step of NOSA-8B at 16K tokens by slots (C = 64): a published third-party
# measurement, which replayed one trace through LRU tables of these sizes.
PUBLISHED_MISSES = {64: 3.58, 80: 1.20, 96: 0.86, 128: 0.71}


@dataclass(frozen=True)
class SelectionTrace:
    """Picks of consecutive decode steps in independent streams; one stream stands for one KV head of a layer and row.

    picks: int32 [steps, streams, picks], ids among the blocks that are not forced, each once, ascending.
    n_candidates: the ids are below sink + n_candidates and from sink on.
    origin: in words, where it comes from; printed with every figure that used it.
    attention: the system that picked them.
    """

    picks: np.ndarray
    sink: int
    n_candidates: int
    origin: str
    attention: AttentionKind = "nosa"

    def __post_init__(self) -> None:
        if self.picks.ndim != 3:
            raise InputError(f"a trace has dimensions [steps, streams, picks], not {self.picks.shape}")
        if not self.picks.size:
            raise InputError(f"a trace must pick something in every step; its dimensions are {self.picks.shape}")
        low, high = int(self.picks.min()), int(self.picks.max())
        if low < self.sink or high >= self.sink + self.n_candidates:
            raise InputError(
                f"the trace picks blocks {low} .. {high}; candidates are {self.sink} .. "
                f"{self.sink + self.n_candidates - 1}"
            )

    def save(self, path: Path | str) -> None:
        """Write a compressed .npz file."""
        np.savez_compressed(
            path, picks=self.picks.astype(np.int32), sink=self.sink, n_candidates=self.n_candidates,
            origin=self.origin, attention=self.attention,
        )  # fmt: skip

    @classmethod
    def load(cls, path: Path | str) -> "SelectionTrace":
        """Read a file that `save` wrote.

        Raises:
          InputError: there is no such file, or it does not hold a trace; names what is missing.
        """
        record = "record one with nosa-bench trace"
        try:
            with np.load(path, allow_pickle=False) as data:
                missing = {"picks", "sink", "n_candidates", "origin"} - set(data.files)
                if missing:
                    raise InputError(f"{path} is no selection trace: it lacks {', '.join(sorted(missing))}; {record}")
                attention = str(data["attention"]) if "attention" in data.files else "nosa"
                if attention not in get_args(AttentionKind):
                    raise InputError(f"{path} holds picks of {attention!r}, which is none of the systems here")
                return cls(
                    data["picks"].astype(np.int32), int(data["sink"]), int(data["n_candidates"]),
                    str(data["origin"]), attention,  # type: ignore[arg-type]
                )  # fmt: skip
        except (OSError, EOFError, BadZipFile, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} cannot be read as a selection trace: {error}; {record}") from error

    def require_fit(self, config: NosaConfig, attention: AttentionKind, *, first_length: int, steps: int) -> None:
        """Refuse to be replayed where it does not fit.

        Args:
          config, attention: what is to attend to the picks.
          first_length: tokens in every row at the first step.
          steps: that are to be replayed.

        Raises:
          InputError: the trace is of another system or budget, shorter than the steps, or picks blocks that the rows
            do not have outside of the local window.
        """
        budget = config.budget_for(attention)
        wanted = budget.query + budget.evict
        n_steps, _, n_picks = self.picks.shape
        end, there = self.sink + self.n_candidates, first_length // config.block_size + 1 - budget.local
        if self.attention != attention:
            raise InputError(f"the trace holds picks of {self.attention!r} and {attention!r} is to replay them")
        if n_picks != wanted or self.sink != budget.sink:
            raise InputError(
                f"the trace has {n_picks} picks behind {self.sink} sink blocks, and the model picks {wanted} behind "
                f"{budget.sink}; record one from a model with that budget (C={budget.total})"
            )
        if n_steps < steps:
            raise InputError(
                f"the trace holds {n_steps} steps and {steps} are to be replayed; record more with nosa-bench trace "
                "--tokens, or time fewer with --steps and --rounds"
            )
        if end > there:
            needed = (end + budget.local - 1) * config.block_size
            raise InputError(
                f"the trace picks among the first {end} blocks, and rows of {first_length} tokens have {there} outside "
                f"of the local window; replay it at {needed + steps} tokens or more, or record one from shorter prompts"
            )

    def misses(self, slots: int, forced: int) -> float:
        """Mean misses of a step under least-recently-used replacement with so many slots, `forced` of them taken.

        The first half of the steps fills the tables and is not counted.
        """
        room = slots - forced
        if room < self.picks.shape[2]:
            raise InputError(f"{slots} slots cannot hold {forced} forced blocks and {self.picks.shape[2]} picks")
        n_steps, n_streams, _ = self.picks.shape
        # A table with room for more than there is has its last places empty.
        last_used = np.full((n_streams, max(self.sink + self.n_candidates, room)), -1)
        rows = np.arange(n_streams)[:, None]
        counted = 0
        for step, picks in enumerate(self.picks):
            before = last_used[rows, picks]
            # A block is in a slot if fewer than `room` blocks were used since, or as lately: ties cannot be told apart.
            order = -np.sort(-last_used, axis=1)[:, room - 1 : room]
            missed = (before < order) | (before < 0)
            if step >= n_steps // 2:
                counted += int(missed.sum())
            last_used[rows, picks] = step
        return counted / (n_steps - n_steps // 2) / n_streams


def synthetic_trace(
    config: NosaConfig,
    *,
    context: int,
    steps: int,
    streams: int = 64,
    misses: dict[int, float] | None = None,
    attention: AttentionKind = "nosa",
    seed: int = 0,
) -> SelectionTrace:
    """A trace with stated misses per step at several table sizes.

    Every step drops as many random picks as miss with exactly C slots and takes others instead: blocks dropped a short
    or a long time ago, in the proportions that the larger tables' misses imply, and never-used ones.

    Args:
      config: its budget and block size.
      context: tokens at the first step.
      misses: by number of slots, the first being C; None takes `PUBLISHED_MISSES`.
      attention: the system whose picks these are to be.

    Raises:
      InputError: too short a context, more misses than a step can have, or misses that do not begin with those at C.
    """
    budget = config.budget_for(attention)
    wanted = PUBLISHED_MISSES if misses is None else misses
    sizes = sorted(wanted)
    if sizes[0] != budget.total:
        raise InputError(f"misses must begin with those at C={budget.total} slots, not at {sizes[0]}")
    n_picks = budget.query + budget.evict
    n_candidates = context // config.block_size + 1 - budget.sink - budget.local
    least = n_picks + max(sizes) - budget.total + budget.query  # picks, what the tables hold beside, and what is new
    if n_candidates < least:
        raise InputError(
            f"a context of {context} tokens has too few blocks to miss in a table of {max(sizes)} slots; "
            f"take at least {(least + budget.sink + budget.local - 1) * config.block_size} tokens"
        )
    if not 0 < wanted[sizes[0]] <= budget.query:
        raise InputError(
            f"{wanted[sizes[0]]} misses with {sizes[0]} slots: a step replaces more than 0 and at most the "
            f"{budget.query} blocks that it picks by query"
        )
    rng = np.random.default_rng(seed)
    # Shares of the changed picks by how long ago the block was dropped: places in the order of last use.
    bounds = [size - budget.total for size in sizes] + [n_candidates - n_picks]
    remaining = [wanted[size] for size in sizes]
    shares = [(a - b) / remaining[0] for a, b in pairwise(remaining)]
    shares.append(remaining[-1] / remaining[0])
    order = np.stack([rng.permutation(n_candidates) for _ in range(streams)])  # most recently used first
    picks = np.empty((steps, streams, n_picks), np.int32)
    for step in range(steps):
        for stream in range(streams):
            row = order[stream]
            n_changed = rng.binomial(budget.query, min(1.0, remaining[0] / budget.query))
            dropped = rng.choice(n_picks, n_changed, replace=False)
            classes = rng.choice(len(shares), n_changed, p=shares)
            taken: set[int] = set()
            for kind in classes:
                low, high = n_picks + bounds[kind], n_picks + bounds[kind + 1]
                if sum(low <= place < high for place in taken) == high - low:
                    continue  # this class has no block left; the step replaces one less
                place = int(rng.integers(low, high))
                while place in taken:
                    place = int(rng.integers(low, high))
                taken.add(place)
            dropped = dropped[: len(taken)]
            held = np.delete(row[:n_picks], dropped)
            back = np.asarray(sorted(taken), int)
            rest = np.delete(row, np.concatenate([np.arange(n_picks), back]))
            order[stream] = np.concatenate([held, row[back], row[:n_picks][dropped], rest])
            picks[step, stream] = np.sort(order[stream, :n_picks])
    trace = SelectionTrace(picks + budget.sink, budget.sink, n_candidates, "")
    reached = {size: trace.misses(size, budget.sink + budget.local) for size in sizes}
    found = ", ".join(f"{value:.2f} with {size} slots" for size, value in reached.items())
    origin = f"synthetic: {found} miss of {budget.total} a step"
    return SelectionTrace(trace.picks, budget.sink, n_candidates, origin, attention)


def replayed_ids(
    picks: Int[Array, "streams picks"], lengths: Int[Array, "B"], config: NosaConfig
) -> Int[Array, "layers B K C"]:
    """Selected block ids of one step: the picks, between the blocks that the tokens at `lengths` must have.

    Streams are dealt out to layers, rows and KV heads in turn: each gets its own where the trace has as many.
    """
    budget = config.budget
    lead = (config.num_layers, lengths.shape[0], config.num_kv_heads)
    own = picks[jnp.arange(math.prod(lead)) % picks.shape[0]].reshape(*lead, -1)
    current = lengths // config.block_size
    sink = jnp.broadcast_to(jnp.arange(budget.sink), (*lead, budget.sink))
    local = current[:, None, None] + 1 - budget.local + jnp.arange(budget.local)
    return jnp.concatenate([sink, own, jnp.broadcast_to(local, (*lead, budget.local))], axis=-1).astype(jnp.int32)
