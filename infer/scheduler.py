"""Rows that requests join and leave while others decode: one round at a time (docs/09)."""

import heapq
import itertools
import threading
import time
from collections import deque
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from nosa_jax.infer.delivery import Delivery
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.handle import RequestStatus
from nosa_jax.infer.in_flight import InFlight, steps_now
from nosa_jax.infer.jobs import Job
from nosa_jax.infer.prefill import piece_length, prefill_row
from nosa_jax.infer.row_memory import RowMemory
from nosa_jax.infer.row_steps import deactivate, first_token, steps_function
from nosa_jax.infer.sampling import empty_sampling, set_row
from nosa_jax.infer.waiting import QueueFullError, WaitingQueue
from nosa_jax.offload.state import DecodeState, StepCounts
from nosa_jax.tokenizer import Tokenizer

_MAX_REPLAYS = 1  # a request that meets a second fault of the device fails with it


class Scheduler:
    """Admits requests, reads their prompts piece by piece between decode steps, and hands out tokens.

    `enqueue`, `withdraw` and the lengths may be used from any thread; `advance` by one thread at a time.

    Args:
      prefill_chunk: tokens of prompts that are read between two decode steps, at most.
      steps_per_dispatch: decode steps that are dispatched at once where nobody is kept waiting by it (`steps_now`).
      max_overtaken: see `WaitingQueue`.
    """

    def __init__(
        self,
        model: FrozenModel,
        memory: RowMemory,
        tokenizer: Tokenizer | None,
        *,
        prefill_chunk: int,
        steps_per_dispatch: int,
        max_overtaken: int,
    ) -> None:
        self.model, self.memory = model, memory
        self.layout, self.prefill_chunk, self.steps_per_dispatch = memory.layout, prefill_chunk, steps_per_dispatch
        self.delivery = Delivery(self.layout, tokenizer)
        self.queue: WaitingQueue[Job] = WaitingQueue(max_overtaken)
        self.state: DecodeState | None = None
        self._step = steps_function(self.layout.max_batch)
        self._lock = threading.Lock()  # the queue, deadlines and withdrawals
        self._withdrawn: deque[Job] = deque()
        self._deadlines: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        self._forget_rows()

    def _forget_rows(self) -> None:
        self.state = None
        self.rows: dict[int, Job] = {}
        self._free_rows = list(range(self.layout.max_batch))
        self._reading: deque[Job] = deque()
        self._decoding: dict[int, Job] = {}
        self._in_flight: deque[InFlight] = deque()
        self._sampling = self.model.beside(empty_sampling(self.layout.max_batch))
        self._tokens = self.model.beside(jnp.zeros(self.layout.max_batch, jnp.int32))
        self._read_at = 0.0

    # From any thread.

    @property
    def busy(self) -> bool:
        """Whether requests wait or run. Asked in the midst of a round that begins them again, it may miss some."""
        with self._lock:
            return bool(self.queue or self.rows or self._in_flight)

    def counts(self) -> dict[str, int]:
        """Requests and pages now, for the metrics."""
        reading, running = len(self._reading), len(self.rows)
        return dict(
            waiting=len(self.queue),
            reading=reading,
            decoding=max(0, running - reading),
            pages_free=self.memory.allocator.n_free,
            pages_total=self.memory.allocator.n_groups,
        )

    def enqueue(self, job: Job, max_queue: int | None = None) -> None:
        """Let a request wait for its turn.

        Raises:
          QueueFullError: `max_queue` requests wait already.
        """
        with self._lock:
            if max_queue is not None and len(self.queue) >= max_queue:
                raise QueueFullError(
                    f"{len(self.queue)} requests wait and max_queue={max_queue}; submit again when some have a row, or "
                    "let more wait"
                )
            self.delivery.recorder.submitted += 1
            if not job.limit:
                self.delivery.conclude(job, "length")
                return
            self.queue.push(job)
            self.delivery.recorder.longest_queue = max(self.delivery.recorder.longest_queue, len(self.queue))
            if job.deadline is not None:
                heapq.heappush(self._deadlines, (job.deadline, next(self._order), job))

    def withdraw(self, job: Job) -> None:
        """Cancel: at once where it waits, else in the next round."""
        with self._lock:
            if self.queue.remove(job):
                self.delivery.conclude(job, "cancelled")
            else:
                job.withdrawn = True
                self._withdrawn.append(job)

    # One round.

    def advance(self) -> bool:
        """Admit, read up to `prefill_chunk` tokens of prompts, dispatch decode steps, hand out the tokens of the last.

        A fault of one request (its callback, its prompt) ends that request alone. A fault of the device takes the
        rows' state with it: their requests are begun again, once, and the tokens that were handed out already are not
        handed out twice.

        Returns: whether there is more to do.

        Raises:
          BaseException: KeyboardInterrupt and the like, wherever they come up; the next round goes on.
        """
        start = time.perf_counter()
        try:
            self._end_withdrawn()
            self._admit()
            self._read_prompts()
            self._collect(leave=1 if self._dispatch_steps() else 0)
            if not (self.rows or self.queue or self._running()):
                self._collect(leave=0)  # steps that were dispatched before their rows were known to have ended
        except Exception as error:
            self._begin_again(error)
        except BaseException:
            self._begin_again(None)
            raise
        finally:
            self.delivery.recorder.busy_seconds += time.perf_counter() - start
        interruption, self.delivery.interruption = self.delivery.interruption, None
        if interruption is not None:
            raise interruption
        return self.busy

    def abandon(self, error: BaseException | None = None) -> None:
        """End every request: as cancelled, or failed with an error. No thread may be in `advance`."""
        with self._lock:
            jobs = {id(job): job for job in [*self._running(), *self.queue]}
            for job in jobs.values():
                self.queue.remove(job)
                self.delivery.conclude(job, "cancelled") if error is None else self.delivery.fail(job, error)
            self._deadlines.clear()
            self._withdrawn.clear()
        if jobs or self.rows or self._in_flight:
            self._forget_rows()
            self.memory.reset()

    def _end_withdrawn(self) -> None:
        """End what was cancelled or is out of time: their owners are told before anything here can fail, and nobody is
        forgotten before he was told."""
        with self._lock:
            if len(self._deadlines) > 2 * (len(self.queue) + len(self.rows)) + 64:  # most of them ended in time
                self._deadlines = [entry for entry in self._deadlines if not entry[2].handle.done]
                heapq.heapify(self._deadlines)
            while self._deadlines and self._deadlines[0][2].handle.done:
                heapq.heappop(self._deadlines)
            now = time.monotonic()
            any_late = self._deadlines and self._deadlines[0][0] <= now
            late = [job for deadline, _, job in self._deadlines if deadline <= now] if any_late else []
            ended: list[tuple[Job, Literal["cancelled", "timeout"]]] = [(job, "cancelled") for job in self._withdrawn]
            ended += [(job, "timeout") for job in late]
            ended = [(job, reason) for job, reason in ended if not job.handle.done]
            for job, _ in ended:
                self.queue.remove(job)  # also where a fault has sent it back meanwhile
        for job, reason in ended:
            if not job.handle.done:  # it may be here twice
                self.delivery.conclude(job, reason)
        with self._lock:
            self._withdrawn = deque(job for job in self._withdrawn if not job.handle.done)
        for job, _ in ended:
            self._leave(job, stop=True)

    def _admit(self) -> None:
        while self._free_rows:
            with self._lock:
                job = self.queue.take(lambda job: self.memory.fits_now(job.request))
                if job is None:
                    return
                row = self._free_rows[0]
                self.rows[row] = job  # before the lock goes: who withdraws it finds it neither waiting nor lost
            heapq.heappop(self._free_rows)
            self.state, job.groups = self.memory.start(self.take_state(), row, job.request, active=False)
            job.row = row
            self._sampling = set_row(self._sampling, row, job.request.params, job.stream)
            job.handle._advance(RequestStatus.READING)
            self._reading.append(job)

    def take_state(self) -> DecodeState:
        """The rows' state, made anew where there is none; whoever donates it puts the next one into `state`."""
        if self.state is None:
            self.state = self.memory.new_state()
        return self.state

    def _read_prompts(self) -> None:
        """Pieces of prompts, in the order of admission, until their padded lengths fill `prefill_chunk`.

        A prompt is cut at multiples of `prefill_chunk` whatever else goes on, so its numbers do not depend on that.
        """
        spent = 0
        while self._reading:
            job = self._reading[0]
            assert job.row is not None
            piece = job.request.tokens[job.read : job.read + self.prefill_chunk]
            length = piece_length(len(piece), job.read, self.prefill_chunk, self.layout)
            if spent and spent + length > self.prefill_chunk:
                return
            spent += length
            try:
                self.state = prefill_row(self.model, self.take_state(), job.row, piece, job.read, length=length)
            except Exception as error:
                self._leave(job, stop=False)
                self.delivery.fail(job, error)
                if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
                    self._begin_again(None)  # it went down with the state that it was given; no fault of the others
                continue
            job.read += len(piece)
            if job.read == len(job.request.tokens):
                self._reading.popleft()
                self._start_decoding(job)

    def _start_decoding(self, job: Job) -> None:
        assert self.state is not None
        assert job.row is not None
        packed, self._tokens, active, self._sampling = first_token(
            self.state.logits, self._tokens, self.state.active, self._sampling, job.row,
            greedy=job.request.params.temperature == 0,
        )  # fmt: skip
        self.state = self.state.replace(active=active)
        self.delivery.recorder.prompt_tokens += len(job.request.tokens)
        job.handle._advance(RequestStatus.DECODING)
        self._decoding[job.row] = job
        self._sent([(job.row, job)], packed, 1)

    def _dispatch_steps(self) -> bool:
        if not self._decoding:
            return False
        jobs = list(self._decoding.items())
        steps = steps_now(
            self._decoding.values(), at_once=self.steps_per_dispatch, reading=bool(self._reading),
            waiting=bool(self.queue),
        )  # fmt: skip
        output = self._step(
            self.model, self.take_state(), self._tokens, self._sampling, steps=steps,
            greedy=all(job.request.params.temperature == 0 for _, job in jobs),
            record=any(job.record_steps for _, job in jobs),
        )  # fmt: skip
        self.state, self._tokens, self._sampling = output.state, output.tokens, output.sampling
        self._sent(jobs, output.report, steps, output.counts)
        return True

    def _sent(
        self, jobs: list[tuple[int, Job]], report: jax.Array, tokens: int, counts: StepCounts | None = None
    ) -> None:
        """Note that up to `tokens` tokens of each job were dispatched; those that get their last one among them leave
        their rows to others now."""
        report.copy_to_host_async()
        self._in_flight.append(InFlight(jobs, report, time.perf_counter(), counts))
        for _, job in jobs:
            job.issued = min(job.issued + tokens, job.limit)
            if job.issued == job.limit:
                self._leave(job, stop=False)

    def _leave(self, job: Job, *, stop: bool) -> None:
        """Free a job's row and pages; with `stop`, the device does not know yet that it has ended."""
        if job.row is None:
            return
        row, job.row = job.row, None
        del self.rows[row]
        if self._decoding.pop(row, None) is None:
            self._reading.remove(job)
        elif stop and self.state is not None:
            self.state = self.state.replace(active=deactivate(self.state.active, row))
        heapq.heappush(self._free_rows, row)
        if job.groups is not None:
            self.memory.release(job.groups)
            job.groups = None

    # What comes back.

    def _collect(self, leave: int) -> None:
        """Read what was dispatched, up to the `leave` latest; the device computes those meanwhile."""
        while len(self._in_flight) > leave:
            sent = self._in_flight[0]
            report = np.asarray(sent.report)
            self.memory.check()
            began, self._read_at = max(sent.dispatched, self._read_at), time.perf_counter()
            for job, end in self.delivery.hand_out(sent, report, began, self._read_at):
                self._leave(job, stop=end == "unknown")
            self._in_flight.popleft()  # not before: whoever interrupts this finds the jobs that are owed tokens

    def _running(self) -> list[Job]:
        """Jobs with a row or with tokens on their way, each once, those that began first in front."""
        jobs = {id(job): job for sent in self._in_flight for _, job in sent.jobs}
        jobs |= {id(job): job for job in [*self._decoding.values(), *self._reading, *self.rows.values()]}
        return [job for job in jobs.values() if not job.handle.done]

    def _begin_again(self, error: Exception | None) -> None:
        """After a fault of the device (`error`), or an interruption, that took the rows' state."""
        jobs = self._running()
        self._forget_rows()
        give_up = False
        try:
            self.memory.reset()
        except Exception as worse:
            error, give_up = worse, True
        for job in reversed(jobs):
            job.restart()
            if error is not None and (give_up or job.replays >= _MAX_REPLAYS):
                self.delivery.fail(job, error)
                continue
            job.replays += error is not None
            self.delivery.recorder.replayed += 1
            job.handle._advance(RequestStatus.QUEUED)
            with self._lock:
                self.queue.push_front(job)
