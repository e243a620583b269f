"""AdamW as the run configures it, and which parameters it moves."""

import fnmatch
from collections.abc import Sequence

import optax

from nosa_jax.checkpoint import Params
from nosa_jax.errors import InputError
from nosa_jax.train.config import Optimizer

# Not decayed: the eviction head gets no gradient in the dense phase, where decay alone would wear it away.
_EVICTION_HEAD = ("delta_weight_kkh", "a_k")


def learning_rate(config: Optimizer, total_steps: int) -> optax.Schedule:
    """Linear from peak/warmup to the peak, then cosine to `final_ratio` of it at the last step."""
    warmup = min(config.warmup_steps, max(total_steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(warmup, 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(total_steps, warmup + 1),
        end_value=config.learning_rate * config.final_ratio,
    )


def make_optimizer(config: Optimizer, total_steps: int) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW. Works on parameters by name."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, total_steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )


def decay_mask(params: Params) -> dict[str, bool]:
    """Which parameters decay: matrices, but neither norms nor the eviction head."""
    return {
        name: len(value.shape) > 1 and name.rpartition(".")[2] not in _EVICTION_HEAD for name, value in params.items()
    }


def trainable_names(names: Sequence[str], train_only: Sequence[str], freeze: Sequence[str]) -> frozenset[str]:
    """Names that match a pattern of `train_only` (all, if there is none) and no pattern of `freeze`.

    Raises InputError for a pattern that matches nothing, and where nothing is left to train.
    """
    for pattern in (*train_only, *freeze):
        if not fnmatch.filter(names, pattern):
            raise InputError(f"pattern {pattern!r} matches no parameter; the names are {', '.join(names)}.")
    chosen = {n for n in names if not train_only or any(fnmatch.fnmatchcase(n, p) for p in train_only)}
    chosen -= {n for n in names if any(fnmatch.fnmatchcase(n, p) for p in freeze)}
    if not chosen:
        raise InputError(f"train_only={list(train_only)} and freeze={list(freeze)} leave no parameter to train.")
    return frozenset(chosen)
