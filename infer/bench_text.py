"""Real text for `nosa-bench`: as token ids, and read into the rows of a cache."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from nosa_jax.errors import InputError
from nosa_jax.ffi import HostPool
from nosa_jax.infer.bench_models import own_tokenizer
from nosa_jax.infer.cli_prompts import PromptReader
from nosa_jax.infer.frozen import FrozenModel
from nosa_jax.infer.plan import DEFAULT_PREFILL_CHUNK
from nosa_jax.infer.prefill import piece_length, prefill_row
from nosa_jax.infer.row_steps import start_row
from nosa_jax.infer.sampling import SamplingParams
from nosa_jax.offload.layout import CacheLayout
from nosa_jax.offload.state import DecodeState, init_state
from nosa_jax.tokenizer import Tokenizer, load_tokenizer


def read_texts(files: Sequence[str], model: str, own: Tokenizer | None, named: str | None) -> dict[str, np.ndarray]:
    """Whole files as token ids, by name.

    Args:
      files: what --prompt-file names.
      model: what --model names, for messages.
      own, named: the model's tokenizer, and what --tokenizer names in its place.

    Raises:
      InputError: there is no tokenizer, no file, or one that is missing, empty or no text; names it.
    """
    tokenizer = own if named is None else load_tokenizer(named)
    if tokenizer is None:
        raise InputError(
            f"{model!r} holds no tokenizer; name one with --tokenizer, the path of a tokenizer.json or bytes"
        )
    reader = PromptReader(tokenizer, SamplingParams())
    texts = {prompt.name: prompt.ids for prompt in reader.files(files)}
    if not texts:
        raise InputError("there is no text to continue; give --prompt-file FILE")
    return texts


def joined(texts: dict[str, np.ndarray], vocab_size: int) -> Int[np.ndarray, " n"]:
    """All texts one behind the other. Raises InputError where a model of so many ids does not know one of them."""
    for name, ids in texts.items():
        if ids.max() >= vocab_size:
            raise InputError(
                f"{name} holds token id {ids.max()}, and the model's ids are 0 .. {vocab_size - 1}; name the model's "
                "own tokenizer with --tokenizer"
            )
    return np.concatenate(list(texts.values())).astype(np.int32)


def whole_text(files: Sequence[str], model: str, named: str | None, vocab_size: int) -> Int[np.ndarray, " n"] | None:
    """All of --prompt-file as token ids; None without any, for random contents.

    Args:
      files, model, named: what --prompt-file, --model and --tokenizer name.

    Raises:
      InputError: a tokenizer without a text, or as for `read_texts` and `joined`.
    """
    if files:
        return joined(read_texts(files, model, own_tokenizer(model), named), vocab_size)
    if named is not None:
        raise InputError(f"--tokenizer {named!r} is for the text of --prompt-file; give that too")
    return None


def stretches(text: Int[np.ndarray, " n"], rows: int, length: int) -> Int[np.ndarray, "rows length"]:
    """A stretch of the text for each row, in turn; one that reaches the text's end goes on at its beginning.

    Where there is less text than they need together, they overlap, and begin as far from each other as they can.
    """
    first = np.arange(rows) * length if rows * length <= len(text) else np.arange(rows) * len(text) // rows
    return text[(first[:, None] + np.arange(length)) % len(text)]


def read_state(model: FrozenModel, layout: CacheLayout, pool: HostPool | None, text: np.ndarray) -> DecodeState:
    """A state whose rows have read a text each, through the engine's prefill and in its pieces.

    Args:
      layout: of the state. Every row may go on to its whole context.
      pool: the host pages; None where every block has a slot.
      text: [B, n] token ids.

    Raises:
      InputError: the pool has fewer pages than the rows need; names the bytes.
    """
    groups = layout.max_batch * layout.n_blocks
    if pool is not None and pool.n_pages < groups * layout.pages_per_block:
        raise InputError(
            f"{layout.max_batch} rows of {layout.max_context} tokens that hold a text need {host_bytes(layout):,} "
            f"bytes of host pages, and there are {pool.n_pages * layout.page_bytes:,}; raise --host-budget"
        )
    table = np.arange(groups, dtype=np.int32).reshape(layout.max_batch, -1)
    state = model.beside(init_state(layout, None if pool is None else pool.handle))
    for row, tokens in enumerate(text):
        state = start_row(state, row, table[row], layout.max_context, active=True)
        for start in range(0, len(tokens), DEFAULT_PREFILL_CHUNK):
            piece = tokens[start : start + DEFAULT_PREFILL_CHUNK]
            padded = piece_length(len(piece), start, DEFAULT_PREFILL_CHUNK, layout)
            state = prefill_row(model, state, row, piece, start, length=padded)
    return jax.block_until_ready(state)


def host_bytes(layout: CacheLayout) -> int:
    """Bytes of host pages that rows need when each has its own; 0 for a resident layout."""
    return layout.max_batch * layout.n_blocks * layout.pages_per_block * layout.page_bytes if layout.offload else 0
