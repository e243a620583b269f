"""Several devices: which mesh axis splits the batch, and running a function on each device's rows."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

DATA_AXIS = "data"


def over_batch(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, run by every device of the surrounding mesh on its own rows.

    The compiler cannot split a GPU kernel by itself: it would give every device the whole batch.

    Args:
      fn: rows must not depend on each other.
      args: arrays, or trees of them, with the batch as first axis; the mesh's axis `DATA_AXIS` divides it. Without a
        mesh in context (`jax.set_mesh`, `jax.sharding.use_abstract_mesh`), or without that axis, fn runs as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape.get(DATA_AXIS, 1) == 1:
        return fn(*args)
    rows = PartitionSpec(DATA_AXIS)
    # Nothing in fn is the same on all devices, so there is no replication to check; kernels do not declare any.
    return jax.shard_map(fn, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(*args)
