"""Bytes and tokenizer.json to ids and back."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nosa_jax.errors import InputError
from nosa_jax.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer, tokenizer_from_dict


@given(st.binary(max_size=64))
def test_bytes_are_their_own_ids(data: bytes) -> None:
    ids = ByteTokenizer().encode(data, bos=True, eos=True)
    assert ids[0] == 256
    assert ids[-1] == 257
    assert bytes(ids[1:-1].astype(np.uint8)) == data


@given(st.text(max_size=64))
def test_text_survives_bytes(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text, bos=True)) == text.encode("utf-8", "replace").decode()


def test_broken_utf8_decodes_with_replacement_and_other_ids_give_nothing() -> None:
    assert ByteTokenizer().decode([104, 105, 0xFF, 258, 257, 300, -1]) == "hi\ufffd"


def test_truncation_and_padding_of_a_file_are_switched_off(json_file) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(json_file))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_id=3, pad_token="<pad>")
    loaded = JsonTokenizer(tokenizer.to_str())
    assert loaded.encode("hello world " * 10).tolist() == [4, 5] * 10
    assert loaded.encode("hello").tolist() == [4]
    assert tokenizer_from_dict(loaded.to_dict()).encode("hello world " * 10).tolist() == [4, 5] * 10


@pytest.fixture
def json_file(tmp_path):
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "hello": 4, "world": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_json_tokenizer_finds_its_special_tokens_and_survives_a_checkpoint(json_file) -> None:
    tokenizer = load_tokenizer(json_file.parent)
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (6, 1, 2, 3)
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    for each in (tokenizer, again):
        assert each.encode("hello world", bos=True, eos=True).tolist() == [1, 4, 5, 2]
        assert each.decode([1, 4, 5, 2]) == "hello world"
    assert again.to_dict() == tokenizer.to_dict()


def test_bytes_tokenizer_survives_a_checkpoint() -> None:
    assert tokenizer_from_dict(load_tokenizer("bytes").to_dict()).vocab_size == 259
    with pytest.raises(InputError, match="sentences"):
        tokenizer_from_dict({"kind": "sentences"})


def test_faults_of_a_tokenizer_file_name_the_file(tmp_path, json_file) -> None:
    with pytest.raises(InputError, match=r"missing\.json"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(InputError, match=r"broken\.json"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(InputError, match="<nope>"):
        JsonTokenizer.from_file(json_file, eos="<nope>")
    with pytest.raises(UnicodeDecodeError):
        load_tokenizer(json_file).encode(b"hello \xff")
