"""A training run in its own process, for tests that kill it: `python slow_run.py CONFIG.json`.

Prints "saved STEP" as soon as a save has returned, and takes its time between steps.
"""

import json
import sys
import time
from pathlib import Path

from nosa_jax import NosaConfig
from nosa_jax.train import CheckpointStore, Optimizer, Phase, TrainConfig, train
from nosa_jax.train import loop as train_loop


def main() -> None:
    values = json.loads(Path(sys.argv[1]).read_text())
    model_config = NosaConfig.from_dict(values.pop("model"))
    values |= {name: Phase(**values[name]) for name in ("dense", "nosa")}
    values |= {name: tuple(values[name]) for name in ("data", "override", "train_only", "freeze")}
    config = TrainConfig(**(values | {"optimizer": Optimizer(**values["optimizer"])}))

    save, place = CheckpointStore.save, train_loop.place_batch

    def announced_save(self, state, meta):
        save(self, state, meta)
        print("saved", int(state.step), flush=True)

    def slow_place(batch, mesh):
        time.sleep(0.02)
        return place(batch, mesh)

    CheckpointStore.save = announced_save
    train_loop.place_batch = slow_place
    train(config, model_config=model_config)


main()
