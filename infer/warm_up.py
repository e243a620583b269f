"""Which shapes a plan's requests are compiled for, and prompts that need all of them."""

import numpy as np

from nosa_jax.infer.plan import MemoryPlan
from nosa_jax.infer.prefill import continuation_lengths, padded_length, piece_length
from nosa_jax.infer.sampling import SamplingParams
from nosa_jax.offload.layout import CacheLayout


def padded_lengths(layout: CacheLayout, n_tokens: int) -> list[int]:
    """All static lengths that pieces of 1 .. `n_tokens` tokens are padded to, ascending."""
    lengths: list[int] = []
    while (done := lengths[-1] if lengths else 0) < n_tokens:
        lengths.append(padded_length(done + 1, layout))
    return lengths


def _prompt_room(plan: MemoryPlan) -> int:
    """Tokens of the longest prompt that leaves room for a new token."""
    room = plan.layout.max_context
    if plan.layout.offload:
        room = min(room, plan.page_groups * plan.layout.config.block_size)
    return room - 1


def _longest_first_piece(plan: MemoryPlan) -> int:
    """Tokens of the longest piece that a prompt within the plan begins with."""
    return min(plan.prefill_chunk, _prompt_room(plan))


def continuations(plan: MemoryPlan) -> list[tuple[int, int, int]]:
    """(start, tokens, padded length) of one piece for every program that continues a prompt.

    There is one for each padded length of what was read before and each of the two of the piece.
    """
    chunk, room = plan.prefill_chunk, _prompt_room(plan)
    found, seen = [], set()
    for start in range(chunk, room, chunk):
        more = min(chunk, room - start)
        for length in continuation_lengths(chunk, plan.layout):
            program = padded_length(start, plan.layout), length
            # The shortest piece that takes this length must exist.
            if program not in seen and piece_length(min(more, length), start, chunk, plan.layout) == length:
                seen.add(program)
                found.append((start, min(more, length), length))
    return found


def pieces_to_compile(plan: MemoryPlan) -> list[tuple[int, int]]:
    """(padded length of a piece, padded length of what was read before it) of every program that reads prompts."""
    first = [(length, 0) for length in padded_lengths(plan.layout, _longest_first_piece(plan))]
    return first + [(length, padded_length(start, plan.layout)) for start, _, length in continuations(plan)]


def warm_up_prompts(plan: MemoryPlan, *, sampling: bool, at_once: int) -> tuple[list[np.ndarray], list[SamplingParams]]:
    """Prompts whose reading and decoding needs everything that a request within the plan can need (docs/09).

    Reading has one program for each padded length of a whole prompt or of its first piece; decoding has one for rows
    that are all greedy and one for others, each for a step and for `at_once` of them. Pieces that continue a prompt are
    apart: `continuations`.
    """
    room = _prompt_room(plan)
    whole = _longest_first_piece(plan)
    # One token has the first length too, and leaves room for a step wherever there is any.
    lengths = [min(n, whole) if index else 1 for index, n in enumerate(padded_lengths(plan.layout, whole))]
    requests = [(n, min(2, room + 1 - n), 0.0) for n in lengths]  # tokens, new ones, temperature
    # After a prompt of one token and the first new one, so many steps can be needed; nowhere are more.
    together = [(1, at_once + 1, 0.0)] if requests and 1 < at_once < room else []
    requests += together
    if requests and sampling:
        requests += [(n, new, 1.0) for n, new, _ in (requests[0], *together)]
    prompts = [np.zeros(n, np.int32) for n, _, _ in requests]
    return prompts, [SamplingParams(max_new_tokens=new, temperature=heat) for _, new, heat in requests]
