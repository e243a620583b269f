"""Inference: prefill, a jitted decode step over two memories, sampling, and the engine around them."""

from nosa_jax.infer.decode import decode_step, step
from nosa_jax.infer.engine import Engine
from nosa_jax.infer.frozen import FrozenModel, freeze
from nosa_jax.infer.handle import RequestHandle, RequestStatus
from nosa_jax.infer.metrics import EngineMetrics, StepMetrics, Times
from nosa_jax.infer.plan import DoesNotFitError, MemoryPlan, make_plan
from nosa_jax.infer.requests import GenerationResult
from nosa_jax.infer.sampling import SamplingParams
from nosa_jax.infer.waiting import QueueFullError

__all__ = [
    "DoesNotFitError",
    "Engine",
    "EngineMetrics",
    "FrozenModel",
    "GenerationResult",
    "MemoryPlan",
    "QueueFullError",
    "RequestHandle",
    "RequestStatus",
    "SamplingParams",
    "StepMetrics",
    "Times",
    "decode_step",
    "freeze",
    "make_plan",
    "step",
]
