"""What a caller holds of a submitted request: its tokens as they come, its result, and a way to end it."""

import enum
import threading
import time
from collections.abc import Callable, Iterator

from nosa_jax.infer.requests import GenerationResult


class RequestStatus(enum.StrEnum):
    """Where a request is."""

    QUEUED = "queued"  # waits for a row and pages
    READING = "reading"  # its prompt is being read
    DECODING = "decoding"
    DONE = "done"  # has a result, or has failed


class RequestHandle:
    """One request of `Engine.submit`. Every method may be called from any thread.

    Iterating gives the tokens as they are generated and ends with the request; several iterators each get all tokens.
    `result` waits for the end. Where nothing serves the engine (`Engine.serving`), waiting does the engine's work in
    the calling thread, for all requests and not only this one.
    """

    def __init__(
        self,
        prompt_length: int,
        wait: Callable[["RequestHandle", Callable[[], bool], int | float | None], None],
        cancel: Callable[["RequestHandle"], None],
    ) -> None:
        self.prompt_length = prompt_length
        self._wait_for, self._ask_to_cancel = wait, cancel
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._status = RequestStatus.QUEUED
        self._result: GenerationResult | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"RequestHandle({self._status}, {self.prompt_length} prompt tokens, {len(self._tokens)} generated)"

    @property
    def status(self) -> RequestStatus:
        """Where the request is now."""
        return self._status

    @property
    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._status is RequestStatus.DONE

    @property
    def tokens(self) -> list[int]:
        """The tokens so far; a copy."""
        return list(self._tokens)

    def cancel(self) -> bool:
        """End the request, wherever it is: its row and pages go to others, its result is what it has got so far.

        Returns: False where it was done already.
        """
        if self.done:
            return False
        self._ask_to_cancel(self)
        return True

    def result(self, timeout: int | float | None = None) -> GenerationResult:
        """Wait for the end.

        Args:
          timeout: seconds to wait at most; the request goes on when they are over.

        Returns: also for requests that were cancelled or ran out of time, with the tokens until then; see
          `finish_reason`.

        Raises:
          TimeoutError: it is not done yet.
          Exception: what the request failed with: an error of its callback, of reading its prompt, or of the device.
        """
        self._wait(lambda: self.done, timeout)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def __iter__(self) -> Iterator[int]:
        given = 0

        def more() -> bool:
            return len(self._tokens) > given or self.done

        while True:
            self._wait(more, None)
            done = self.done  # first: no token comes after it
            while given < len(self._tokens):
                yield self._tokens[given]
                given += 1
            if done:
                break
        if self._error is not None:
            raise self._error

    def _wait(self, ready: Callable[[], bool], timeout: int | float | None) -> None:
        self._wait_for(self, ready, None if timeout is None else time.monotonic() + timeout)

    # For the scheduler.

    def _advance(self, status: RequestStatus) -> None:
        self._status = status

    def _push(self, token: int) -> None:
        with self._changed:
            self._tokens.append(token)
            self._changed.notify_all()

    def _finish(self, result: GenerationResult | None, error: BaseException | None) -> None:
        with self._changed:
            self._result, self._error = result, error
            self._status = RequestStatus.DONE
            self._changed.notify_all()
