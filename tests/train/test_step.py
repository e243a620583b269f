"""One training step: gradients, frozen parts, accumulation, formats."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.checkpoint import abstract_model
from nosa_jax.config import NosaConfig
from nosa_jax.train import InputError, Optimizer, TrainState, loss_and_gradients, make_eval_step, make_train_step
from nosa_jax.train.optimizer import decay_mask, learning_rate, make_optimizer, trainable_names
from nosa_jax.train.sharding import make_mesh
from nosa_jax.train.step import init_state

STEPS = 200
ADAM = Optimizer(learning_rate=1e-2, warmup_steps=0)


def _batch(
    config: NosaConfig, batch: int, length: int, seed: int = 0, targets: dict[int, slice] | None = None
) -> dict[str, jax.Array]:
    """Random windows; `targets` restricts rows' targets to a slice of their positions."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (batch, length + 1)).astype(np.int32)
    mask = np.ones((batch, length), bool)
    for row, kept in (targets or {}).items():
        mask[row] = False
        mask[row, kept] = True
    return {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}


def _make(config: NosaConfig, optimizer: Optimizer = ADAM, train_only=(), freeze=()):
    skeleton, _ = abstract_model(config)
    trainable = trainable_names(skeleton.names, train_only, freeze)
    transformation = make_optimizer(optimizer, STEPS)
    mesh = make_mesh(jax.devices()[:1])
    state = init_state(config, transformation, trainable, seed=1, mesh=mesh)
    step = functools.partial(
        make_train_step, skeleton, transformation, learning_rate(optimizer, STEPS), mesh=mesh,
        accumulate=optimizer.accumulate,
    )  # fmt: skip
    return skeleton, state, step


def _gradients(skeleton, attention="nosa", **settings):
    return jax.jit(functools.partial(loss_and_gradients, skeleton, attention=attention, **settings))


def _copy(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow")
def test_step_tells_whether_what_it_made_is_finite(small) -> None:
    """Broken weights, gradients or moments each; the loss before the update may be finite all the same."""
    _, state, step = _make(small)
    batch = _batch(small, 2, 24)
    healthy, metrics = step("dense")(_copy(state), batch)
    assert metrics["finite"]
    moments = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.inf) if x.ndim else x, healthy.opt_state)
    _, metrics = step("dense")(replace(healthy, opt_state=moments), batch)
    assert np.isfinite(float(metrics["loss"]))
    assert np.isfinite(float(metrics["grad_norm"]))
    assert not metrics["finite"]
    _, state, step = _make(small, Optimizer(learning_rate=1e39, warmup_steps=0))
    _, metrics = step("dense")(state, batch)
    assert np.isfinite(float(metrics["loss"]))
    assert not metrics["finite"]


def test_s4_every_parameter_learns_from_the_second_step_on(small) -> None:
    """`A` starts at 0, so `delta` gets its first gradient after `A` has moved."""
    skeleton, state, step = _make(small)
    batch = _batch(small, 2, 96)
    gradients = _gradients(skeleton)
    first = {name: float(jnp.linalg.norm(g)) for name, g in gradients(state, batch)[1].items()}
    assert {name for name, norm in first.items() if norm == 0} == {n for n in first if "delta" in n}
    before = {name: np.asarray(value) for name, value in state.params.items()}
    state, metrics = step("nosa")(state, batch)
    assert np.isfinite(float(metrics["grad_norm"]))
    second = gradients(state, batch)[1]
    assert all(float(jnp.linalg.norm(g)) > 0 for g in second.values())
    moved = {name for name, value in state.params.items() if not np.array_equal(value, before[name])}
    assert moved == {name for name in before if "delta" not in name}


def test_s4_frozen_parameters_stay_bit_identical(small) -> None:
    _, state, step = _make(small, train_only=("*.delta_*", "*.a_k"))
    assert state.params
    assert all("delta" in name or name.endswith(".a_k") for name in state.params)
    frozen = {name: np.asarray(value).copy() for name, value in state.frozen.items()}
    trained = {name: np.asarray(value).copy() for name, value in state.params.items()}
    advance = step("nosa")
    for seed in range(3):
        state, _ = advance(state, _batch(small, 2, 96, seed))
    for name, value in state.frozen.items():
        assert np.asarray(value).tobytes() == frozen[name].tobytes(), name
    assert all(not np.array_equal(value, trained[name]) for name, value in state.params.items())


def test_accumulated_microbatches_equal_one_batch(small) -> None:
    """Also where padding makes the microbatches' numbers of targets unequal."""
    batch = _batch(small, 4, 40, targets={0: slice(5), 3: slice(30)})
    skeleton, state, _ = _make(small)
    losses, gradients = zip(*(_gradients(skeleton, accumulate=n)(state, batch) for n in (1, 2, 4)), strict=True)
    np.testing.assert_allclose(losses[1:], losses[0], rtol=1e-6)
    for name, want in gradients[0].items():
        for got in (gradients[1][name], gradients[2][name]):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6, err_msg=name)


