"""Caches of `nosa-bench throughput` that hold real text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nosa_jax import NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.ffi import HostPool
from nosa_jax.infer import Engine
from nosa_jax.infer.bench_text import host_bytes, joined, read_state, read_texts, stretches
from nosa_jax.infer.decode import decode_step
from nosa_jax.infer.random_contents import filled_state, random_model
from nosa_jax.infer.systems import SYSTEMS
from nosa_jax.tokenizer import ByteTokenizer

CONFIG = NosaConfig.tiny(num_layers=2, embed_dim=32, ffn_dim=32, num_heads=2, num_kv_heads=2, head_dim=16)


def test_every_row_gets_a_stretch_of_its_own():
    """One behind the other where the text suffices; else spread over it, going on at its beginning."""
    text = np.arange(10, dtype=np.int32)
    assert stretches(text, 2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stretches(text, 2, 8).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [5, 6, 7, 8, 9, 0, 1, 2]]
    assert stretches(text, 2, 10)[1].tolist() == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]  # not the first row's again
    assert stretches(text[:1], 2, 3).tolist() == [[0, 0, 0]] * 2
    assert stretches(text, 1, 23)[0].tolist() == [i % 10 for i in range(23)]


def test_texts_are_read_one_behind_the_other(tmp_path):
    (tmp_path / "a").write_bytes(b"xy")
    (tmp_path / "b").write_bytes(b"z")
    texts = read_texts([str(tmp_path / "a"), str(tmp_path / "b")], "m", ByteTokenizer(), None)
    assert joined(texts, 259).tolist() == [256, *b"xy", 256, *b"z"]
    with pytest.raises(InputError, match=r"/a' holds token id 256, and the model's ids are 0 \.\. 255; .* --tokenizer"):
        joined(texts, 256)


@pytest.mark.parametrize(
    ("files", "named", "message"),
    [
        (["none"], None, r"'none': No such file or directory\. Give a readable file"),
        (["empty"], None, r"'empty' is empty; give at least one character"),
        ([], None, r"there is no text to continue; give --prompt-file"),
    ],
)
def test_what_holds_no_text_is_refused_by_name(monkeypatch, tmp_path, files, named, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match=message):
        read_texts(files, "m", ByteTokenizer(), named)


def test_a_model_without_a_tokenizer_needs_one(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(InputError, match=r"'nosa_8b' holds no tokenizer; name one with --tokenizer"):
        read_texts([str(tmp_path / "a")], "nosa_8b", None, None)
    assert joined(read_texts([str(tmp_path / "a")], "nosa_8b", None, "bytes"), 300).tolist() == [256, *b"x"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nosa", "nosa-resident", "dense"])
def test_rows_go_on_as_an_engine_that_read_their_text(name):
    """Bit for bit, in more than one piece, over pages that others had written before."""
    model, text = random_model(CONFIG), np.random.default_rng(0).integers(0, 256, 5000, dtype=np.int32)
    layout = SYSTEMS[name].layout(CONFIG, 2, 2300)
    pool = HostPool(2 * layout.n_blocks * layout.pages_per_block, layout.page_bytes) if layout.offload else None
    rows = stretches(text, 2, 2250)
    if pool is not None:
        jax.block_until_ready(read_state(model, layout, pool, rows[::-1]))
    ours = read_state(model, layout, pool, rows)
    assert jax.tree.structure(ours) == jax.tree.structure(filled_state(layout, pool, 2250))
    with Engine(
        model, max_batch=2, max_context=2300, attention=layout.attention, offload=layout.offload, slots=layout.slots,
        overlap=False,
    ) as engine:  # fmt: skip
        theirs = engine.prefill(list(rows))
        assert jnp.array_equal(ours.logits, theirs.logits)
        for _ in range(20):
            _, ours = decode_step(model, ours, ours.logits.argmax(-1).astype(jnp.int32))
            _, theirs = decode_step(model, theirs, theirs.logits.argmax(-1).astype(jnp.int32))
        assert jnp.array_equal(ours.logits, theirs.logits)
        assert np.array_equal(ours.stats().total.misses, theirs.stats().total.misses)
        assert (ours.lengths == 2270).all()
    if pool is not None:
        pool.close()


def test_too_few_pages_for_every_row_are_refused():
    """Rows share pages of random contents; a text's are its own."""
    layout = SYSTEMS["nosa"].layout(CONFIG, 2, 512)
    with HostPool(layout.n_blocks * layout.pages_per_block, layout.page_bytes) as pool:
        message = rf"need {host_bytes(layout):,} bytes of host pages, and there are {host_bytes(layout) // 2:,}; raise"
        with pytest.raises(InputError, match=message):
            read_state(random_model(CONFIG), layout, pool, np.zeros((2, 10), np.int32))
    assert host_bytes(SYSTEMS["nosa-resident"].layout(CONFIG, 2, 512)) == 0
