"""The compiled pieces that the scheduler puts together: starting and stopping rows, first tokens, decode steps."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nosa_jax.infer.compiling import jit_in_place, step_options
from nosa_jax.infer.decode import step
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.sampling import SamplingState, finished, sample
from nosa_jax.offload.state import DecodeState, StepCounts


class StepsOutput(NamedTuple):
    """What n decode steps give.

    report: what the host reads of them, one small array: for each step and row the token (see `unpack_token`); the
      step's hits, misses, selected and kept blocks over all layers and KV heads; the row's hits and misses and the bits
      of its least locality since it was started.
    counts: the steps' own copies of `state.last`, where they were asked for, with a leading axis of n.
    """

    state: DecodeState  # what was donated comes first and in its order, so that each leaf stays where it was
    tokens: Int[Array, "B"]
    sampling: SamplingState
    report: Int[Array, "n B 8"]
    counts: StepCounts | None


class _RowTables(NamedTuple):
    """The parts of a state that starting a row changes."""

    page_table: Int[Array, "B M"]
    capacity: Int[Array, "B"]
    active: Bool[Array, "B"]
    total: StepCounts
    last: StepCounts
    min_locality: Float[Array, "L B K"]


def start_row(
    state: DecodeState, row: int, table: Int[np.ndarray, " M"], capacity: int, *, active: bool
) -> DecodeState:
    """Give a row its pages and room, and forget the counts of whoever had it before.

    active: whether steps decode the row from now on; a row whose prompt is still being read must not.
    """
    tables = _RowTables(**{name: getattr(state, name) for name in _RowTables._fields})
    return state.replace(**_start_row(tables, row, table, capacity, active)._asdict())


@partial(jax.jit, donate_argnums=0)
def _start_row(tables: _RowTables, row: Any, table: Any, capacity: Any, active: Any) -> _RowTables:
    return _RowTables(
        page_table=tables.page_table.at[row].set(table),
        capacity=tables.capacity.at[row].set(capacity),
        active=tables.active.at[row].set(active),
        total=StepCounts(*(jnp.asarray(x).at[:, row].set(0) for x in tables.total)),
        last=StepCounts(*(jnp.asarray(x).at[:, row].set(0) for x in tables.last)),
        min_locality=tables.min_locality.at[:, row].set(jnp.inf),
    )


@jax.jit
def deactivate(active: Bool[Array, "B"], row: Any) -> Bool[Array, "B"]:
    """Take a row out of the steps to come."""
    return active.at[row].set(False)


@partial(jax.jit, static_argnames="greedy")
def first_token(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B"],
    active: Bool[Array, "B"],
    sampling: SamplingState,
    row: Any,
    *,
    greedy: bool,
) -> tuple[Int[Array, ""], Int[Array, "B"], Bool[Array, "B"], SamplingState]:
    """Sample the first token of a row whose prompt was read, and let the steps decode it if that was not its last.

    Returns: the packed token, and tokens, activity and sampling of all rows.
    """
    mine = SamplingState(*(jax.lax.dynamic_slice_in_dim(x, row, 1) for x in sampling))
    token, mine = sample(jax.lax.dynamic_slice_in_dim(logits, row, 1), mine, greedy=greedy)
    done = finished(token, mine)
    return (
        _pack(token, done)[0],
        tokens.at[row].set(token[0]),
        active.at[row].set(~done[0]),
        sampling._replace(generated=sampling.generated.at[row].set(mine.generated[0])),
    )


def _pack(tokens: Array, done: Array) -> Array:
    """A row's token, or -1 - token where it is the last one."""
    return jnp.where(done, -1 - tokens, tokens)


def unpack_token(packed: int) -> tuple[int, bool]:
    """A token and whether it is the row's last."""
    return (-1 - packed, True) if packed < 0 else (packed, False)


def unpack_locality(bits: np.integer) -> float:
    """The least locality of a row from a report; NaN while no step has selected C blocks."""
    value = float(np.int32(bits).view(np.float32))
    return value if np.isfinite(value) else float("nan")


@cache
def steps_function(rows: int) -> Callable[..., StepsOutput]:
    """The compiled decode steps of so many rows: a program for each structure of models and number of steps at once.

    A row that ends within the steps, by an end-of-sequence id or by its limit, is not active in the rest of them: it
    writes nothing, fetches nothing and keeps its token.

    Args:
      rows: of the states, which decide how it is compiled.

    Returns: a function of (model, state, tokens, sampling), with the static `steps`, `greedy` (every row that is
      decoded has temperature 0) and `record` (also give the steps' counts). It donates state, tokens and sampling.
    """

    @partial(
        jit_in_place,
        static_argnames=("steps", "greedy", "record"),
        donate_argnums=(1, 2, 3),
        compiler_options=step_options(rows),
    )
    def generate_steps(
        model: FrozenModel,
        state: DecodeState,
        tokens: Array,
        sampling: SamplingState,
        *,
        steps: int,
        greedy: bool,
        record: bool,
    ) -> StepsOutput:
        def one(
            carry: tuple[DecodeState, Array, Array], _: None
        ) -> tuple[tuple[DecodeState, Array, Array], tuple[Array, StepCounts | None]]:
            state, tokens, generated = carry
            logits, state = step(model, state, tokens)
            sampled, advanced = sample(logits, sampling._replace(generated=generated), greedy=greedy)
            tokens = jnp.where(state.active, sampled, tokens)
            generated = jnp.where(state.active, advanced.generated, generated)
            done = state.active & finished(tokens, sampling._replace(generated=generated))
            report = _report(state, _pack(tokens, done))
            last = state.last if record else None
            return (state.replace(active=state.active & ~done), tokens, generated), (report, last)

        carry = state, tokens, sampling.generated
        if steps == 1:  # no loop around it, so that its program is that of a step
            carry, given = one(carry, None)
            report, counts = jax.tree.map(lambda x: x[None], given)
        else:
            carry, (report, counts) = jax.lax.scan(one, carry, length=steps)
        state, tokens, generated = carry
        return StepsOutput(state, tokens, sampling._replace(generated=generated), report, counts)

    return generate_steps


def _report(state: DecodeState, packed: Int[Array, "B"]) -> Int[Array, "B 8"]:
    counts = (*state.last, state.total.hits, state.total.misses)
    sums = [jnp.sum(x, axis=(0, 2), dtype=jnp.int32) for x in counts]
    locality = jax.lax.bitcast_convert_type(state.min_locality.min(axis=(0, 2)), jnp.int32)
    return jnp.stack([packed, *sums, locality], axis=1)
