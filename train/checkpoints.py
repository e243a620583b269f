"""Checkpoints of a run: asynchronous, atomic, the latest few, everything needed to go on exactly.

Each step's folder is a model checkpoint (`params`, `meta`: see `nosa_jax.checkpoint`) with the item `training`
(optimizer state, step, key) beside it. orbax writes into a temporary folder and renames it when all is on disk, so
a run that dies at any moment leaves only complete steps behind.
"""

from pathlib import Path
from typing import Any, Self

import jax
from orbax.checkpoint import v1 as ocp

from nosa_jax.checkpoint import checkpoint_context, read_descriptions, read_meta, reading, require_same_arrays
from nosa_jax.train.errors import RunFailure
from nosa_jax.train.step import TrainState


class CheckpointStore:
    """The checkpoints of one run's folder. Close it, or use it as a context, to wait for the last save."""

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        self.directory = Path(directory).absolute()
        self._checkpointer = ocp.training.Checkpointer(
            self.directory,
            context=checkpoint_context(),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )
        self._pending: tuple[int, Any] | None = None
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def latest(self) -> int | None:
        """The latest complete step."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    @property
    def steps(self) -> list[int]:
        """All complete steps, ascending."""
        return [c.step for c in self._checkpointer.checkpoints]

    def save(self, state: TrainState, meta: dict[str, Any]) -> None:
        """Begin to save; returns when the arrays have been copied, so the state may be donated at once.

        Raises RunFailure where this save, or the one before it, could not be written.
        """
        self.wait()
        step = int(state.step)
        try:
            response = self._checkpointer.save_checkpointables_async(
                step,
                {"params": state.all_params, "training": _training_items(state), "meta": meta},
                force=True,
            )
        except Exception as error:  # storage layers raise many kinds
            raise self._failure(step, error) from error
        self._pending = (step, response)

    def check(self) -> None:
        """Raise RunFailure if a save has ended badly; never waits."""
        if self._pending is not None and not self._checkpointer.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress. Raises RunFailure where it could not be written."""
        if self._pending is None:
            return
        (step, response), self._pending = self._pending, None
        try:
            if response is not None:
                response.result()
        except Exception as error:  # storage layers raise many kinds
            raise self._failure(step, error) from error

    def restore(self, abstract: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """State and meta of a step (None: the latest), every leaf with the sharding that `abstract` asks for.

        abstract: a TrainState of jax.ShapeDtypeStruct. Raises InputError where a file is damaged, and where a name,
        shape or dtype differs from what was saved: nothing is converted.
        """
        step = self.latest if step is None else step
        where = f"step {step} in {str(self.directory)!r}"
        with reading(where):
            for item in ("params", "training"):
                read_descriptions(self.directory / str(step) / item)
            stored = self._checkpointer.checkpointables_metadata(step).metadata
        wanted = {"params": abstract.all_params, "training": _training_items(abstract)}
        for item, arrays in wanted.items():
            require_same_arrays(arrays, stored.get(item), f"the {item} arrays of {where}")
        with reading(where):
            loaded = self._checkpointer.load_checkpointables(step, {**wanted, "meta": None})
        return _rebuild(abstract, loaded["params"], loaded["training"]), loaded["meta"]

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """The meta of a step (None: the latest) alone. Raises InputError where it cannot be read."""
        return read_meta(self.directory / str(self.latest if step is None else step))

    def close(self) -> None:
        """Wait for the last save and stop the writer's threads. Raises RunFailure like `wait`."""
        try:
            self.wait()
        finally:
            try:
                self._checkpointer.close()
            except Exception as error:  # orbax raises the failure of a save once more
                if not self._failed:
                    raise self._failure(self.latest or 0, error) from error

    def _failure(self, step: int, error: Exception) -> RunFailure:
        self._failed = True
        self._checkpointer.reload()
        kept = f"step {self.latest} is complete" if self.latest is not None else "no complete checkpoint exists"
        reason = " ".join(str(error).split())[:400]
        return RunFailure(
            f"the checkpoint of step {step} could not be written to {str(self.directory)!r}: {reason}. "
            f"Free space or give another folder, then resume: {kept}."
        )


def abstract_like(state: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a state, to restore into."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _training_items(state: TrainState) -> dict[str, Any]:
    """Optimizer state, step and key as one flat dictionary of arrays."""
    named, _ = jax.tree_util.tree_flatten_with_path(state.opt_state)
    items = {f"opt.{jax.tree_util.keystr(path, simple=True, separator='.')}": leaf for path, leaf in named}
    return items | {"step": state.step, "key": state.key}


def _rebuild(abstract: TrainState, params: dict[str, Any], training: dict[str, Any]) -> TrainState:
    named, treedef = jax.tree_util.tree_flatten_with_path(abstract.opt_state)
    leaves = [training[f"opt.{jax.tree_util.keystr(path, simple=True, separator='.')}"] for path, _ in named]
    return TrainState(
        step=training["step"],
        params={name: params[name] for name in abstract.params},
        frozen={name: params[name] for name in abstract.frozen},
        opt_state=jax.tree.unflatten(treedef, leaves),
        key=training["key"],
    )
