"""The state of a training run and the jitted functions that advance and evaluate it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, use_abstract_mesh

from nosa_jax.checkpoint import Params, Skeleton, split_model
from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.model import NosaLM
from nosa_jax.train.config import ParameterLayout
from nosa_jax.train.loss import MAX_LOGITS, next_token_loss
from nosa_jax.train.sharding import batch_sharding, tree_shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and what it must find unchanged.

    params: the float32 master weights being trained, by name. frozen: the others, never touched.
    key: root key data (uint32) of the run; the initial weights were drawn from it, and a step that needs
    randomness folds `step` into it.
    """

    step: Any  # int32 []; leaves may also be shapes or shardings, as in any pytree
    params: Params
    frozen: Params
    opt_state: Any
    key: Any

    @property
    def all_params(self) -> Params:
        """Trained and frozen parameters together."""
        return self.params | self.frozen


def init_state(
    config: NosaConfig,
    optimizer: optax.GradientTransformation,
    trainable: frozenset[str],
    seed: int,
    mesh: Mesh,
    layout: ParameterLayout = "replicated",
) -> TrainState:
    """Random parameters and a fresh optimizer, created where they will live."""

    def create() -> TrainState:
        key = jax.random.key(seed)
        _, params = split_model(NosaLM(config, rngs=nnx.Rngs(key)))
        return state_from_params(params, optimizer, trainable, jax.random.key_data(key))

    shardings = tree_shardings(jax.eval_shape(create), mesh, layout)
    return jax.jit(create, out_shardings=shardings)()


def state_from_params(
    params: Params, optimizer: optax.GradientTransformation, trainable: frozenset[str], key_data: Array
) -> TrainState:
    """Step 0 with given parameters."""
    trained = {k: v for k, v in params.items() if k in trainable}
    frozen = {k: v for k, v in params.items() if k not in trainable}
    return TrainState(jnp.zeros((), jnp.int32), trained, frozen, optimizer.init(trained), key_data)


def loss_and_gradients(
    skeleton: Skeleton,
    state: TrainState,
    batch: dict[str, Array],
    attention: AttentionKind,
    *,
    accumulate: int = 1,
    remat: bool = False,
    max_logits: int = MAX_LOGITS,
) -> tuple[Array, Params]:
    """Mean loss per target of a batch, and its gradient by every trained parameter.

    The microbatches' sums are added in float32 and divided once by the batch's number of targets, so the result does
    not depend on how padding falls into microbatches.
    """

    def summed(params: Params, tokens: Array, mask: Array) -> tuple[Array, Array]:
        model = skeleton.merge(params | state.frozen)
        return next_token_loss(model, tokens, mask, attention, remat=remat, max_logits=max_logits)

    gradient = jax.value_and_grad(summed, has_aux=True)
    if accumulate == 1:
        (total, count), grads = gradient(state.params, batch["tokens"], batch["mask"])
    else:
        # Every accumulate-th window: each microbatch then takes its part of every device's windows.
        micro = {k: v.reshape(-1, accumulate, *v.shape[1:]).swapaxes(0, 1) for k, v in batch.items()}

        def body(carry: tuple[Array, Array, Params], part: dict[str, Array]) -> tuple[Any, None]:
            (total, count), grads = gradient(state.params, part["tokens"], part["mask"])
            return jax.tree.map(jnp.add, carry, (total, count, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), jnp.zeros(()), state.params))
        (total, count, grads), _ = jax.lax.scan(body, zeros, micro)
    count = jnp.maximum(count, 1.0)
    return total / count, jax.tree.map(lambda g: g / count, grads)


def make_train_step(
    skeleton: Skeleton,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    attention: AttentionKind,
    mesh: Mesh,
    *,
    layout: ParameterLayout = "replicated",
    accumulate: int = 1,
    remat: bool = False,
) -> Callable[[TrainState, dict[str, Array]], tuple[TrainState, dict[str, Array]]]:
    """A jitted step (state, batch) -> (state, metrics). The old state is donated.

    metrics: `loss` [nats per target], `grad_norm` before clipping, `learning_rate`; float32 scalars. And `finite`,
    bool: whether every new parameter and moment is; a finite loss says so of the old parameters only.
    """

    def step(state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        with use_abstract_mesh(mesh.abstract_mesh):
            loss, grads = loss_and_gradients(skeleton, state, batch, attention, accumulate=accumulate, remat=remat)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, state.frozen, opt_state, state.key)
        # Pinned: the compiler may otherwise hand back another layout than it took, which cannot be donated again.
        new = jax.lax.with_sharding_constraint(new, tree_shardings(new, mesh, layout))
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "finite": _all_finite((params, opt_state)),
        }
        return new, metrics

    return jax.jit(step, donate_argnums=0)


def _all_finite(tree: Any) -> Array:
    """bool []: no leaf holds an infinity or NaN."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def make_eval_step(
    skeleton: Skeleton, attention: AttentionKind, mesh: Mesh | None = None
) -> Callable[[Params, dict[str, Array]], tuple[Array, Array]]:
    """A jitted function (all parameters, batch) -> (sum of losses, number of targets).

    mesh: whose devices the batch is split over; None for one device.
    """

    def evaluate(params: Params, batch: dict[str, Array]) -> tuple[Array, Array]:
        with nullcontext() if mesh is None else use_abstract_mesh(mesh.abstract_mesh):
            return next_token_loss(skeleton.merge(params), batch["tokens"], batch["mask"], attention, remat=False)

    return jax.jit(evaluate)


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Host arrays onto the mesh, windows split over the devices."""
    return jax.device_put(batch, batch_sharding(mesh))
