"""Choosing the next token of every row, each with its own parameters and its own random stream."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from nosa_jax.checks import is_real, is_whole
from nosa_jax.errors import InputError

HIGHEST = float(np.finfo(np.float32).max)
MAX_EOS = 8  # static width of the list of end-of-sequence ids, so that requests of any kind share a compiled step


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    Args:
      max_new_tokens: most tokens to generate; 0 generates none.
      temperature: divides the logits; 0 takes the most likely token (the lower id of equals).
      top_k: sample among the k most likely tokens, and any equally likely to the last of them; 0 among all.
      top_p: sample among the fewest most likely tokens whose probabilities sum to at least p, in (0, 1].
      seed: of this request's random stream. Its draws do not depend on the requests beside it.
      eos_ids: a token of these ends the request; it is the last of the generated tokens.
      stop: the request ends where its text holds one of these strings, which is not part of the text any more. Special
        tokens are no text: give their ids as eos_ids.

    Raises:
      InputError: a value outside its range; the message names both.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    eos_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, limit in (("max_new_tokens", 2**31), ("top_k", 2**31), ("seed", 2**32)):
            value = getattr(self, name)
            if not is_whole(value) or not 0 <= value < limit:
                raise InputError(f"{name}={value!r} must be an integer of at least 0 and below {limit:,}")
            object.__setattr__(self, name, int(value))  # NumPy's numbers would compile programs of their own
        if not is_real(self.temperature) or not 0 <= self.temperature <= HIGHEST:
            given = _short(self.temperature)
            raise InputError(f"temperature={given} must be a number of at least 0 (0 is greedy) and finite in float32")
        if not is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p={_short(self.top_p)} must be above 0 and at most 1 (1 means no limit)")
        if not isinstance(self.eos_ids, tuple) or not all(map(is_whole, self.eos_ids)):
            raise InputError(f"eos_ids={self.eos_ids!r} must be a tuple of ids, like (257,)")
        object.__setattr__(self, "eos_ids", tuple(map(int, self.eos_ids)))
        if len(self.eos_ids) > MAX_EOS:
            raise InputError(f"{len(self.eos_ids)} eos_ids given; at most {MAX_EOS} are supported")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise InputError(f"stop={self.stop!r} must be a tuple of texts that are not empty, like ('END',)")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class SamplingState(NamedTuple):
    """Parameters and progress of every row, on the device."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    key: UInt[Array, "B 2"]
    eos_ids: Int[Array, "B 8"]  # padded with -1
    generated: Int[Array, "B"]
    limit: Int[Array, "B"]


def empty_sampling(batch: int) -> SamplingState:
    """Rows that generate nothing."""
    return SamplingState(
        temperature=jnp.zeros(batch, jnp.float32),
        top_k=jnp.zeros(batch, jnp.int32),
        top_p=jnp.ones(batch, jnp.float32),
        key=jnp.zeros((batch, 2), jnp.uint32),
        eos_ids=jnp.full((batch, MAX_EOS), -1, jnp.int32),
        generated=jnp.zeros(batch, jnp.int32),
        limit=jnp.zeros(batch, jnp.int32),
    )


def set_row(state: SamplingState, row: int, params: SamplingParams, stream: int) -> SamplingState:
    """Start a request in a row; `stream` tells apart requests that share a seed."""
    eos = np.full(MAX_EOS, -1, np.int32)
    eos[: len(params.eos_ids)] = params.eos_ids
    return _set_row(
        state,
        row,
        np.uint32(params.seed),
        np.uint32(stream),
        (np.float32(params.temperature), params.top_k, np.float32(params.top_p), eos, params.max_new_tokens),
    )


@jax.jit
def _set_row(state: SamplingState, row: Any, seed: Any, stream: Any, values: Any) -> SamplingState:
    key = jax.random.key_data(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream))
    temperature, top_k, top_p, eos, limit = values
    new = (temperature, top_k, top_p, key, eos, 0, limit)
    return SamplingState(*(old.at[row].set(value) for old, value in zip(state, new, strict=True)))


def filtered_logits(
    logits: Float[Array, "B V"], top_k: Int[Array, "B"], top_p: Float[Array, "B"]
) -> Float[Array, "B V"]:
    """Logits with the tokens that top-k and top-p exclude at -inf."""
    ranked = -jnp.sort(-logits, axis=-1)
    vocab = logits.shape[-1]
    kept = jnp.where(top_k == 0, vocab, jnp.minimum(top_k, vocab))[:, None]
    in_top_k = jnp.arange(vocab) < kept
    probabilities = jax.nn.softmax(jnp.where(in_top_k, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A float32 sum may reach 1 before the last token; with p = 1 all are kept nevertheless.
    keep = in_top_k & ((before < top_p[:, None]) | (top_p[:, None] >= 1) | (jnp.arange(vocab) == 0))
    threshold = jnp.where(keep, ranked, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def sample(logits: Float[Array, "B V"], state: SamplingState, *, greedy: bool) -> tuple[Int[Array, "B"], SamplingState]:
    """Next token of every row, and the state with one more token counted.

    greedy: every row has temperature 0 (static: the sorting is left out of the compiled step).
    """
    tokens = logits.argmax(axis=-1).astype(jnp.int32)
    if not greedy:
        heat = jnp.where(state.temperature > 0, state.temperature, 1.0)[:, None]
        # From the maximum down: a tiny temperature then drives all others to -inf, and not several to +inf.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / heat
        filtered = filtered_logits(scaled, state.top_k, state.top_p)

        def draw(key: jax.Array, count: jax.Array, row: jax.Array) -> jax.Array:
            stream = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), count)
            return jax.random.categorical(stream, row)

        drawn = jax.vmap(draw)(state.key, state.generated, filtered).astype(jnp.int32)
        tokens = jnp.where(state.temperature > 0, drawn, tokens)
    return tokens, state._replace(generated=state.generated + 1)


def finished(tokens: Int[Array, "B"], state: SamplingState) -> Array:
    """Whether a row's newest token is its last: bool [B]."""
    return (tokens[:, None] == state.eos_ids).any(axis=-1) | (state.generated >= state.limit)
