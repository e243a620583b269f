"""Tensors of a checkpoint into parameters: checked by their headers first, then read one at a time.

Host memory above the parameters themselves is at most one tensor in its new dtype and 32 MiB of its file, whatever
the checkpoint's size. Threads share the copying into the parameter's layout, which for a matrix is a
transposition.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from nosa_jax.checkpoint import Params, Placement
from nosa_jax.config import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.weights.files import DTYPES, StoredTensor, opened, row_slices
from nosa_jax.weights.names import Tensor, checkpoint_tensors, has_eviction_head, is_computed, tied_head

_THREADS = min(8, os.cpu_count() or 1)  # transposing is bound by memory: more add nothing
_ALIGNMENT = 64  # of host buffers that JAX on a CPU takes over without a copy


def require_tensors(config: NosaConfig, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The tensors to read, by name. A checkpoint without any `delta` and `A` has none of them to read.

    Raises:
      InputError: a tensor is missing, is one too many, or has another shape or dtype than the config says; names it.
    """
    wanted = checkpoint_tensors(config, eviction_head=has_eviction_head(stored))
    spare = tied_head(config)
    extra = [n for n in stored if n not in wanted and not is_computed(n) and not (spare and n == spare.name)]
    if missing := [n for n in wanted if n not in stored]:
        if len(missing) == len(wanted):
            other = f"but for example {extra[0]!r} is" if extra else "nor is any other"
            raise InputError(
                f"these are weights of another architecture: none of {len(wanted)} expected tensors is there, {other}. "
                "Give a checkpoint of NOSA, Llama or MiniCPM."
            )
        why = (
            " The config has tie_word_embeddings=false, so it cannot be the embedding."
            if missing == ["lm_head.weight"]
            else ""
        )
        raise InputError(
            f"the tensor {missing[0]!r} is missing ({len(missing)} in all).{why} Copy the whole checkpoint; nothing is "
            "made up for it."
        )
    if extra:
        raise InputError(
            f"the tensor {extra[0]!r} is in the files but not in this model ({len(extra)} in all), so the checkpoint "
            "is of another architecture or config.json is not its own."
        )
    for tensor in (*wanted.values(), *([spare] if spare and spare.name in stored else [])):
        have = stored[tensor.name]
        if have.dtype not in DTYPES:
            raise InputError(
                f"the tensor {tensor.name!r} has dtype {have.dtype}; {', '.join(DTYPES)} can be read. Give a "
                "checkpoint that is not quantised."
            )
        if have.shape != tensor.shape:
            raise InputError(
                f"the tensor {tensor.name!r} has shape {list(have.shape)}, but config.json makes it "
                f"{list(tensor.shape)} ({_sizes(config)}). The file or the config is of another model."
            )
    return wanted


def common_dtype(tensors: Iterable[Tensor], stored: Mapping[str, StoredTensor]) -> str:
    """The dtype that most bytes of these tensors have."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        have = stored[tensor.name]
        sizes[have.dtype] = sizes.get(have.dtype, 0) + have.nbytes
    return DTYPES[max(sizes, key=lambda d: sizes[d])].name


def read_parameters(
    tensors: Iterable[Tensor],
    stored: Mapping[str, StoredTensor],
    *,
    place: Placement,
    dtype: np.dtype | None = None,
) -> Params:
    """The parameters that these tensors become, each in its sharding.

    dtype: None keeps what each file holds.
    Raises InputError where a file turns out to be damaged.
    """
    params: Params = {}
    for tensor in sorted(tensors, key=lambda t: stored[t.name].file):
        have = stored[tensor.name]
        kind = DTYPES[have.dtype] if dtype is None else dtype
        staged = _staged(tensor, have, kind)
        sharding = place(tensor.parameter, tensor.parameter_shape)
        params[tensor.parameter] = jax.block_until_ready(
            jax.make_array_from_callback(tensor.parameter_shape, sharding, staged.__getitem__)
        )
    return params


def require_same_tensor(first: Tensor, second: Tensor, stored: Mapping[str, StoredTensor]) -> None:
    """Raise InputError where two stored tensors of one shape differ anywhere; compared piece by piece."""
    one, two = stored[first.name], stored[second.name]
    for pieces in row_slices(one.shape, DTYPES[one.dtype].itemsize):
        with opened(one.file) as a, opened(two.file) as b:
            x, y = a.get_slice(first.name), b.get_slice(second.name)
            same = all(np.array_equal(x[rows], y[rows]) for rows in pieces)
        if not same:
            raise InputError(
                f"{second.name!r} differs from {first.name!r}, but the config has tie_word_embeddings=true, which "
                "would drop it. Set tie_word_embeddings to false in config.json if the model has its own output matrix."
            )


def _staged(tensor: Tensor, have: StoredTensor, dtype: np.dtype) -> np.ndarray:
    """A tensor in the parameter's layout and dtype, in a buffer of its own."""
    size = int(np.prod(have.shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    flat = raw[start : start + size].view(dtype)
    as_stored = flat.reshape(have.shape[::-1]).T if tensor.transposed else flat.reshape(have.shape)
    with ThreadPoolExecutor(_THREADS) as pool:
        for pieces in row_slices(have.shape, DTYPES[have.dtype].itemsize):
            with opened(have.file) as handle:
                view = handle.get_slice(tensor.name)

                def copy(rows: slice, view: Any = view) -> None:
                    as_stored[rows] = view[rows]

                list(pool.map(copy, pieces))
    return flat.reshape(tensor.parameter_shape)


def _sizes(config: NosaConfig) -> str:
    return (
        f"hidden_size={config.embed_dim}, intermediate_size={config.ffn_dim}, num_attention_heads={config.num_heads}, "
        f"num_key_value_heads={config.num_kv_heads}, head_dim={config.head_dim}, vocab_size={config.vocab_size}"
    )
