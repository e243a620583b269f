"""Checkpoints written from and read onto simulated devices: `python eight_devices.py FOLDER CONFIG` prints a report."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.checkpoint import Placement, abstract_model, export_model, split_model
from nosa_jax.train.sharding import leaf_sharding, make_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package
from tests.oracle.weights import model_with, random_weights


def over(count: int) -> Placement:
    """The largest dimension that fits is split over so many devices."""
    mesh = make_mesh(jax.devices()[:count])
    return lambda name, shape: leaf_sharding(shape, mesh, "fsdp")


def two_by_two(name: str, shape: tuple[int, ...]) -> NamedSharding:
    """First and last dimension over the two axes of a mesh, where they fit."""
    mesh = Mesh(np.asarray(jax.devices()[-4:]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec: list[str | None] = [None] * len(shape)
    if shape[-1] % 2 == 0:
        spec[-1] = "b"
    if len(shape) > 1 and shape[0] % 2 == 0:
        spec[0] = "a"
    return NamedSharding(mesh, PartitionSpec(*spec))


def main() -> None:
    folder, config = Path(sys.argv[1]), NosaConfig.from_dict(json.loads(sys.argv[2]))
    assert len(jax.devices()) == 8
    original = split_model(model_with(config, random_weights(config, 1)))[1]
    split = {n: jax.device_put(v, over(8)(n, v.shape)) for n, v in original.items()}
    model = abstract_model(config)[0].merge(split)
    export_model(folder / "orbax", model)
    model.save_pretrained(folder / "safetensors", max_shard_size=5000)
    reports = {}
    for kind in ("orbax", "safetensors"):
        for name, place in (("8", over(8)), ("2", over(2)), ("2x2", two_by_two), ("1", over(1))):
            params = split_model(NosaLM.from_pretrained(folder / kind, place=place))[1]
            reports[f"{kind} {name}"] = {
                "devices": len(params["embed_vd"].sharding.device_set),
                "placed": all(v.sharding.is_equivalent_to(place(n, v.shape), v.ndim) for n, v in params.items()),
                "split": sum(not v.is_fully_replicated for v in params.values()),
                "equal": all(np.array_equal(v, original[n]) for n, v in params.items()),
            }
    print(json.dumps(reports))


main()
