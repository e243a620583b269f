"""The training loop: phases, validation, checkpoints, metrics, interruption."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from nosa_jax.checkpoint import export_model
from nosa_jax.config import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.model import NosaLM
from nosa_jax.tokenizer import Tokenizer
from nosa_jax.train.batches import BatchStream, PackedWindows, evaluation_batches
from nosa_jax.train.checkpoints import CheckpointStore
from nosa_jax.train.config import Phase, TrainConfig
from nosa_jax.train.errors import RunFailure
from nosa_jax.train.interrupt import StopRequest
from nosa_jax.train.loss import mean_loss
from nosa_jax.train.metrics import CURVE_FILE, METRICS_FILE, MetricsLog, plot_loss, read_metrics
from nosa_jax.train.prepare import CHECKPOINTS_DIR, Setup, exclusive, has_steps, open_folder, prepare
from nosa_jax.train.progress import TrainProgress
from nosa_jax.train.sharding import make_mesh
from nosa_jax.train.step import TrainState, make_eval_step, make_train_step, place_batch


@dataclass(frozen=True)
class TrainResult:
    """A finished or interrupted run."""

    model: NosaLM
    tokenizer: Tokenizer
    step: int
    """Steps done since step 0."""
    interrupted: bool
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    tokens_per_second: dict[str, float]
    """Speed of the phases that this process ran, without compilation, validation and checkpoints. A phase of which no
    step could be timed, like one of a single step, is left out."""
    out: Path

    @property
    def losses(self) -> list[float]:
        """Training loss of every step [nats per token]."""
        return [m["loss"] for m in self.metrics if "loss" in m]

    @property
    def validation_losses(self) -> list[float]:
        """Held-out loss of every validation [nats per token]."""
        return [m["val_loss"] for m in self.metrics if "val_loss" in m]


def train(
    config: TrainConfig,
    *,
    model_config: NosaConfig | None = None,
    devices: Sequence[jax.Device] | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Run, or go on with, a training run.

    model_config: instead of the preset and overrides of `config`. devices: None takes all of the default backend.
    SIGINT and SIGTERM end the run after the current step, with a checkpoint.
    Raises InputError for settings that cannot work (before anything is written) and RunFailure where the run breaks.
    """
    setup = prepare(config, model_config, make_mesh(devices))
    initial = None if has_steps(config) else setup.initial_state()  # before a folder is made: `init_from` may fail
    out = open_folder(config)
    try:
        with ExitStack() as stack:
            stack.enter_context(exclusive(out))
            store = stack.enter_context(CheckpointStore(out / CHECKPOINTS_DIR, config.keep))
            return _Run(setup, out, store, console or Console(stderr=True), initial).execute(stack)
    except OSError as error:
        raise RunFailure(
            f"writing to {str(out)!r} failed: {error.strerror or error}. Free space or check permissions, then go "
            "on with --resume."
        ) from error


