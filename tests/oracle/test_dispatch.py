"""The contract of `implementation=`: a named one runs or says why not, None always works."""

import jax.numpy as jnp
import pytest

from nosa_jax.pallas_kernels import decode_attention, pooled_scores, select_blocks, sparse_attention

X, POSITIONS = jnp.ones((1, 4, 1, 2)), jnp.arange(4)[None]
SCORES, IDS = jnp.zeros((1, 4, 1, 2)), jnp.zeros((1, 4, 1, 1), int)
CALLS = {
    "pooled_scores": lambda name: pooled_scores(
        X, X.swapaxes(1, 2), POSITIONS, n_blocks=2, block_size=2, window=1, stride=1, implementation=name
    ),
    "select_blocks": lambda name: select_blocks(
        SCORES, SCORES, POSITIONS, block_size=2, sink=0, local=1, query=1, evict=0, implementation=name
    ),
    "sparse_attention": lambda name: sparse_attention(X, X, X, None, IDS, POSITIONS, block_size=2, implementation=name),
    "decode_attention": lambda name: decode_attention(
        X[:, 0], jnp.ones((1, 1, 3, 2, 2, 2)), None, IDS[:, 0], IDS[:, 0], jnp.array([2]), implementation=name
    ),
}


@pytest.mark.parametrize("operation", CALLS)
def test_none_and_every_available_name_run(operation):
    for name in (None, "reference", "xla"):
        CALLS[operation](name)


@pytest.mark.parametrize("operation", CALLS)
def test_unavailable_names_say_what_is_available(operation):
    with pytest.raises(NotImplementedError, match=rf"{operation} has no 'mosaic_gpu'.*reference, xla"):
        CALLS[operation]("mosaic_gpu")


def test_unknown_names_are_refused():
    with pytest.raises((ValueError, TypeError), match="triton"):
        CALLS["select_blocks"]("triton")
