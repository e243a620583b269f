"""The chunked loss against one written with float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.train import cross_entropy


def _case(length: int):
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(2, length, 8)).astype(np.float32)
    weight = (rng.normal(size=(8, 11)) * 3).astype(np.float32)
    targets = rng.integers(0, 11, (2, length))
    mask = rng.random((2, length)) < 0.7
    return hidden, weight, targets, mask  # NumPy


def _numpy_loss(hidden, weight, targets, mask) -> float:
    logits = hidden.astype(np.float64) @ weight.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(-np.take_along_axis(log_probs, targets[..., None], -1)[..., 0][mask].sum())


@pytest.mark.parametrize("max_logits", [1, 2 * 11 * 3, 2 * 11 * 13, 1 << 20])
@pytest.mark.parametrize("length", [1, 13])
def test_loss_and_gradients_do_not_depend_on_the_chunk(length: int, max_logits: int) -> None:
    hidden, weight, targets, mask = _case(length)

    def loss(hidden, weight, max_logits):
        return cross_entropy(hidden, jnp.asarray(targets), jnp.asarray(mask), lambda h: h @ weight, max_logits)

    (total, count), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        jnp.asarray(hidden), jnp.asarray(weight), max_logits
    )
    assert float(count) == mask.sum()
    np.testing.assert_allclose(float(total), _numpy_loss(hidden, weight, targets, mask), rtol=1e-5, atol=1e-5)
    whole = jax.grad(lambda h, w: loss(h, w, 1 << 20)[0], argnums=(0, 1))(jnp.asarray(hidden), jnp.asarray(weight))
    for got, want in zip(grads, whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_logits_of_the_whole_sequence_are_never_held() -> None:
    """Vocabulary 4096 at 1024 positions: 16 MiB of logits; the compiled gradient needs a small part of that."""
    length, vocab, max_logits = 1024, 4096, 64 * 4096
    weight = jax.ShapeDtypeStruct((16, vocab), jnp.float32)
    hidden = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
    targets = jnp.zeros((1, length), jnp.int32)

    def temporary_bytes(limit: int) -> int:
        def loss(hidden, weight):
            return cross_entropy(hidden, targets, targets == 0, lambda h: h @ weight, limit)[0]

        return jax.jit(jax.grad(loss, (0, 1))).lower(hidden, weight).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(max_logits) < 6 * max_logits * 4 < length * vocab * 4
    assert temporary_bytes(1 << 30) >= length * vocab * 4
