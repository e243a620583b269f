"""Who turns the scheduler's rounds: the thread that waits, or one that serves."""

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nosa_jax.infer.handle import RequestHandle
from nosa_jax.infer.scheduler import Scheduler

SECONDS_AT_EXIT = 60  # more than a round takes; a callback that never returns must not keep the process


class Driver:
    """Runs rounds of one scheduler, one at a time.

    Without a serving thread, whoever waits for a request turns the rounds until that request is ready; several who
    wait take turns. With one, it turns them and the others sleep.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._turn = threading.Lock()
        self._turning: int | None = None  # the thread that is in a round
        self._work = threading.Condition()  # something was submitted or cancelled, or serving is to stop
        self._pending = False
        self._server: threading.Thread | None = None
        self._stop: str | None = None  # "drain" or "abandon"

    @property
    def serving(self) -> bool:
        """Whether a thread serves."""
        return self._server is not None

    def notify(self) -> None:
        """Something was submitted or cancelled."""
        with self._work:
            self._pending = True
            self._work.notify_all()

    def wait(self, handle: RequestHandle, ready: Callable[[], bool], deadline: int | float | None) -> None:
        """Return when `ready()` is true, which only rounds of the scheduler bring about.

        Raises:
          TimeoutError: the deadline, on the clock of `time.monotonic`, has passed.
          RuntimeError: this is called from within a round, by a callback.
        """
        while not ready():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError(f"the request is {handle.status} and has {len(handle.tokens)} tokens so far")
            if self.serving:
                with handle._changed:
                    if not ready():
                        # A second at most: serving may end meanwhile, and then this thread is to go on itself.
                        handle._changed.wait(min(1.0, remaining) if remaining is not None else 1.0)
            else:
                self.turn(lambda: not ready() and not self.serving, remaining)

    def turn(self, wanted: Callable[[], bool], timeout: int | float | None = None) -> bool:
        """One round, if it is still wanted when no other thread is in one; False where nothing is left to do.

        Raises:
          RuntimeError: this is called from within a round, by a callback.
        """
        self.refuse_in_callback("wait for")
        if not self._turn.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            return True
        try:
            self._turning = threading.get_ident()
            return self._scheduler.advance() if wanted() else True
        finally:
            self._turning = None
            self._turn.release()

    def start(self) -> None:
        """Start a thread that serves, until `stop` or the interpreter's exit, which cancels requests.

        Raises:
          RuntimeError: there is one.
        """
        with self._work:
            if self._server is not None:
                raise RuntimeError("this engine is being served already")
            self._stop = None
            self._server = threading.Thread(target=self._serve, name="nosa-engine", daemon=True)
        # A thread that still ran when the interpreter ends would be killed in the midst of native code, and keep the
        # engine's pool. Callbacks run in reverse order, so the pool, which is older, is closed after it.
        atexit.register(self.stop, drain=False, timeout=SECONDS_AT_EXIT)
        self._server.start()

    def stop(self, *, drain: bool, timeout: int | float | None = None) -> None:
        """End serving: with `drain` when everything submitted is done, else at once, requests cancelled.

        Waits until it has ended, `timeout` seconds at most.
        """
        server = self._server
        if server is None:
            return
        with self._work:
            self._stop = "drain" if drain and self._stop is None else "abandon"
            self._work.notify_all()
        if threading.current_thread() is not server:
            server.join(timeout)

    def abandon(self, error: BaseException | None = None) -> None:
        """End every request, as cancelled or with an error; waits for a round that runs."""
        self.refuse_in_callback("close")
        with self._turn:
            self._scheduler.abandon(error)

    def refuse_in_callback(self, what: str) -> None:
        """Raise a RuntimeError where this thread is in a round: only callbacks come here from there."""
        if self._turning == threading.get_ident():
            raise RuntimeError(f"an on_token callback cannot {what} the engine that calls it; hand that to a thread")

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """No round runs in the block but one that this thread is in; waits for one that does.

        To be entered before anything is locked that callbacks lock, which hold up a round.
        """
        if self._turning == threading.get_ident():
            yield
            return
        with self._turn:
            yield

    def _serve(self) -> None:
        try:
            while self._stop != "abandon":
                with self._work:
                    self._pending = False
                try:
                    if self.turn(lambda: True):
                        continue
                except (KeyboardInterrupt, SystemExit):
                    continue  # a callback's, whose request has failed with it; signals go to the main thread
                with self._work:
                    if self._pending:  # since the round: also what was submitted just before the end is finished
                        continue
                    if self._stop is not None:
                        break
                    self._work.wait()
            error = None
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._server = None
            atexit.unregister(self.stop)
            if self._stop != "drain" or error is not None:
                self.abandon(error)
