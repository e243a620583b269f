"""Which shapes a plan's requests are compiled for, and prompts that need all of them."""

import numpy as np

from nosa_jax.infer.plan import MemoryPlan
from nosa_jax.infer.prefill import padded_length
from nosa_jax.infer.sampling import SamplingParams
from nosa_jax.offload.layout import CacheLayout


def padded_lengths(layout: CacheLayout, n_tokens: int) -> list[int]:
    """All static lengths that pieces of 1 .. `n_tokens` tokens are padded to, ascending."""
    lengths: list[int] = []
    while (done := lengths[-1] if lengths else 0) < n_tokens:
        lengths.append(padded_length(done + 1, layout))
    return lengths


def warm_up_prompts(plan: MemoryPlan, *, sampling: bool) -> tuple[list[np.ndarray], list[SamplingParams]]:
    """Prompts whose reading and decoding compiles everything that a request within the plan can need (docs/09).

    Reading has one program for each padded length of a whole prompt or of its first piece, and one for each of a piece
    that continues a row; decoding has one for rows that are all greedy and one for others.
    """
    layout, chunk = plan.layout, plan.prefill_chunk
    room = layout.max_context
    if layout.offload:
        room = min(room, plan.page_groups * layout.config.block_size)
    room -= 1  # for a new token
    whole = min(chunk, room)
    lengths = [min(n, whole) for n in padded_lengths(layout, whole)]
    if room > chunk:
        more = min(chunk, room - chunk)
        lengths += [chunk + min(n, more) for n in padded_lengths(layout, more)]
    prompts = [np.zeros(n, np.int32) for n in lengths if n > 0]
    params = [SamplingParams(max_new_tokens=min(2, room + 1 - len(p))) for p in prompts]
    if sampling and prompts:
        prompts.append(prompts[0])
        params.append(SamplingParams(max_new_tokens=params[0].max_new_tokens, temperature=1.0))
    return prompts, params
