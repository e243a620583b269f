"""Model weights as inference uses them: split from their module once, in the compute dtype."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from nosa_jax.config import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.model import Attention, NosaLM, product

# Read in float32 whatever the compute dtype: the eviction head and the norms.
_FLOAT32_PARAMETERS = frozenset({"delta_weight_kkh", "a_k", "scale_d"})


class MergedAttention(Attention):
    """Attention whose query, key and value weights lie side by side [D, N + 2 K, H]: one product reads all three.

    XLA would otherwise either run three or put the weights side by side in every step.
    """

    def __init__(self, attention: Attention) -> None:
        self.config = attention.config
        parts = (attention.q_weight_dnh, attention.k_weight_dkh, attention.v_weight_dkh)
        self.qkv_weight_dnh = nnx.Param(jnp.concatenate([part[...] for part in parts], axis=1))
        self.o_weight_nhd = attention.o_weight_nhd
        self.delta_weight_kkh = attention.delta_weight_kkh
        self.a_k = attention.a_k

    def projected(self, x: Float[Array, "B T D"]) -> Float[Array, "B T NKK H"]:
        """N queries, K keys and K values of normalised hidden states side by side, not rotated."""
        return product("btd,dnh->btnh", x, self.qkv_weight_dnh, self.config)

    def projections(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries, keys and values of normalised hidden states, not rotated."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        q, k, v = jnp.split(self.projected(x), (heads, heads + kv_heads), axis=2)
        return q, k, v


class ModelParts(NamedTuple):
    """Graph and parameters of the whole model and of each layer, to be merged inside jitted functions."""

    whole: tuple[nnx.GraphDef, Any]
    layers: tuple[tuple[nnx.GraphDef, Any], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FrozenModel:
    """A model's parameters as a pytree, and the graph that puts them back into modules inside a jitted function.

    The arrays lie in one tuple: every call of a jitted function takes its arguments apart, and an `nnx.State` of 32
    layers costs the host 0.2 ms each time, a tuple 0.01.

    Attributes:
      arrays: all parameters, in the order of the leaves of `parameters`.
      structure, graph: of the state that they make up, and of its modules.
    """

    arrays: tuple[Any, ...]
    structure: Any = field(metadata={"static": True})
    graph: nnx.GraphDef = field(metadata={"static": True})
    config: NosaConfig = field(metadata={"static": True})

    @classmethod
    def of(cls, graph: nnx.GraphDef, parameters: Any, config: NosaConfig) -> "FrozenModel":
        """The two that `nnx.split` gives."""
        arrays, structure = jax.tree.flatten(parameters)
        return cls(tuple(arrays), structure, graph, config)

    @cached_property
    def parameters(self) -> Any:
        """The parameters as an `nnx.State`, whose own annotations the run-time type checker cannot read."""
        return jax.tree.unflatten(self.structure, self.arrays)

    def module(self) -> NosaLM:
        """The model as modules, around these parameters."""
        return nnx.merge(self.graph, self.parameters)

    @cached_property
    def parts(self) -> ModelParts:
        """The model taken apart, once: 32 layers take a CPU 10 ms, longer than to dispatch the reading of a prompt."""
        module = self.module()
        return ModelParts(nnx.split(module), tuple(nnx.split(layer) for layer in module.layers))

    @property
    def sharding(self) -> Sharding | None:
        """Where the arrays of a state belong: on the one device that the parameters are committed to.

        None where they are not committed, as those that were made here, or are spread over several devices.
        """
        first = self.arrays[0]
        if not isinstance(first, jax.Array) or not first.committed or len(first.sharding.device_set) > 1:
            return None
        return NamedSharding(first.sharding.mesh, P()) if isinstance(first.sharding, NamedSharding) else first.sharding

    def beside(self, arrays: Any) -> Any:
        """Arrays on the model's device, committed to it if the parameters are.

        JAX compiles a function once for arguments that are committed to a device (put there by name, as those of
        checkpoints) and once for others, and what is computed with committed ones is committed. A state has to be of
        one kind from its beginning.
        """
        return arrays if self.sharding is None else jax.device_put(arrays, self.sharding)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(x.size * x.dtype.itemsize for x in self.arrays)


def freeze(model: NosaLM | FrozenModel) -> FrozenModel:
    """Split a model for inference and cast its matrices to the compute dtype; norms and eviction head to float32.

    Query, key and value weights are put side by side, which copies them. Other arrays that have the right dtype already
    are shared with the model, the rest are copies. Training the model further changes neither, unless its step donates
    the shared ones: those are then gone here too.
    """
    if isinstance(model, FrozenModel):
        return model
    if not isinstance(model, NosaLM):
        raise InputError(
            f"a {type(model).__name__} is no model; give NosaLM.from_pretrained(FOLDER), or the first of what "
            "nosa_jax.checkpoint.load_model(FOLDER) returns"
        )
    served = nnx.merge(*nnx.split(model))  # modules of its own, around the same arrays
    for layer in served.layers:
        layer.attention = MergedAttention(layer.attention)
    graph, parameters = nnx.split(served)
    dtype = jnp.dtype(model.config.dtype)

    def cast(path: tuple[object, ...], x: jax.Array) -> jax.Array:
        names = {str(getattr(key, "key", key)) for key in path}
        return x.astype(jnp.float32 if names & _FLOAT32_PARAMETERS else dtype)

    return FrozenModel.of(graph, jax.tree_util.tree_map_with_path(cast, parameters), model.config)
