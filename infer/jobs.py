"""A request on its way through the scheduler."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nosa_jax.errors import InputError
from nosa_jax.infer.handle import RequestHandle
from nosa_jax.infer.requests import GenerationResult, Request
from nosa_jax.infer.row_steps import unpack_locality
from nosa_jax.infer.text_stream import StoppingStream
from nosa_jax.infer.waiting import Waiter
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import StepCounts
from nosa_jax.tokenizer import Tokenizer


@dataclass(eq=False)
class Job(Waiter):
    """A request, who waits for it, and how far it is.

    stream: tells its random stream apart from others of the same seed. deadline: on the clock of `time.monotonic`.
    row, groups: where it runs, None outside. read: prompt tokens whose reading was dispatched. issued: new tokens whose
    computation was dispatched. received: new tokens that have come back.
    withdrawn: it was cancelled, and the next round ends it; it gets nothing more.
    replays: times it was begun again after a fault that was not its own; what was delivered before is not delivered
    again.
    """

    request: Request = field(kw_only=True)
    handle: RequestHandle = field(kw_only=True)
    stream: int = field(kw_only=True)
    submitted: float = field(kw_only=True)
    deadline: int | float | None = None
    on_token: Callable[[int], None] | None = None
    on_failure: Callable[[BaseException], None] | None = None
    record_steps: bool = False
    text: StoppingStream | None = None  # where it has stop strings
    withdrawn: bool = False
    replays: int = 0
    latest: float = 0.0  # when its latest token came
    row: int | None = None
    groups: np.ndarray | None = None
    read: int = 0
    issued: int = 0
    received: int = 0
    report: np.ndarray | None = None  # its line of the latest step (`StepOutput`)
    counts: list[StepCounts] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """The most tokens it may get."""
        return self.request.params.max_new_tokens

    def restart(self) -> None:
        """Go back to the start of the queue, without what was computed."""
        self.row = self.groups = None
        self.read = self.issued = self.received = 0
        self.report, self.counts = None, []

    @property
    def locality(self) -> float:
        """Its least locality so far, NaN before a step with a full selection."""
        return math.nan if self.report is None else unpack_locality(self.report[7])

    def result(self, reason: str, layout: CacheLayout, tokenizer: Tokenizer | None) -> GenerationResult:
        """What it has got, however it ended."""
        tokens = self.handle.tokens
        hits, misses = (0, 0) if self.report is None else (int(self.report[5]), int(self.report[6]))
        if self.text is not None:
            self.text.flush()
            text: str | None = self.text.text
        else:
            text = None if tokenizer is None else tokenizer.decode(tokens)
        return GenerationResult(
            tokens=tokens,
            text=text,
            finish_reason=reason,
            prompt_length=len(self.request.tokens),
            hits=hits,
            misses=misses,
            bytes_fetched=misses * layout.page_bytes,
            min_locality=self.locality,
            steps=self._steps(layout) if self.record_steps else None,
        )

    def _steps(self, layout: CacheLayout) -> StepCounts:
        none = np.zeros((0, layout.config.num_layers, layout.config.num_kv_heads), np.int32)
        columns = zip(*self.counts, strict=True) if self.counts else [()] * len(StepCounts._fields)
        return StepCounts(*(np.stack(column) if column else none for column in columns))


def make_job(
    request: Request,
    stream: int,
    tokenizer: Tokenizer | None,
    *,
    wait: Callable[[RequestHandle, Callable[[], bool], int | float | None], None],
    cancel: Callable[["Job"], None],
    deadline: int | float | None = None,
    on_token: Callable[[int], None] | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
    record_steps: bool = False,
) -> Job:
    """A job that was submitted now, and its handle.

    Args:
      wait, cancel: what the handle does to wait and to be cancelled.

    Raises:
      InputError: stop strings without a tokenizer.
    """
    text = None
    if request.params.stop:
        if tokenizer is None:
            raise InputError("stop strings are text, but the engine has no tokenizer; pass tokenizer= or use eos_ids")
        text = StoppingStream(tokenizer, request.params.stop)
    job = Job(
        request=request,
        handle=RequestHandle(len(request.tokens), wait, lambda _: cancel(job)),
        stream=stream,
        submitted=time.perf_counter(),
        deadline=deadline,
        on_token=on_token,
        on_failure=on_failure,
        record_steps=record_steps,
        text=text,
    )
    return job
