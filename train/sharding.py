"""Data-parallel layouts over the devices of one process."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nosa_jax.parallel import DATA_AXIS
from nosa_jax.train.config import ParameterLayout


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-dimensional mesh; None takes every device of the default backend."""
    devices = jax.devices() if devices is None else devices
    # Auto: the compiler places the collectives; nothing in the model needs to name an axis.
    return Mesh(np.asarray(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Windows split over the devices."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def leaf_sharding(shape: tuple[int, ...], mesh: Mesh, layout: ParameterLayout) -> NamedSharding:
    """Where a parameter or optimizer moment of this shape lies.

    "fsdp" splits the largest dimension that the devices divide; what cannot be split is replicated.
    """
    devices = mesh.shape[DATA_AXIS]
    spec: list[str | None] = [None] * len(shape)
    fitting = [d for d, size in enumerate(shape) if size % devices == 0 and size > 0]
    if layout == "fsdp" and fitting and devices > 1:
        spec[max(fitting, key=lambda d: shape[d])] = DATA_AXIS
    return NamedSharding(mesh, PartitionSpec(*spec))


def tree_shardings(tree: Any, mesh: Mesh, layout: ParameterLayout) -> Any:
    """`leaf_sharding` of every array of a tree, in the tree's shape."""
    return jax.tree.map(lambda leaf: leaf_sharding(leaf.shape, mesh, layout), tree)
