"""Saving and restoring: exact, complete, never silently converted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax.checkpoint import abstract_model, make_meta, split_model
from nosa_jax.tokenizer import ByteTokenizer
from nosa_jax.train import CheckpointStore, InputError, Optimizer, export_model, load_model, make_train_step
from nosa_jax.train.checkpoints import abstract_like
from nosa_jax.train.optimizer import learning_rate, make_optimizer
from nosa_jax.train.sharding import make_mesh
from nosa_jax.train.step import init_state


@pytest.fixture(scope="module")
def parts(small):
    skeleton, _ = abstract_model(small)
    optimizer = make_optimizer(Optimizer(), 100)
    mesh = make_mesh(jax.devices()[:1])
    step = make_train_step(skeleton, optimizer, learning_rate(Optimizer(), 100), "dense", mesh)
    return lambda: init_state(small, optimizer, frozenset(skeleton.names), seed=3, mesh=mesh), step


@pytest.fixture
def batch(small):
    tokens = np.random.default_rng(0).integers(0, small.vocab_size, (2, 17)).astype(np.int32)
    return {"tokens": tokens, "mask": np.ones((2, 16), bool)}


def _bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_c2_round_trip_of_everything_is_bit_exact(tmp_path, small, parts, batch) -> None:
    make, step = parts
    state, _ = step(make(), batch)
    meta = make_meta(small, ByteTokenizer(), data={"phase": 0, "iterator": {"next_index": 3}})
    with CheckpointStore(tmp_path) as store:
        store.save(state, meta)
    with CheckpointStore(tmp_path) as store:
        assert store.latest == 1
        again, read = store.restore(abstract_like(state))
    assert read == meta
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert _bits(again) == _bits(state)
    np.testing.assert_array_equal(again.key, jax.random.key_data(jax.random.key(3)))
    following, expected = step(again, batch), step(state, batch)
    assert _bits(following) == _bits(expected)


def test_c2_another_dtype_is_refused_or_converted_explicitly(tmp_path, small, parts) -> None:
    state = parts[0]()
    with CheckpointStore(tmp_path) as store:
        store.save(state, make_meta(small, None))
        store.wait()
        halved = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype), state
        )
        with pytest.raises(InputError, match=r"float32\[.*wanted bfloat16"):
            store.restore(halved)
    model, _, _ = load_model(tmp_path, dtype="bfloat16")
    _, params = split_model(model)
    assert model.config.param_dtype == model.config.dtype == "bfloat16"
    assert jnp.dtype("bfloat16") in {p.dtype for p in params.values()}
    for name, value in params.items():
        np.testing.assert_array_equal(value, state.params[name].astype(value.dtype))


def test_c3_save_followed_at_once_by_donating_steps(tmp_path, small, parts, batch) -> None:
    make, step = parts
    state = make()
    wanted = {}
    with CheckpointStore(tmp_path, keep=3) as store:
        for _ in range(3):
            state, _ = step(state, batch)
            wanted[int(state.step)] = _bits(state)
            store.save(state, make_meta(small, None))
            for _ in range(5):
                state, _ = step(state, batch)
        store.wait()
        assert store.steps == [1, 7, 13]
        for number, bits in wanted.items():
            assert _bits(store.restore(abstract_like(state), number)[0]) == bits


def test_only_the_latest_steps_are_kept(tmp_path, small, parts, batch) -> None:
    make, step = parts
    state = make()
    with CheckpointStore(tmp_path, keep=2) as store:
        for _ in range(4):
            state, _ = step(state, batch)
            store.save(state, make_meta(small, None))
    with CheckpointStore(tmp_path, keep=2) as store:
        assert store.steps == [3, 4]


def test_model_alone_is_loaded_from_a_run_a_step_or_an_export(tmp_path, small, parts, batch) -> None:
    """C1, second half: parameters restore without the optimizer's state."""
    make, step = parts
    state = make()
    with CheckpointStore(tmp_path / "run" / "checkpoints", keep=5) as store:
        for _ in range(2):
            state, _ = step(state, batch)
            store.save(state, make_meta(small, ByteTokenizer(), note="hello"))
    model, tokenizer, meta = load_model(tmp_path / "run")
    assert isinstance(tokenizer, ByteTokenizer)
    assert meta["note"] == "hello"
    assert model.config == small
    assert _bits(split_model(model)[1]) == _bits(state.params)
    export_model(tmp_path / "export", model, tokenizer, {"step": 2})
    exported, _, meta = load_model(tmp_path / "export")
    assert meta["metadata"] == {"step": 2}
    assert not (tmp_path / "export" / "training").exists()
    tokens = jnp.asarray(batch["tokens"])
    np.testing.assert_array_equal(exported(tokens), model(tokens))
    first, _, _ = load_model(tmp_path / "run", step=1)
    from_folder, _, _ = load_model(tmp_path / "run" / "checkpoints" / "1")
    assert _bits(split_model(first)[1]) == _bits(split_model(from_folder)[1]) != _bits(state.params)


def test_errors_name_what_is_there_and_what_is_wanted(tmp_path, small, parts) -> None:
    model = abstract_model(small)[0].merge(parts[0]().params)
    export_model(tmp_path / "export", model)
    with pytest.raises(InputError, match=r"num_layers is 1, wanted 2; num_heads is 2, wanted 4"):
        load_model(tmp_path / "export", config=small.replace(num_layers=2, num_heads=4))
    with pytest.raises(InputError, match="already exists"):
        export_model(tmp_path / "export", model)
    with pytest.raises(InputError, match="no checkpoint folder"):
        load_model(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no complete checkpoint"):
        load_model(tmp_path / "empty")
    with CheckpointStore(tmp_path / "run") as store:
        store.save(parts[0](), make_meta(small, None))
    with pytest.raises(InputError, match=r"no checkpoint of step=7; it has 0"):
        load_model(tmp_path / "run", step=7)


def test_damaged_step_is_refused_by_name(tmp_path, small, parts) -> None:
    state = parts[0]()
    with CheckpointStore(tmp_path) as store:
        store.save(state, make_meta(small, None))
    for path in (tmp_path / "0" / "training").glob("**/d/*"):
        path.write_bytes(b"")
    with CheckpointStore(tmp_path) as store, pytest.raises(InputError, match=r"step 0 in .* cannot be read"):
        store.restore(abstract_like(state))
    (tmp_path / "0" / "meta" / "data.json").write_text("{")
    with CheckpointStore(tmp_path) as store, pytest.raises(InputError, match=r"'meta' of .*/0' cannot be read"):
        store.read_meta()
