"""The contract of `implementation=`: a named one runs or says why not, None always works."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.pallas_kernels import (
    decode_attention,
    default_implementation,
    dense_attention,
    dispatch,
    pooled_scores,
    select_blocks,
    sparse_attention,
)

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
    "dense_attention": lambda name: dense_attention(X, X, X, implementation=name),
}


@pytest.mark.parametrize("operation", CALLS)
def test_none_and_every_available_name_run(operation):
    for name in (None, "xla") if operation == "dense_attention" else (None, "reference", "xla"):
        CALLS[operation](name)


@pytest.mark.parametrize("operation", CALLS)
def test_unavailable_names_say_why(operation):
    with pytest.raises(NotImplementedError, match=rf"{operation}.*'mosaic_gpu'.*(xla|CUDA|float32)"):
        CALLS[operation]("mosaic_gpu")


def test_unknown_names_are_refused():
    with pytest.raises((ValueError, TypeError), match="triton"):
        CALLS["select_blocks"]("triton")


def test_a_surrounding_default_counts_where_no_name_is_given():
    """Also for a function that was compiled before with another default."""
    traced = []

    @jax.jit
    def both(x):
        run = lambda name: dispatch.run(  # noqa: E731
            "op",
            name,
            (x,),
            xla=lambda x: traced.append("xla") or x,
            reference=lambda x: traced.append("reference") or x,
        )
        return run(None), run("xla")

    both(X)
    with default_implementation("reference"):
        both(X)
    both(X)
    assert traced == ["xla", "xla", "reference", "xla"]
    with pytest.raises((ValueError, TypeError), match="triton"), default_implementation("triton"):
        pass


@pytest.mark.parametrize(
    ("capability", "reason"), [("8.6", "the GPUs here have 8.6"), ("10.0", "the GPUs here have 10.0"), ("9.0", None)]
)
def test_gpus_without_wgmma_run_xla_and_say_so_once(capability, reason, monkeypatch, caplog):
    """Before sm_90 and after it: the XLA path works, one line of log names the operation and the reason."""
    monkeypatch.setattr(dispatch, "_gpus", lambda: (SimpleNamespace(compute_capability=capability),))
    operation = f"op for {capability}"

    def call(implementation):
        return dispatch.run(operation, implementation, (X,), xla=lambda x: x + 1, mosaic_gpu=lambda x: x + 2)

    for _ in range(3):
        np.testing.assert_array_equal(call(None), X + 1)  # this program is for the CPU in any case
    said = [record.getMessage() for record in caplog.records if operation in record.getMessage()]
    if reason is None:
        assert not said
        np.testing.assert_array_equal(call("mosaic_gpu"), X + 2)
    else:
        assert len(said) == 1
        assert said[0].startswith(f"{operation} runs through XLA on this GPU: ")
        assert reason in said[0]
        with pytest.raises(NotImplementedError, match=reason):
            call("mosaic_gpu")


def test_programs_for_another_platform_get_what_runs_there(monkeypatch):
    """J4: with a GPU in the machine, a program whose arrays are on the CPU takes the implementation of the CPU."""
    monkeypatch.setattr(dispatch, "why_no_kernels", lambda: None)

    @jax.jit
    def call(x):
        return dispatch.run("op", None, (x, None), xla=lambda x, _: x + 1, mosaic_gpu=lambda x, _: x + 2)

    assert call(jnp.zeros(())) == 1
    lowered = call.trace(jnp.zeros(())).lower(lowering_platforms=("cuda",)).as_text()
    assert "2.000" in lowered
    assert "1.000" not in lowered