def test_masked_targets_change_nothing(small) -> None:
    skeleton, state, _ = _make(small)
    batch = _batch(small, 2, 40, targets={0: slice(20), 1: slice(20)})
    short = {"tokens": batch["tokens"][:, :21], "mask": batch["mask"][:, :20]}
    loss = _gradients(skeleton, attention="dense")
    np.testing.assert_allclose(loss(state, batch)[0], loss(state, short)[0], rtol=1e-6)


@pytest.mark.slow
def test_remat_changes_memory_not_results(small) -> None:
    skeleton, state, _ = _make(small)
    batch = _batch(small, 2, 64)
    plain = _gradients(skeleton)(state, batch)
    again = _gradients(skeleton, remat=True)(state, batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), plain, again)


def test_bf16_compute_keeps_float32_master_weights(small) -> None:
    config = small.replace(dtype="bfloat16")
    _, state, step = _make(config)
    assert {v.dtype for v in state.params.values()} == {jnp.dtype("float32")}
    losses = []
    advance = step("nosa")
    batch = _batch(config, 2, 48)
    for _ in range(8):
        state, metrics = advance(state, batch)
        losses.append(float(metrics["loss"]))
    assert {v.dtype for v in state.params.values()} == {jnp.dtype("float32")}
    assert losses[-1] < losses[0] - 0.3


def test_old_state_is_donated(small) -> None:
    _, state, step = _make(small)
    old = state
    state, _ = step("dense")(state, _batch(small, 2, 16))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.params, old.opt_state)))


def test_gradients_are_clipped_before_the_update(small) -> None:
    """With a clipping norm far below Adam's epsilon the first update all but vanishes; the metric is the raw norm."""
    tiny_norm = Optimizer(learning_rate=1e-2, warmup_steps=0, clip_norm=1e-12, weight_decay=0.0)
    _, state, step = _make(small, tiny_norm)
    before = _copy(state).params
    state, metrics = step("dense")(state, _batch(small, 2, 16))
    assert float(metrics["grad_norm"]) > 1e-3
    for name, value in state.params.items():
        np.testing.assert_allclose(value, before[name], atol=1e-5)


def test_schedule_warms_up_and_ends_at_its_ratio() -> None:
    rate = learning_rate(Optimizer(learning_rate=1.0, warmup_steps=4, final_ratio=0.1), 20)
    assert [float(rate(i)) for i in (0, 4, 20)] == pytest.approx([0.25, 1.0, 0.1])
    assert all(float(rate(i)) > float(rate(i + 1)) for i in range(4, 19))
    assert float(learning_rate(Optimizer(warmup_steps=9), 1)(0)) > 0


def test_only_matrices_outside_the_eviction_head_decay(small) -> None:
    mask = decay_mask(abstract_model(small)[1])
    assert any(mask.values())
    for name, decays in mask.items():
        assert decays != any(part in name for part in ("norm", "delta", "a_k")), name


def test_patterns_that_match_nothing_are_refused() -> None:
    names = ["embed", "layers.0.delta"]
    assert trainable_names(names, (), ("embed",)) == {"layers.0.delta"}
    with pytest.raises(InputError, match=r"'\*\.gamma' matches no parameter; the names are embed, layers\.0\.delta"):
        trainable_names(names, ("*.gamma",), ())
    with pytest.raises(InputError, match="leave no parameter"):
        trainable_names(names, ("embed",), ("emb*",))


def test_perplexity_equals_a_direct_computation(small) -> None:
    skeleton, state, _ = _make(small)
    batch = _batch(small, 3, 50, targets={1: slice(10)})
    total, count = make_eval_step(skeleton, "nosa")(state.all_params, batch)
    forward = jax.jit(lambda params, tokens: skeleton.merge(params)(tokens, attention="nosa"))
    logits = np.asarray(forward(state.all_params, batch["tokens"][:, :-1]), np.float64)
    log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_probs -= logits.max(-1, keepdims=True)
    picked = np.take_along_axis(log_probs, np.asarray(batch["tokens"])[:, 1:, None], -1)[..., 0]
    want = np.exp(-picked[np.asarray(batch["mask"])].mean())
    assert float(np.exp(float(total) / float(count))) == pytest.approx(want, rel=1e-4)


@pytest.mark.slow
def test_s2_200_steps_of_random_lengths_stay_finite() -> None:
    """Sequence 507, 8 query heads, 2 KV heads, 2 selected blocks; targets end at a random length every step."""
    config = NosaConfig.tiny(
        num_layers=1, embed_dim=64, ffn_dim=64, num_heads=8, num_kv_heads=2, head_dim=8, block_size=16,
        pool_window=8, pool_stride=4, sink_blocks=0, local_blocks=2, query_blocks=0, evict_blocks=0,
    )  # fmt: skip
    assert config.budget.total == 2
    _, state, step = _make(config)
    advance = step("nosa")
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(STEPS):
        batch = _batch(config, 1, 507, int(rng.integers(4)), {0: slice(rng.integers(1, 508))})
        state, metrics = advance(state, batch)
        losses.append(float(metrics["loss"]))
        assert np.isfinite(losses[-1])
        assert np.isfinite(float(metrics["grad_norm"]))
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 1.0
    assert all(bool(jnp.isfinite(v).all()) for v in state.params.values())
