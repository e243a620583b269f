"""Prompts in, results out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nosa_jax.errors import InputError
from nosa_jax.infer.sampling import SamplingParams
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import StepCounts
from nosa_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Request:
    """A checked prompt with its parameters; `index` is its place in the caller's list."""

    index: int
    tokens: np.ndarray
    params: SamplingParams

    @property
    def reserved(self) -> int:
        """Tokens that the row must have room for."""
        return len(self.tokens) + self.params.max_new_tokens


@dataclass(frozen=True)
class GenerationResult:
    """What one prompt got.

    tokens: generated ids, a final end-of-sequence id included. text: their text, where the engine has a tokenizer, up
    to a stop string.
    finish_reason: "eos", "stop" for a stop string, "length" for max_new_tokens, "cancelled", or "timeout".
    hits, misses: selected blocks found in slots and fetched from the host while decoding. bytes_fetched: bytes of the
    latter. min_locality: the smallest share of selected blocks that the step before had selected too, over steps with
    a full budget (NaN if there was none).
    steps: counts of every decode step [steps, L, K], where the engine was asked to record them.
    """

    tokens: list[int]
    text: str | None
    finish_reason: str
    prompt_length: int
    hits: int
    misses: int
    bytes_fetched: int
    min_locality: float
    steps: StepCounts | None = None

    @property
    def hit_rate(self) -> float:
        """Hits over hits and misses; NaN if nothing was decoded."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else float("nan")


def check_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer | None, vocab_size: int) -> list[np.ndarray]:
    """Token ids of every prompt.

    Raises:
      InputError: a text without a tokenizer, an empty prompt, or ids outside the vocabulary; names which.
    """
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        raise InputError("prompts must be a list of prompts; put a single prompt into a list of one")
    checked = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InputError(
                    f"prompt {index} is text, but the engine has no tokenizer; pass token ids or tokenizer="
                )
            ids = tokenizer.encode(prompt)
        else:
            try:
                ids = np.asarray(prompt)
            except ValueError as error:  # lists of unequal lengths inside
                raise InputError(f"prompt {index} must be a flat list of integer ids: {error}") from error
            if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
                raise InputError(f"prompt {index} must be a flat list of integer ids, not {ids.dtype} {ids.shape}")
        if not ids.size:
            raise InputError(f"prompt {index} is empty; give at least one token (a beginning-of-sequence id will do)")
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise InputError(f"prompt {index} holds token id {wrong}; the model's ids are 0 .. {vocab_size - 1}")
        checked.append(ids.astype(np.int32))
    return checked


def make_requests(
    prompts: list[np.ndarray], params: SamplingParams | Sequence[SamplingParams], layout: CacheLayout
) -> list[Request]:
    """Pair prompts with parameters and check that each fits the plan.

    Raises:
      InputError: unequal numbers, an eos id outside the vocabulary, or a request longer than a row; names the sizes.
    """
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    for wrong in (p for p in each if not isinstance(p, SamplingParams)):
        raise InputError(f"{wrong!r} are no sampling parameters; give SamplingParams(max_new_tokens=...)")
    if len(each) != len(prompts):
        raise InputError(f"{len(prompts)} prompts but {len(each)} sampling parameters; give one, or one per prompt")
    requests = [Request(i, tokens, p) for i, (tokens, p) in enumerate(zip(prompts, each, strict=True))]
    room = layout.max_context
    for request in requests:
        spare = room - len(request.tokens)
        if request.reserved > room:
            raise InputError(
                f"prompt {request.index} has {len(request.tokens)} tokens and asks for up to "
                f"{request.params.max_new_tokens} more; the plan holds {room} per row. Shorten it, "
                + (f"ask for at most {spare} new tokens, " if spare > 0 else "")
                + "or plan with a larger max_context"
            )
        for eos in request.params.eos_ids:
            if not 0 <= eos < layout.config.vocab_size:
                raise InputError(f"eos id {eos} is outside the model's ids 0 .. {layout.config.vocab_size - 1}")
    return requests
