"""Inference: prefill, a jitted decode step over two memories, sampling, and the engine around them."""

from nosa_jax.infer.decode import decode_step, step
from nosa_jax.infer.engine import Engine
from nosa_jax.infer.frozen import FrozenModel, freeze
from nosa_jax.infer.plan import DoesNotFitError, MemoryPlan, make_plan
from nosa_jax.infer.requests import GenerationResult
from nosa_jax.infer.sampling import SamplingParams

__all__ = [
    "DoesNotFitError",
    "Engine",
    "FrozenModel",
    "GenerationResult",
    "MemoryPlan",
    "SamplingParams",
    "decode_step",
    "freeze",
    "make_plan",
    "step",
]
