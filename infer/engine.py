"""Generation for a batch of prompts over a cache whose blocks live in host memory."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import jax.numpy as jnp
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nosa_jax.config import AttentionKind
from nosa_jax.errors import InputError
from nosa_jax.ffi import HostPool
from nosa_jax.infer.frozen import FrozenModel, freeze
from nosa_jax.infer.plan import MemoryPlan, make_plan
from nosa_jax.infer.prefill import prefill_row
from nosa_jax.infer.requests import GenerationResult, Prompt, Request, check_prompts, make_requests
from nosa_jax.infer.run import Run
from nosa_jax.infer.sampling import SamplingParams
from nosa_jax.model import NosaLM
from nosa_jax.offload.pages import OutOfPagesError, PageAllocator
from nosa_jax.offload.state import DecodeState, StepCounts, init_state
from nosa_jax.tokenizer import Tokenizer


class Engine:
    """Owns a cache layout and the host pages, and decodes with them (docs/03).

    Args:
      model: the model; its matrices are cast to the config's compute dtype once.
      max_batch: rows decoded together. More prompts than that wait for a free row.
      max_context: tokens per row, prompt and generated ones together.
      attention: which system decodes; None for the config's. "dense" needs `offload=False`.
      offload: keep KV blocks in host memory and only the selected ones on the device.
      slots: device slots per row and KV head when offloading; None plans them (`make_plan`).
      device_budget, host_budget: bytes or text like "20GiB".
      tokenizer: turns text prompts into ids and results into text.

    Raises:
      InputError: sizes that do not fit together.
      DoesNotFitError, HostMemoryError: a budget or the free memory is too small. The process stays usable.
    """

    def __init__(
        self,
        model: NosaLM | FrozenModel,
        *,
        max_batch: int,
        max_context: int,
        attention: AttentionKind | None = None,
        offload: bool = True,
        slots: int | None = None,
        device_budget: int | float | str | None = None,
        host_budget: int | float | str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.model = freeze(model)
        self.tokenizer = tokenizer
        self.plan: MemoryPlan = make_plan(
            self.model.config,
            weight_bytes=self.model.nbytes,
            attention=attention or self.model.config.attention,
            max_batch=max_batch,
            max_context=max_context,
            offload=offload,
            slots=slots,
            device_budget=device_budget,
            host_budget=host_budget,
        )
        self.layout = self.plan.layout
        self.closed = False
        self._pool: HostPool | None = None
        self._state: DecodeState | None = None
        self._handed_out = False  # whether a caller may still hold a state whose rows have pages
        self._reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the host pages. Closing again does nothing; states of this engine cannot be stepped any more."""
        self.closed = True
        self._state = None
        if self._pool is not None:
            self._pool.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[int, int], None] | None = None,
        record_steps: bool = False,
        progress: bool = False,
    ) -> list[GenerationResult]:
        """Continue every prompt.

        Host pages for a prompt and all its new tokens are reserved before it is read, so nothing runs out in
        mid-decode. Prompts beyond `max_batch`, or beyond the free pages, wait until a row and its pages are free.

        Args:
          prompts: texts or lists of token ids.
          params: one for all prompts or one each; the defaults are greedy.
          on_token: called with the prompt's index and each token as it is generated.
          record_steps: keep the counts of every decode step in the results.
          progress: show a progress bar.

        Returns: one result per prompt, in their order.

        Raises:
          InputError: a prompt that is empty, too long for the plan, or holds unknown ids.
          OutOfPagesError: a request that the host pool could not hold even alone. Nothing was started in either case.
        """
        self._check_open()
        tokens = check_prompts(prompts, self.tokenizer, self.layout.config.vocab_size)
        requests = make_requests(tokens, SamplingParams() if params is None else params, self.layout)
        for request in requests:
            self._check_pages([request])
        self._revoke()
        run = Run(self, requests, on_token, record_steps)
        bar = Progress(
            TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn(),
            disable=not progress,
        )  # fmt: skip
        try:
            with bar:
                task = bar.add_task("tokens", total=sum(r.params.max_new_tokens for r in requests))
                while run.unfinished:
                    run.advance()
                    bar.update(task, completed=run.generated)
            self._state = run.state
        except BaseException:
            # A step may still be running; it is waited for, so it cannot write to pages given out anew.
            self._handed_out = True
            self._revoke()
            raise
        return [run.results[i] for i in range(len(requests))]

    def prefill(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int | None = None, chunk: int | None = None
    ) -> DecodeState:
        """Read prompts into rows 0, 1, ... of a fresh state, to be stepped by hand with `decode_step`.

        `state.logits` holds every row's next-token logits. An earlier state of this engine is revoked: stepping it
        raises, if its blocks are on host pages.

        Args:
          prompts: at most `max_batch` texts or lists of token ids.
          max_new_tokens: room to reserve for each row; None reserves up to `max_context`.
          chunk: read at most so many tokens at a time; None reads each prompt at once.

        Raises:
          InputError: as `generate`, or more prompts than rows, or a chunk below 1.
          OutOfPagesError: the host pool cannot hold all rows at once.
        """
        self._check_open()
        tokens = check_prompts(prompts, self.tokenizer, self.layout.config.vocab_size)
        if len(tokens) > self.layout.max_batch:
            raise InputError(f"{len(tokens)} prompts do not fit into max_batch={self.layout.max_batch} rows")
        if chunk is not None and chunk < 1:
            raise InputError(f"chunk={chunk} must be at least 1 token")
        room = self.layout.max_context
        each = [
            SamplingParams(max_new_tokens=max(0, room - len(t)) if max_new_tokens is None else max_new_tokens)
            for t in tokens
        ]
        requests = make_requests(tokens, each, self.layout)
        self._check_pages(requests)
        self._revoke()
        self._handed_out = True
        self._state = None  # counters and steps of an earlier `generate` are not this caller's
        state = self._take_state()
        for row, request in enumerate(requests):
            state, _ = self._admit(state, row, request, chunk=chunk)
        return state

    def check(self) -> None:
        """Raise what the steps read so far have recorded.

        A step on a GPU cannot raise by itself: call this after reading the result of steps driven by hand. `generate`
        calls it for every token. On the CPU steps raise, and this finds nothing.

        Raises:
          PoolClosedError: a revoked state was stepped.
          RuntimeError: a page, block or slot number out of range; the message holds the numbers.
        """
        if self._pool is not None:
            self._pool.check()

    # Rows and pages.

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this engine is closed; make a new one")

    def _reset(self) -> None:
        """Forget every row: all pages are free and the state is made anew when needed."""
        self._state = None
        if self.layout.offload and self._pool is None:  # first: an absurd size is refused here
            self._pool = HostPool(self.plan.page_groups * self.layout.pages_per_block, self.layout.page_bytes)
        self.allocator = PageAllocator(self.plan.page_groups, self.plan.group_bytes)

    def _revoke(self) -> None:
        """Make a state that a caller holds fail from now on, instead of reading pages that belong to others."""
        if not self._handed_out:
            return
        if self._pool is not None:
            self._pool.renew()
        self._reset()
        self._handed_out = False

    def _take_state(self) -> DecodeState:
        """The engine's state; the caller owns it until it is put back."""
        state, self._state = self._state, None
        return state or init_state(self.layout, None if self._pool is None else self._pool.handle)

    def _groups(self, request: Request) -> int:
        return self.layout.config.num_blocks(request.reserved) if self.layout.offload else 0

    def _check_pages(self, requests: list[Request]) -> None:
        """Refuse requests that the whole pool could not hold at the same time."""
        needed, have, each = sum(map(self._groups, requests)), self.plan.page_groups, self.plan.group_bytes
        if needed > have:
            who = f"prompt {requests[0].index} needs" if len(requests) == 1 else f"{len(requests)} prompts need"
            raise OutOfPagesError(
                f"{who} {needed} blocks of host memory ({needed * each:,} bytes) for "
                f"{sum(len(r.tokens) for r in requests)} tokens and up to "
                f"{sum(r.params.max_new_tokens for r in requests)} new ones, and the host pool has {have} "
                f"({have * each:,} bytes available); shorten them, ask for fewer new tokens, or give the engine a "
                "larger host_budget"
            )

    def _admit(
        self, state: DecodeState, row: int, request: Request, chunk: int | None = None
    ) -> tuple[DecodeState, np.ndarray]:
        """Reserve the request's pages and read its prompt into the row; returns its page groups too."""
        groups = self.allocator.allocate(self._groups(request))
        table = np.full(self.layout.n_blocks, -1, np.int32)
        table[: len(groups)] = groups
        state = _start_row(state, row, table, request.reserved)
        piece = chunk or len(request.tokens)
        for start in range(0, len(request.tokens), piece):
            state = prefill_row(self.model, state, row, request.tokens[start : start + piece], start)
        return state, groups


def _start_row(state: DecodeState, row: int, table: np.ndarray, capacity: int) -> DecodeState:
    """Give a row its pages and room, and forget the counts of whoever had it before."""
    zero = StepCounts(*(jnp.asarray(x).at[:, row].set(0) for x in state.total))
    return state.replace(
        page_table=state.page_table.at[row].set(table),
        capacity=state.capacity.at[row].set(capacity),
        active=state.active.at[row].set(True),
        total=zero,
        last=StepCounts(*(jnp.asarray(x).at[:, row].set(0) for x in state.last)),
        min_locality=state.min_locality.at[:, row].set(jnp.inf),
    )
