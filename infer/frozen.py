"""Model weights as inference uses them: split from their module once, in the compute dtype."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nosa_jax.config import NosaConfig
from nosa_jax.model import NosaLM

# Read in float32 whatever the compute dtype: the eviction head and the norms.
_FLOAT32_PARAMETERS = frozenset({"delta_weight_kkh", "a_k", "scale_d"})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FrozenModel:
    """A model's parameters as a pytree, and the graph that puts them back into modules inside a jitted function."""

    parameters: Any  # an nnx.State, whose own annotations the run-time type checker cannot read
    graph: nnx.GraphDef = field(metadata={"static": True})
    config: NosaConfig = field(metadata={"static": True})

    def module(self) -> NosaLM:
        """The model as modules, around these parameters."""
        return nnx.merge(self.graph, self.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.parameters))


def freeze(model: NosaLM | FrozenModel) -> FrozenModel:
    """Split a model for inference and cast its matrices to the compute dtype; norms and eviction head to float32.

    Arrays that have that dtype already are shared with the model, the others are copies. Training the model further
    changes neither, unless its step donates the shared ones: those are then gone here too.
    """
    if isinstance(model, FrozenModel):
        return model
    graph, parameters = nnx.split(model)
    dtype = jnp.dtype(model.config.dtype)

    def cast(path: tuple[object, ...], x: jax.Array) -> jax.Array:
        names = {str(getattr(key, "key", key)) for key in path}
        return x.astype(jnp.float32 if names & _FLOAT32_PARAMETERS else dtype)

    return FrozenModel(jax.tree_util.tree_map_with_path(cast, parameters), graph, model.config)
