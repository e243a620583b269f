"""The `rope_scaling` of a config.json as one fixed factor per pair of dimensions."""

import math
import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

from nosa_jax.errors import InputError

_KEYS = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "short_factor", "long_factor", "attention_factor",
)  # fmt: skip


def rope_fields(values: Mapping[str, Any], head_dim: int, max_context: int) -> dict[str, Any]:
    """`rope_theta`, `rope_factors` and `rope_attention_factor` of a NosaConfig.

    Supported are the types whose frequencies do not depend on a sequence's length: keys are rotated once and kept, so
    frequencies that changed with the length would make a cache wrong. longrope: https://arxiv.org/abs/2402.13753.

    Args:
      values: a config.json. Newer files keep everything in `rope_parameters`, older ones in `rope_scaling` and
        `rope_theta`.
      max_context: tokens that the model is to reach; decides between LongRoPE's two lists of factors.

    Raises:
      InputError: a type or key that is not supported; names it.
    """
    key = "rope_scaling" if values.get("rope_scaling") is not None else "rope_parameters"
    scaling = values.get(key)
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, Mapping):
        raise InputError(f"{key}={scaling!r} must be a table or null.")
    theta = _theta(scaling, key, values)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factors: tuple[float, ...] | None = None
    attention_factor = 1.0
    half = head_dim // 2
    match kind:
        case "default":
            pass
        case "linear":
            factors = (_number(scaling, "factor", key),) * half
        case "llama3":
            factors = _llama3(scaling, key, theta, half)
        case "longrope":
            factors = _longrope(scaling, key, values, half, max_context)
            attention_factor = _longrope_attention_factor(scaling, key, values)
        case _:
            raise InputError(
                f"{key}.rope_type={kind!r} is not supported; default, linear, llama3 and longrope are. Other types "
                "change their frequencies with the length, or are not known here: use another checkpoint."
            )
    for name, value in scaling.items():
        if name not in _KEYS and not (name == "partial_rotary_factor" and value in (1, None)):
            raise InputError(f"{key}.{name}={value!r:.100} is not supported; known are {', '.join(_KEYS)}.")
    return {"rope_theta": theta, "rope_factors": factors, "rope_attention_factor": attention_factor}


def longrope_scaling(factors: tuple[float, ...], attention_factor: float, max_context: int) -> dict[str, Any]:
    """The `rope_scaling` table that gives these factors at every length."""
    return {
        "rope_type": "longrope",
        "short_factor": list(factors),
        "long_factor": list(factors),
        "attention_factor": attention_factor,
        "factor": 1.0,
        "original_max_position_embeddings": max_context,
    }


def _llama3(scaling: Mapping[str, Any], key: str, theta: float, half: int) -> tuple[float, ...]:
    """Low frequencies are divided by `factor`, high ones kept, those between blended."""
    factor = _number(scaling, "factor", key)
    low, high = _number(scaling, "low_freq_factor", key), _number(scaling, "high_freq_factor", key)
    original = _number(scaling, "original_max_position_embeddings", key)
    if high <= low:
        raise InputError(f"{key}.high_freq_factor={high} must be above low_freq_factor={low}.")
    factors = []
    for i in range(half):
        turns = original / (2 * math.pi * theta ** (i / half))  # within the original context
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - kept) / factor + kept))
    return tuple(factors)


def _theta(scaling: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> float:
    """In the table, or beside it."""
    found = values.get("rope_theta") if scaling.get("rope_theta") is None else scaling["rope_theta"]
    if found is not None and not is_positive(found):
        raise InputError(f"rope_theta={found!r:.40} must be a positive, finite number.")
    return 10_000.0 if found is None else float(found)


def _longrope(
    scaling: Mapping[str, Any], key: str, values: Mapping[str, Any], half: int, max_context: int
) -> tuple[float, ...]:
    lists = {name: _factors(scaling, name, key, half) for name in ("short_factor", "long_factor")}
    if lists["short_factor"] == lists["long_factor"] or max_context <= _original_context(scaling, values):
        return lists["short_factor"]
    raise InputError(
        f"{key}.long_factor differs from short_factor, so frequencies would change once a sequence is longer than "
        f"original_max_position_embeddings={_original_context(scaling, values)}, and keys in the cache would be wrong. "
        f"Load it with max_context={_original_context(scaling, values)} or less (it is {max_context}), or set "
        "max_position_embeddings so in config.json."
    )


def _longrope_attention_factor(scaling: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> float:
    """As given, or the paper's sqrt(1 + log(factor) / log(original context))."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor", key)
    original = _original_context(scaling, values)
    extended = (values.get("max_position_embeddings") or original) / original
    factor = _number(scaling, "factor", key, extended) if extended == 1 else extended
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _original_context(scaling: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    found = next((v for v in (scaling.get(name), values.get(name)) if v is not None), None)
    found = values.get("max_position_embeddings") if found is None else found
    if isinstance(found, bool) or not isinstance(found, int) or found < 2:
        raise InputError(f"{name}={found!r} must be an integer of at least 2 for rope_type 'longrope'.")
    return found


def _factors(scaling: Mapping[str, Any], name: str, key: str, half: int) -> tuple[float, ...]:
    found = scaling.get(name)
    if not isinstance(found, list) or len(found) != half or not all(is_positive(f) for f in found):
        has = f"; it has {len(found)} entries" if isinstance(found, list) else ""
        raise InputError(f"{key}.{name} must be a list of {half} positive numbers, one per pair of head_dim{has}.")
    return tuple(float(f) for f in found)


def _number(scaling: Mapping[str, Any], name: str, key: str, default: Any = None) -> float:
    found = scaling.get(name, default)
    if not is_positive(found):
        raise InputError(f"{key}.{name}={found!r:.40} must be a positive, finite number.")
    return float(found)


def is_positive(value: Any) -> TypeGuard[int | float]:
    """Whether a value of a JSON file is a number above 0 that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
