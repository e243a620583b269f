"""Handing tokens to their owners, and ending requests: the host's side of a round."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from nosa_jax.infer.in_flight import InFlight
from nosa_jax.infer.jobs import Job
from nosa_jax.infer.metrics import Recorder
from nosa_jax.infer.row_steps import unpack_token
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import StepCounts
from nosa_jax.tokenizer import Tokenizer

# How a token ended its request: in a way that the device knows of (it has taken the row out already), or not.
End = Literal["known", "unknown"]


class Delivery:
    """Tells handles and callbacks about tokens and ends, and the recorder about both.

    `interruption` keeps a KeyboardInterrupt or its like that a callback was hit by, for the end of the round.
    """

    def __init__(self, layout: CacheLayout, tokenizer: Tokenizer | None) -> None:
        self._layout, self._tokenizer = layout, tokenizer
        self.recorder = Recorder(layout.page_bytes)
        self.interruption: BaseException | None = None

    def hand_out(self, sent: InFlight, report: np.ndarray, began: float, now: float) -> Iterator[tuple[Job, End]]:
        """Hand out the tokens of what was dispatched, step by step, and count the steps.

        The host reads the steps of a dispatch together, so each of them counts as taking the same time, and its tokens
        as coming at its end. Jobs that are done or cancelled get nothing more.

        Args:
          report: `sent.report`, read. began, now: when the device began with it, and when it was read.

        Yields: jobs that are done now, with how their last token ended them.
        """
        if not report.ndim:
            ((_, job),) = sent.jobs
            if not (job.handle.done or job.withdrawn) and (end := self.token(job, int(report), now)) is not None:
                yield job, end
            return
        seconds = (now - began) / len(report)
        # A row that is decoded selects its own block at least.
        rows = [int(np.count_nonzero(selected)) for selected in report[:, :, 3]]
        for its_rows, sums in zip(rows, report[:, :, 1:5].sum(axis=1, dtype=np.int64).tolist(), strict=True):
            self.recorder.step(its_rows, seconds, sums)
        counts = None if sent.counts is None else StepCounts(*(np.asarray(x) for x in sent.counts))
        for index, tokens in enumerate(report[:, :, 0].tolist()):
            for row, job in sent.jobs:
                if job.handle.done or job.withdrawn:
                    continue
                job.report = report[index, row]
                if counts is not None and job.record_steps:
                    job.counts.append(StepCounts(*(x[index, :, row] for x in counts)))
                end = self.token(job, tokens[row], began + (index + 1) * seconds)
                if end is not None:
                    yield job, end

    def token(self, job: Job, packed: int, now: float) -> End | None:
        """Hand out one token of a job that is not done; returns how it ended the job, if it did."""
        token, last = unpack_token(packed)
        end: End = "known" if last else "unknown"
        job.received += 1
        if job.received > len(job.handle._tokens):  # else it was begun again, and its owner has this token
            self._time(job, now)
            job.handle._push(token)
            if job.on_token is not None:
                try:
                    job.on_token(token)
                except BaseException as error:
                    self.fail(job, error)
                    if not isinstance(error, Exception):
                        self.interruption = error
                    return end
            if job.text is not None:
                try:
                    job.text.push(token)
                    if last:
                        job.text.flush()
                except Exception as error:  # its tokenizer's
                    self.fail(job, error)
                    return end
                if job.text.stopped:
                    self.conclude(job, "stop")
                    return end
        if not last:
            return None
        self.conclude(job, "eos" if token in job.request.params.eos_ids else "length")
        return end

    def conclude(self, job: Job, reason: str) -> None:
        """End a job with what it has got; from any thread. It fails with its tokenizer's error if that raises one."""
        try:
            result = job.result(reason, self._layout, self._tokenizer)
        except Exception as error:
            self.fail(job, error)
            return
        self.recorder.end(reason, job.locality)
        job.handle._finish(result, None)

    def fail(self, job: Job, error: BaseException) -> None:
        """End a job with an error; from any thread."""
        self.recorder.end("error", job.locality)
        job.handle._finish(None, error)
        if job.on_failure is not None:
            job.on_failure(error)

    def _time(self, job: Job, now: float) -> None:
        self.recorder.generated_tokens += 1
        if job.received == 1:
            self.recorder.first.add(now - job.submitted)
        else:
            self.recorder.later.add(now - job.latest)
        job.latest = now
