"""One call of `generate`: rows that requests join and leave, one token of each at a time."""

import dataclasses
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from nosa_jax.errors import InputError
from nosa_jax.infer.decode import step
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.requests import GenerationResult, Request
from nosa_jax.infer.sampling import SamplingState, empty_sampling, finished, sample, set_row
from nosa_jax.infer.text_stream import StoppingStream
from nosa_jax.offload.state import DecodeState, StepCounts


class Run:
    """One call of `generate`: which request is in which row, and what it has got so far."""

    def __init__(
        self,
        engine: Any,  # the Engine; its module imports this one
        requests: list[Request],
        on_token: Callable[[int, int], None] | None,
        record_steps: bool,
    ) -> None:
        if engine.tokenizer is None and any(r.params.stop for r in requests):
            raise InputError("stop strings are text, but the engine has no tokenizer; pass tokenizer= or use eos_ids")
        self.engine, self.on_token, self.record_steps = engine, on_token, record_steps
        self.results: dict[int, GenerationResult] = {}
        self.generated = 0
        self.state = engine._take_state()
        batch = engine.layout.max_batch
        self.sampling = empty_sampling(batch)
        self.next_tokens = jnp.zeros(batch, jnp.int32)
        self.waiting = deque(r for r in requests if r.params.max_new_tokens)
        self.rows: dict[int, Request] = {}
        self.groups: dict[int, np.ndarray] = {}
        self.streams: dict[int, StoppingStream] = {}  # of rows whose requests have stop strings
        self.tokens: dict[int, list[int]] = {}
        self.counts: dict[int, list[StepCounts]] = {}
        self.greedy = all(r.params.temperature == 0 for r in requests)
        for request in requests:
            if not request.params.max_new_tokens:
                self.results[request.index] = self._result(request, [], "length", None, [])

    @property
    def unfinished(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.waiting or self.rows)

    def advance(self) -> None:
        """Admit what fits, then decode one token for every row."""
        self._admit_waiting()
        if not self.rows:
            return
        self.next_tokens, done, self.state, self.sampling = _generate_step(
            self.engine.model, self.state, self.next_tokens, self.sampling, greedy=self.greedy
        )
        self._collect(list(self.rows), stepped=True, done=done)

    def _admit_waiting(self) -> None:
        """First come, first served: a request that does not fit yet holds back the ones behind it."""
        free = [row for row in range(self.engine.layout.max_batch) if row not in self.rows]
        while self.waiting and free:
            request = self.waiting[0]
            if self.engine._groups(request) > self.engine.allocator.n_free and self.rows:
                break
            self.waiting.popleft()
            row = free.pop(0)
            self.state, self.groups[row] = self.engine._admit(self.state, row, request)
            self.sampling = set_row(self.sampling, row, request.params, request.index)
            self.rows[row], self.tokens[row], self.counts[row] = request, [], []
            if request.params.stop:
                self.streams[row] = StoppingStream(self.engine.tokenizer, request.params.stop)
            self.next_tokens, done, active, self.sampling = _first_token(
                self.state.logits,
                self.next_tokens,
                self.state.active,
                self.sampling,
                jnp.asarray(row),
                greedy=self.greedy,
            )
            self.state = self.state.replace(active=active)
            self._collect([row], stepped=False, done=done)
            if row not in self.rows:
                free.insert(0, row)

    def _collect(self, rows: list[int], *, stepped: bool, done: jax.Array) -> None:
        tokens, ended = np.asarray(self.next_tokens), np.asarray(done)
        self.engine.check()
        last = jax.tree.map(np.asarray, self.state.last) if self.record_steps and stepped else None
        for row in rows:
            request, token = self.rows[row], int(tokens[row])
            self.tokens[row].append(token)
            self.generated += 1
            if last is not None:
                self.counts[row].append(StepCounts(*(x[:, row] for x in last)))
            if self.on_token is not None:
                self.on_token(request.index, token)
            if row in self.streams:
                self.streams[row].push(token)
                if ended[row]:
                    self.streams[row].flush()
            if row in self.streams and self.streams[row].stopped:
                if not ended[row]:  # the device does not know: it must not decode for this row any more
                    self.state = self.state.replace(active=self.state.active.at[row].set(False))
                self._finish(row, "stop")
            elif ended[row]:
                self._finish(row, "eos" if token in request.params.eos_ids else "length")

    def _finish(self, row: int, reason: str) -> None:
        request = self.rows.pop(row)
        groups = self.groups.pop(row)
        if len(groups):
            self.engine.allocator.free(groups)
        result = self._result(request, self.tokens.pop(row), reason, row, self.counts.pop(row))
        stream = self.streams.pop(row, None)
        self.results[request.index] = result if stream is None else dataclasses.replace(result, text=stream.text)

    def _result(
        self, request: Request, tokens: list[int], reason: str, row: int | None, counts: list[StepCounts]
    ) -> GenerationResult:
        hits = misses = 0
        locality = float("nan")
        if row is not None:
            hits = int(np.asarray(self.state.total.hits[:, row]).sum())
            misses = int(np.asarray(self.state.total.misses[:, row]).sum())
            smallest = float(np.asarray(self.state.min_locality[:, row]).min())
            locality = smallest if np.isfinite(smallest) else locality
        tokenizer = self.engine.tokenizer
        steps = None
        if self.record_steps:
            none = np.zeros((0, self.engine.layout.config.num_layers, self.engine.layout.config.num_kv_heads), np.int32)
            columns = zip(*counts, strict=True) if counts else [()] * len(StepCounts._fields)
            steps = StepCounts(*(np.stack(column) if column else none for column in columns))
        return GenerationResult(
            tokens=tokens,
            text=None if tokenizer is None else tokenizer.decode(tokens),
            finish_reason=reason,
            prompt_length=len(request.tokens),
            hits=hits,
            misses=misses,
            bytes_fetched=misses * self.engine.layout.page_bytes,
            min_locality=locality,
            steps=steps,
        )


@partial(jax.jit, static_argnames="greedy")
def _first_token(
    logits: Array, tokens: Array, active: Array, sampling: SamplingState, row: Array | int, *, greedy: bool
) -> tuple[Int[Array, "B"], Bool[Array, "B"], Bool[Array, "B"], SamplingState]:
    """Sample for one row after its prefill; the others keep their token, their activity and their progress."""
    sampled, advanced = sample(logits, sampling, greedy=greedy)
    mine = jnp.arange(tokens.shape[0]) == row
    tokens = jnp.where(mine, sampled, tokens)
    sampling = sampling._replace(generated=jnp.where(mine, advanced.generated, sampling.generated))
    done = mine & finished(tokens, sampling)
    return tokens, done, active & ~done, sampling


@partial(jax.jit, static_argnames="greedy", donate_argnames="state")
def _generate_step(
    model: FrozenModel, state: DecodeState, tokens: Array, sampling: SamplingState, *, greedy: bool
) -> tuple[Int[Array, "B"], Bool[Array, "B"], DecodeState, SamplingState]:
    """One decode step, and the next token of every active row."""
    logits, state = step(model, state, tokens)
    sampled, advanced = sample(logits, sampling, greedy=greedy)
    tokens = jnp.where(state.active, sampled, tokens)
    sampling = sampling._replace(generated=jnp.where(state.active, advanced.generated, sampling.generated))
    done = state.active & finished(tokens, sampling)
    return tokens, done, state.replace(active=state.active & ~done), sampling
