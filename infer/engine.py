"""Generation for requests that come and go, over a cache whose blocks live in host memory."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from nosa_jax.checks import is_real, is_whole
from nosa_jax.config import AttentionKind
from nosa_jax.errors import InputError
from nosa_jax.infer.driving import Driver
from nosa_jax.infer.frozen import FrozenModel, freeze
from nosa_jax.infer.handle import RequestHandle
from nosa_jax.infer.jobs import Job, make_job
from nosa_jax.infer.metrics import EngineMetrics, Recorder
from nosa_jax.infer.plan import DEFAULT_PREFILL_CHUNK, MemoryPlan, make_plan
from nosa_jax.infer.prefill import compile_pieces, piece_length, prefill_row
from nosa_jax.infer.progress import token_bar
from nosa_jax.infer.requests import GenerationResult, Prompt, Request, check_prompts, make_requests
from nosa_jax.infer.row_memory import RowMemory
from nosa_jax.infer.row_steps import deactivate
from nosa_jax.infer.sampling import SamplingParams
from nosa_jax.infer.scheduler import Scheduler
from nosa_jax.infer.warm_up import continuations, pieces_to_compile, warm_up_prompts
from nosa_jax.model import NosaLM
from nosa_jax.offload.pages import PageAllocator
from nosa_jax.offload.state import DecodeState
from nosa_jax.tokenizer import Tokenizer


def require_steps_per_dispatch(steps: int, max_context: int) -> None:
    """Refuse what an engine cannot dispatch at once.

    Raises:
      InputError: not a whole number from 1 to `max_context`.
    """
    if not is_whole(steps) or not 1 <= steps <= max_context:
        raise InputError(
            f"steps_per_dispatch={steps!r} must be a whole number from 1 to max_context={max_context}: no request "
            "takes more steps; 1 hands out every token by itself, 4 to 16 save most of the host's time"
        )


class Engine:
    """Owns a cache layout and the host pages, and decodes with them (docs/03, docs/09).

    Args:
      model: the model; its matrices are cast to the config's compute dtype once.
      max_batch: rows decoded together; more requests than that wait. None: as many as the budgets hold.
      max_context: tokens per row, prompt and generated ones together.
      attention: which system decodes; None for the config's. "dense" needs `offload=False`.
      offload: keep KV blocks in host memory and only the selected ones on the device.
      slots: device slots per row and KV head when offloading; None plans them (`make_plan`). Without offloading every
        block has one, whatever is given.
      overlap: attend to the blocks that are on the device while others arrive from the host (docs/04). The same bits;
        None does so on a GPU where it was measured to pay, for many rows.
      device_budget, host_budget: bytes or text like "20GiB".
      tokenizer: turns text prompts into ids and results into text.
      prefill_chunk: tokens of prompts that are read between two decode steps, at most. Fewer let running requests
        wait less when others come, more read long prompts faster.
      steps_per_dispatch: decode steps that are dispatched at once where no request is kept waiting by it, 1 to
        `max_context`. More spend less of the host's time per token, and tokens come in groups of so many. They are the
        same tokens.
      max_queue: most requests that may wait in `submit`; None for any number.
      max_overtaken: how often a request that waits for pages may be overtaken by ones that need fewer.

    Raises:
      InputError: sizes that do not fit together.
      DoesNotFitError, HostMemoryError: a budget or the free memory is too small. The process stays usable.
    """

    def __init__(
        self,
        model: NosaLM | FrozenModel,
        *,
        max_batch: int | None,
        max_context: int,
        attention: AttentionKind | None = None,
        offload: bool = True,
        slots: int | None = None,
        overlap: bool | None = None,
        device_budget: int | float | str | None = None,
        host_budget: int | float | str | None = None,
        tokenizer: Tokenizer | None = None,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        steps_per_dispatch: int = 1,
        max_queue: int | None = None,
        max_overtaken: int = 8,
    ) -> None:
        for name, value, least in (("max_queue", max_queue, 1), ("max_overtaken", max_overtaken, 0)):
            if value is not None and (not is_whole(value) or value < least):
                raise InputError(f"{name}={value!r} must be a whole number of at least {least}")
        if isinstance(tokenizer, str | Path):
            raise InputError(f"tokenizer={str(tokenizer)!r} is a name; give nosa_jax.tokenizer.load_tokenizer of it")
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
            overlap=overlap,
            device_budget=device_budget,
            host_budget=host_budget,
            prefill_chunk=prefill_chunk,
        )
        require_steps_per_dispatch(steps_per_dispatch, max_context)
        self.layout = self.plan.layout
        self.max_queue = max_queue
        self.closed = False
        self._memory = RowMemory(self.plan, self.model.beside)
        self._pool = self._memory.pool
        self._scheduler = Scheduler(
            self.model, self._memory, tokenizer, prefill_chunk=prefill_chunk, steps_per_dispatch=steps_per_dispatch,
            max_overtaken=max_overtaken,
        )  # fmt: skip
        self._driver = Driver(self._scheduler)
        self._submitting = threading.Lock()  # a state is revoked before others' pages are given out, and not meanwhile
        self._handed_out = False  # whether a caller may still hold a state whose rows have pages

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what waits or runs and free the host pages. Closing again does nothing.

        States of this engine cannot be stepped any more.

        Raises:
          RuntimeError: a callback of this engine asks for it; nothing is closed then.
        """
        self._driver.refuse_in_callback("close")
        self.closed = True
        self._driver.stop(drain=False)
        self._driver.abandon()
        self._scheduler.state = None
        self._memory.close()

    # Requests that come and go.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: int | float | None = None,
        on_token: Callable[[int], None] | None = None,
        record_steps: bool = False,
        stream: int = 0,
    ) -> RequestHandle:
        """Let a request wait for its turn; from any thread, at any time.

        Host pages for the prompt and all its new tokens are reserved when it is admitted, so nothing runs out in
        mid-decode.

        Args:
          prompt: a text or token ids.
          params: greedy by default.
          timeout: seconds from now after which it ends with what it has got, `finish_reason` "timeout".
          on_token: called with each token as it comes, by the thread that does the engine's work. An exception in it
            fails this request and no other.
          record_steps: keep the counts of every decode step in the result.
          stream: tells apart the random streams of requests with equal seeds; `generate` gives prompt i stream i.

        Raises:
          InputError: the prompt is empty, too long for the plan, or holds unknown ids; `timeout` or `stream` is out of
            range.
          OutOfPagesError: the host pool could not hold it even alone.
          QueueFullError: `max_queue` requests wait already.
        """
        self._check_open()
        (tokens,) = check_prompts([prompt], self.tokenizer, self.layout.config.vocab_size)
        (request,) = make_requests([tokens], params or SamplingParams(), self.layout)
        self._memory.require_room([request])
        if timeout is not None and not (is_real(timeout) and timeout > 0):
            raise InputError(f"timeout={timeout!r} must be a positive number of seconds")
        if not is_whole(stream) or not 0 <= stream < 2**32:
            raise InputError(f"stream={stream!r} must be a whole number of at least 0 and below {2**32:,}")
        deadline = None if timeout is None else time.monotonic() + timeout
        job = self._job(request, stream, deadline=deadline, on_token=on_token, record_steps=record_steps)
        return self._enqueue([job], self.max_queue)[0]

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Do the engine's work in a thread of its own while the block runs.

        At its end everything submitted is finished first; if it ends by an exception, requests are cancelled.
        """
        self._check_open()
        self._driver.start()
        try:
            yield self
        except BaseException:
            self._driver.stop(drain=False)
            raise
        self._driver.stop(drain=True)

    def run_until_idle(self) -> None:
        """Do the engine's work in this thread until no request waits or runs; for use without `serving`."""
        self._check_open()
        while self._driver.turn(lambda: not self._driver.serving):
            if self._driver.serving:
                raise RuntimeError("a thread serves this engine already; wait for the requests' results")

    def metrics(self) -> EngineMetrics:
        """Counters, times and queue lengths; from any thread, without waiting for the device."""
        return self._scheduler.delivery.recorder.metrics(**self._scheduler.counts())

    def warm_up(self, *, sampling: bool = True) -> float:
        """Compile everything that requests within the plan can need, and run some; resets the metrics.

        Args:
          sampling: also for requests with a temperature.

        Returns: the seconds it took.

        Raises:
          RuntimeError: requests wait or run, also such as were submitted meanwhile.
        """
        self._check_open()
        self._check_idle("warm_up")
        start = time.perf_counter()
        prompts, params = warm_up_prompts(self.plan, sampling=sampling, at_once=self._scheduler.steps_per_dispatch)
        # First, as compiling needs memory too: that of the rows, unless there were requests before.
        compile_pieces(self.model, self.layout, pieces_to_compile(self.plan))
        for one, its in zip(prompts, params, strict=True):
            self.generate([one], its)
        self._warm_up_continuations()
        deactivate(self.model.beside(jnp.zeros(self.layout.max_batch, bool)), 0)  # what a cancellation needs
        self._scheduler.delivery.recorder = Recorder(self.layout.page_bytes)
        return time.perf_counter() - start

    def _warm_up_continuations(self) -> None:
        """Read every kind of later piece into a row that pretends to hold the ones before."""
        pieces = continuations(self.plan)
        if not pieces:
            return
        with self._rows_alone("warm_up"):
            self._revoke()
            last = max(start + count for start, count, _ in pieces)
            request = make_requests([np.zeros(last, np.int32)], [SamplingParams(max_new_tokens=0)], self.layout)[0]
            state, groups = self._memory.start(self._scheduler.take_state(), 0, request, active=False)
            for start, count, length in pieces:
                state = prefill_row(self.model, state, 0, np.zeros(count, np.int32), start, length=length)
            self._scheduler.state = jax.block_until_ready(state)
            self._memory.release(groups)

    # All at once.

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

        Args:
          prompts: texts or lists of token ids, any number; see `submit`. `max_queue` does not apply.
          params: one for all prompts or one each; the defaults are greedy.
          on_token: called with the prompt's index and each token as it is generated.
          record_steps: keep the counts of every decode step in the results.
          progress: show a progress bar.

        Returns: one result per prompt, in their order.

        Raises:
          InputError: a prompt that is empty, too long for the plan, or holds unknown ids.
          OutOfPagesError: a request that the host pool could not hold even alone. Nothing was started in either case.
          Exception: what `on_token` raised, or a fault of the device; all prompts are given up then.
        """
        self._check_open()
        tokens = check_prompts(prompts, self.tokenizer, self.layout.config.vocab_size)
        requests = make_requests(tokens, SamplingParams() if params is None else params, self.layout)
        for request in requests:
            self._memory.require_room([request])
        failures: list[BaseException] = []
        with token_bar(sum(r.params.max_new_tokens for r in requests), shown=progress) as tick:

            def tell(index: int, token: int) -> None:
                if on_token is not None:
                    on_token(index, token)
                tick()

            jobs = [
                self._job(r, r.index, record_steps=record_steps, on_token=partial(tell, r.index),
                          on_failure=failures.append)
                for r in requests
            ]  # fmt: skip
            handles = self._enqueue(jobs)
            try:
                for handle in handles:
                    self._driver.wait(handle, lambda handle=handle: handle.done or bool(failures), None)  # type: ignore[misc]
                if failures:
                    raise failures[0]
            except BaseException:
                for handle in handles:
                    handle.cancel()
                for handle in handles:
                    self._driver.wait(handle, lambda handle=handle: handle.done, None)  # type: ignore[misc]
                raise
        return [handle.result() for handle in handles]

    # By hand.

    def prefill(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int | None = None, chunk: int | None = None
    ) -> DecodeState:
        """Read prompts into rows 0, 1, ... of a fresh state, to be stepped by hand with `decode_step`.

        `state.logits` holds every row's next-token logits. An earlier state of this engine is revoked: stepping it
        raises, if its blocks are on host pages. So is this one by the next `prefill`, `generate` or `submit`.

        Args:
          prompts: at most `max_batch` texts or lists of token ids.
          max_new_tokens: room to reserve for each row; None reserves up to `max_context`.
          chunk: read at most so many tokens at a time; None takes the engine's `prefill_chunk`.

        Raises:
          InputError: as `generate`, or more prompts than rows, or a chunk below 1.
          OutOfPagesError: the host pool cannot hold all rows at once.
          RuntimeError: requests wait or run; rows are theirs.
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
        self._memory.require_room(requests)
        piece = chunk or self.plan.prefill_chunk
        with self._rows_alone("prefill"):
            self._revoke()
            self._handed_out = True
            self._scheduler.state = None  # counters and steps of earlier requests are not this caller's
            state = self._memory.new_state()
            for row, request in enumerate(requests):
                state, _ = self._memory.start(state, row, request, active=True)
                for start in range(0, len(request.tokens), piece):
                    tokens_now = request.tokens[start : start + piece]
                    # The lengths that requests use too, unless the caller cuts prompts otherwise.
                    length = None if chunk else piece_length(len(tokens_now), start, piece, self.layout)
                    state = prefill_row(self.model, state, row, tokens_now, start, length=length)
        return state

    def check(self) -> None:
        """Raise what the steps read so far have recorded.

        A step on a GPU cannot raise by itself: call this after reading the result of steps driven by hand. The engine
        calls it for every step of its own. On the CPU steps raise, and this finds nothing.

        Raises:
          PoolClosedError: a revoked state was stepped.
          RuntimeError: a page, block or slot number out of range; the message holds the numbers.
        """
        self._memory.check()

    @property
    def allocator(self) -> PageAllocator:
        """Which pages are reserved."""
        return self._memory.allocator

    def _job(self, request: Request, stream: int, **options: Any) -> Job:
        def cancel(job: Job) -> None:
            self._scheduler.withdraw(job)
            self._driver.notify()

        return make_job(request, stream, self.tokenizer, wait=self._driver.wait, cancel=cancel, **options)

    def _enqueue(self, jobs: list[Job], max_queue: int | None = None) -> list[RequestHandle]:
        with self._submitting:
            self._revoke()
            for job in jobs:
                self._scheduler.enqueue(job, max_queue)
        self._driver.notify()
        return [job.handle for job in jobs]

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this engine is closed; make a new one")

    @contextmanager
    def _rows_alone(self, what: str) -> Iterator[None]:
        """Nobody submits and no round runs in the block; refuses where requests wait or run."""
        with self._driver.between_rounds(), self._submitting:
            self._check_idle(what)
            yield

    def _check_idle(self, what: str) -> None:
        if self._scheduler.busy:
            raise RuntimeError(
                f"{what} needs all rows, and requests wait or run; wait for their results or cancel them first"
            )

    def _revoke(self) -> None:
        """Make a state that a caller holds fail from now on, instead of reading pages that belong to others."""
        if self._handed_out:
            self._handed_out = False
            self._memory.reset()