class _Run:
    """The moving parts of one call of `train`."""

    def __init__(
        self, setup: Setup, out: Path, store: CheckpointStore, console: Console, initial: TrainState | None
    ) -> None:
        self.setup, self.config, self.out, self.store, self.console = setup, setup.config, out, store, console
        self.state, self.data = self._first_state(initial)
        self.step = int(self.state.step)
        self.saved_at = self.step if store.latest is not None else -1
        self.speeds: dict[str, float] = {}

    def _first_state(self, initial: TrainState | None) -> tuple[TrainState, dict[str, Any]]:
        latest = self.store.latest
        if latest is None:
            return self.setup.initial_state() if initial is None else initial, {}
        self.setup.require_same_run(self.store.read_meta(latest), str(self.store.directory / str(latest)))
        state, meta = self.store.restore(self.setup.abstract_state(), latest)
        return state, meta["data"]

    def execute(self, stack: ExitStack) -> TrainResult:
        total = self.config.total_steps
        self.stop = stack.enter_context(StopRequest())
        self.log = stack.enter_context(MetricsLog(self.out, self.step))
        self.progress = stack.enter_context(TrainProgress(total, self.step, self.console))
        self._announce()
        end = 0
        for index, phase in enumerate(self.config.phases):
            start, end = end, end + phase.steps
            if self.step < end and not self.stop.requested:
                self._run_phase(index, phase, start, end)
        self.store.wait()
        metrics = read_metrics(self.out / METRICS_FILE)
        plot_loss(metrics, self.out / CURVE_FILE)
        model = self.setup.skeleton.merge(self.state.all_params)
        if self.config.export is not None and self.step == total:
            self._export(self.config.export, model)
        return TrainResult(model, self.setup.tokenizer, self.step, self.step < total, metrics, self.speeds, self.out)

    def _export(self, path: str, model: NosaLM) -> None:
        try:
            export_model(path, model, self.setup.tokenizer, {"step": self.step})
        except InputError:
            raise
        except Exception as error:  # storage layers raise many kinds
            reason = " ".join(str(error).split())[:400]
            raise RunFailure(
                f"the weights could not be exported to {path!r}: {reason}. The run is complete and its step "
                f"{self.step} is saved; give --resume and another --export."
            ) from error

    def _announce(self) -> None:
        corpus, setup = self.setup.corpus, self.setup
        self.progress.say(
            f"{setup.num_parameters:,} parameters ({len(setup.trainable)} of {len(setup.skeleton.names)} arrays "
            f"trained); {corpus.documents:,} documents, {corpus.num_bytes:,} bytes: {len(corpus.train):,} training and "
            f"{len(corpus.validation):,} held-out tokens; {setup.mesh.size} x {setup.mesh.devices.flat[0].platform}"
        )
        if self.step:
            self.progress.say(f"resuming after step {self.step}")

    def _run_phase(self, index: int, phase: Phase, start: int, end: int) -> None:
        setup, config = self.setup, self.config
        pad = setup.tokenizer.pad_id
        train_step = make_train_step(
            setup.skeleton, setup.optimizer, setup.schedule, phase.attention, setup.mesh, layout=config.parameters,
            accumulate=config.optimizer.accumulate, remat=setup.remat(phase.seq_len),
        )  # fmt: skip
        eval_step = make_eval_step(setup.skeleton, phase.attention, setup.mesh)
        windows = PackedWindows(setup.corpus.train, phase.seq_len, pad)
        held_out = PackedWindows(setup.corpus.validation, phase.seq_len, pad)
        tokens = phase.seq_len * phase.batch
        seen = sum(p.steps * p.seq_len * p.batch for p in config.phases[:index]) - start * tokens
        clock = _Clock(tokens)
        with closing(BatchStream(windows, phase.batch, config.seed + index)) as stream:
            if self.data.get("phase") == index:
                stream.restore(self.data["iterator"])
            while self.step < end and not self.stop.requested:
                batch = place_batch(next(stream), setup.mesh)
                self.state, metrics = train_step(self.state, batch)
                self.step += 1
                finite = bool(metrics.pop("finite"))
                values = {name: float(value) for name, value in metrics.items()}
                clock.tick()
                self._require_finite("loss", values["loss"])
                self._require_finite("norm of the gradients", values["grad_norm"])
                if not finite:
                    raise self._diverged(f"step {self.step} makes parameters or moments that are not finite")
                self.log.write(self.step, phase.attention, **values, tokens=seen + self.step * tokens)
                self.progress.update(self.step, phase.attention, values["loss"], clock.rate)
                self.data = {"phase": index, "iterator": stream.state()}
                if self.step == end or (config.eval_every and self.step % config.eval_every == 0):
                    self._validate(phase, eval_step, held_out)
                    clock.pause()
                self.store.check()
                if self._is_time_to_save():
                    self._save()
                    clock.pause()
            if clock.rate:
                self.speeds[phase.attention] = clock.rate
            if self.stop.requested and self.saved_at != self.step:
                self._save()
            if self.stop.requested and self.step < config.total_steps:
                self.progress.say(f"stopped after step {self.step}; it is saved, go on with --resume")

    def _is_time_to_save(self) -> bool:
        every = self.config.checkpoint_every
        return self.step == self.config.total_steps or bool(every and self.step % every == 0)

    def _save(self) -> None:
        self.store.save(self.state, self.setup.meta(self.data))
        self.saved_at = self.step

    def _validate(self, phase: Phase, eval_step: Any, held_out: PackedWindows) -> None:
        batches = evaluation_batches(held_out, self.config.eval_windows, phase.batch)
        loss = mean_loss(eval_step, self.state.all_params, (place_batch(b, self.setup.mesh) for b in batches))
        self._require_finite("held-out loss", loss)
        self.log.write(self.step, phase.attention, val_loss=loss, val_ppl=math.exp(min(loss, 700.0)))
        self.progress.say(
            f"{phase.attention} step {self.step}/{self.config.total_steps}  held-out loss {loss:.3f}  "
            f"perplexity {math.exp(min(loss, 700.0)):.2f}"
        )

    def _require_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise self._diverged(f"the {name} of step {self.step} is {value}")

    def _diverged(self, what: str) -> RunFailure:
        """Nothing is saved after this, and every step was checked before it was: the latest checkpoint is good."""
        with suppress(RunFailure):  # the divergence is what has to be reported
            self.store.wait()
        latest = self.store.latest
        kept = "no checkpoint was saved" if latest is None else f"the last good checkpoint is that of step {latest}"
        return RunFailure(
            f"{what}. Lower learning_rate={self.config.optimizer.learning_rate} or "
            f"clip_norm={self.config.optimizer.clip_norm}; {kept}."
        )


class _Clock:
    """Tokens per second of the steps themselves: the first step (compilation) and pauses do not count."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._steps, self._seconds = 0, 0.0
        self._last: float | None = None

    def tick(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._steps, self._seconds = self._steps + 1, self._seconds + now - self._last
        self._last = now

    def pause(self) -> None:
        """Something else follows; the time from here to the next tick's start is not training."""
        self._last = None

    @property
    def rate(self) -> float:
        """0 while it is not known."""
        return self._tokens * self._steps / self._seconds if self._seconds else 0.0
