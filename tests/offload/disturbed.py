"""Steps that swap as badly as they can: freed slots full of NaN, keys and values of the new token that come late."""

import dataclasses
from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

from nosa_jax.ffi import assign_slots
from nosa_jax.infer import decode
from nosa_jax.infer.compiling import jit_in_place, step_options
from nosa_jax.offload.state import DecodeState, LayerCache


def delayed(x: jax.Array, size: int) -> jax.Array:
    """The same bits, later (about a millisecond on a GPU with 2048): after products that they seem to depend on."""
    slow = jax.lax.fori_loop(0, 20, lambda _, y: y @ y, jnp.eye(size) + x.reshape(-1)[0] * 0)
    return jnp.where(jnp.isinf(slow[0, 0]), jnp.zeros_like(x), x)


def poisoned(cache: LayerCache, where: jax.Array) -> LayerCache:
    """The cache with NaN in the slots [B, K, slots] where `where` holds."""
    return dataclasses.replace(cache, slots=jnp.where(where[..., None, None, None], jnp.nan, cache.slots))


def poison_empty_slots(state: DecodeState) -> DecodeState:
    """A state whose slots without a block are full of NaN."""
    return state.replace(layers=tuple(poisoned(layer, layer.slot_block < 0) for layer in state.layers))


class Disturbed:
    """While it is entered, both ways by which a layer's step gets its blocks are wrapped: a slot is filled with NaN at
    the moment its block is evicted, and with `delay` keys and values of the new token come late.

    Steps must be traced inside (`step`). `traced` counts, by name, the layer steps that went through a wrapper.
    """

    def __init__(self, delay: int = 0) -> None:
        self.traced: Counter[str] = Counter()
        self._delay = delay
        self._patch = pytest.MonkeyPatch()
        # A function of its own for each instance and number of rows: what was traced outside, or by others, must not be
        # used. Compiled as `decode_step` is, since how kernels of a step may overlap is what is tried.
        self._jitted = cache(
            lambda rows: jit_in_place(
                lambda model, state, tokens: decode.step(model, state, tokens)[::-1],
                donate_argnums=1,
                compiler_options=step_options(rows),
            )
        )

    def step(self, model, state, tokens):
        state, logits = self._jitted(len(tokens))(model, state, tokens)
        return logits, state

    def __enter__(self) -> "Disturbed":
        for name, n_before in (("bring_in", 0), ("attend_while_fetching", 1)):
            real = getattr(decode, name)
            self._patch.setattr(decode, name, partial(self._swap, name, real, n_before))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _swap(self, name, real, n_before, *arguments, layer, layout):
        """Call `real`, whose cache comes after `n_before` arguments and `between` it and the block ids."""
        self.traced[name] += 1
        before, cache = arguments[:n_before], arguments[n_before]
        *between, block_ids, k, v, lengths, page_table, handle, step = arguments[n_before + 1 :]
        fresh_from = lengths // layout.config.block_size
        tables = assign_slots(block_ids, cache.slot_block, cache.last_used, step, fresh_from, n_blocks=layout.n_blocks)
        cache = poisoned(cache, tables.slot_block != cache.slot_block)
        if self._delay:
            k, v = delayed(k, self._delay), delayed(v, self._delay)
        return real(
            *before, cache, *between, block_ids, k, v, lengths, page_table, handle, step, layer=layer, layout=layout
        )
