"""Metrics of a run: one JSON object per line, TensorBoard, and the loss curve as a picture."""

import itertools
import json
import os
from pathlib import Path
from typing import Any, Self

from tensorboardX import SummaryWriter

METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"
TENSORBOARD_DIR = "tensorboard"


class MetricsLog:
    """Writes `metrics.jsonl` and TensorBoard events below `out`.

    Every line has `step` and `phase`. Training lines have `loss` [nats per token], `grad_norm`, `learning_rate`,
    `tokens` (seen since step 0); validation lines `val_loss` and `val_ppl`. A run that resumes after step n drops the
    lines after n that a killed run had written, so that the file equals that of an uninterrupted run.
    """

    def __init__(self, out: Path, resumed_after: int) -> None:
        self._path = out / METRICS_FILE
        kept = [line for line in read_metrics(self._path) if line["step"] <= resumed_after]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(out / TENSORBOARD_DIR), purge_step=resumed_after + 1, flush_secs=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._board.close()
        self._file.close()

    def write(self, step: int, phase: str, **values: float | int) -> None:
        """Add a line and TensorBoard scalars. Raises OSError where the disk is full."""
        self._file.write(json.dumps({"step": step, "phase": phase, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; one cut off by a crash is left out. A missing file has none."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def plot_loss(metrics: list[dict[str, Any]], path: Path) -> Path:
    """Training and validation loss over steps, with a line where the phase changes, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and not every process draws
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    train = [m for m in metrics if "loss" in m]
    held_out = [m for m in metrics if "val_loss" in m]
    axes.plot([m["step"] for m in train], [m["loss"] for m in train], color="#9db8d9", lw=1, label="training, per step")
    axes.plot(
        [m["step"] for m in train], _smooth([m["loss"] for m in train]), color="#1f5fa8", label="training, smoothed"
    )
    axes.plot([m["step"] for m in held_out], [m["val_loss"] for m in held_out], "o-", color="#c8501e", label="held out")
    for before, after in itertools.pairwise(train):
        if before["phase"] != after["phase"]:
            axes.axvline(before["step"] + 0.5, color="#666666", ls="--", lw=1)
            axes.annotate(
                f"{before['phase']} → {after['phase']}", (before["step"] + 0.5, 1.0), (4, -12),
                xycoords=("data", "axes fraction"), textcoords="offset points", color="#666666",
            )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss [nats per token]", title="Next-token loss")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def _smooth(values: list[float], decay: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, average, weight = [], 0.0, 0.0
    for value in values:
        average, weight = decay * average + (1 - decay) * value, decay * weight + (1 - decay)
        smoothed.append(average / weight)
    return smoothed
