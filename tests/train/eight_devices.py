"""Training on eight simulated devices, in its own process: `python eight_devices.py FOLDER`.

Saves a run's state from a mesh of eight devices with split parameters, restores it on two and on one, and prints what
a test compares.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from nosa_jax import NosaConfig
from nosa_jax.checkpoint import abstract_model, make_meta
from nosa_jax.parallel import DATA_AXIS
from nosa_jax.train import CheckpointStore, Optimizer, make_train_step
from nosa_jax.train.optimizer import learning_rate, make_optimizer
from nosa_jax.train.sharding import make_mesh, tree_shardings
from nosa_jax.train.step import init_state, place_batch


def main() -> None:
    folder, values = sys.argv[1], json.loads(sys.argv[2])
    assert len(jax.devices()) == 8
    config = NosaConfig.from_dict(values)
    skeleton, _ = abstract_model(config)
    optimizer = make_optimizer(Optimizer(), 10)
    schedule = learning_rate(Optimizer(), 10)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 259, (8, 33)).astype(np.int32)
    batch = {"tokens": tokens, "mask": np.ones((8, 32), bool)}

    losses, final, results = {}, {}, {}
    for count, layout in ((8, "fsdp"), (1, "replicated")):
        mesh = make_mesh(jax.devices()[:count])
        state = init_state(config, optimizer, frozenset(skeleton.names), 0, mesh, layout)
        step = make_train_step(skeleton, optimizer, schedule, "nosa", mesh, layout=layout)
        name = f"{count} {layout}"
        losses[name] = []
        for _ in range(3):
            state, metrics = step(state, place_batch(batch, mesh))
            losses[name].append(float(metrics["loss"]))
        final[name] = jax.device_get(state)
        if name == "8 fsdp":
            results["split"] = sum(DATA_AXIS in p.sharding.spec for p in state.params.values())
            results["split_moments"] = sum(DATA_AXIS in p.sharding.spec for p in state.opt_state[1][0].mu.values())
            with CheckpointStore(folder) as store:
                store.save(state, make_meta(config, None))
    results["losses"] = losses

    restored = []
    with CheckpointStore(folder) as store:
        for count, layout in ((2, "replicated"), (1, "replicated")):
            mesh = make_mesh(jax.devices()[-count:])
            wanted = tree_shardings(final["8 fsdp"], mesh, layout)
            abstract = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), final["8 fsdp"], wanted
            )
            state, _ = store.restore(abstract)
            placed = jax.tree.map(lambda x, s: x.sharding == s, state, wanted)
            equal = jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), jax.device_get(state), final["8 fsdp"])
            step = make_train_step(skeleton, optimizer, schedule, "nosa", mesh, layout=layout)
            _, metrics = step(state, place_batch(batch, mesh))
            restored.append(
                {
                    "placed": all(jax.tree.leaves(placed)),
                    "equal": all(jax.tree.leaves(equal)),
                    "next_loss": float(metrics["loss"]),
                }
            )
    results["restored"] = restored
    print(json.dumps(results))


main()
