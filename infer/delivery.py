"""Handing tokens to their owners, and ending requests: the host's side of a round."""

from typing import Literal

from nosa_jax.infer.jobs import Job
from nosa_jax.infer.metrics import Recorder
from nosa_jax.infer.row_steps import unpack_token
from nosa_jax.offload.layout import CacheLayout
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
                job.text.push(token)
                if last:
                    job.text.flush()
                if job.text.stopped:
                    self.conclude(job, "stop")
                    return end
        if not last:
            return None
        self.conclude(job, "eos" if token in job.request.params.eos_ids else "length")
        return end

    def conclude(self, job: Job, reason: str) -> None:
        """End a job with what it has got; from any thread."""
        self.recorder.end(reason, job.locality)
        job.handle._finish(job.result(reason, self._layout, self._tokenizer), None)

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
