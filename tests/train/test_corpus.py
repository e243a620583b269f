"""Reading, splitting and refusing text."""

import json
import os

import numpy as np
import pytest
import tokenizers

from nosa_jax.errors import InputError
from nosa_jax.tokenizer import ByteTokenizer, load_tokenizer
from nosa_jax.train import Document, build_corpus, read_documents, split_documents


def test_standard_library_is_real_text_in_a_fixed_order() -> None:
    first = read_documents(["stdlib"], max_bytes=300_000)
    assert first == read_documents(["stdlib"], max_bytes=300_000)
    assert 250_000 < sum(len(d.data) for d in first) <= 300_000
    assert all(d.name.endswith(".py") and "/test/" not in d.name for d in first)


def test_folder_files_and_jsonl_together(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "b.md").write_text("second")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "image.bin").write_bytes(b"\0\1\2")
    (tmp_path / "empty.txt").write_text("")
    lines = [{"text": "third"}, {"text": "fourth \ud800"}]
    (tmp_path / "c.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    documents = read_documents([str(tmp_path), str(tmp_path / "a.txt")])  # a file named twice counts once
    assert sorted(d.data for d in documents) == [b"first", b"fourth \xed\xa0\x80", b"second", b"third"]
    assert {d.name for d in documents} >= {f"{tmp_path}/c.jsonl:1", f"{tmp_path}/c.jsonl:3"}


def test_non_utf8_is_fine_for_bytes_and_located_for_a_tokenizer(tmp_path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "plain.txt").write_bytes(b"tea and toast")
    corpus = build_corpus([str(tmp_path)], ByteTokenizer(), validation=0.5)
    assert 0xE9 in np.concatenate([corpus.train, corpus.validation])
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"tea": 0}, unk_token="tea"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"latin\.txt.*0xe9 at offset 3"):
        build_corpus([str(tmp_path / "latin.txt")], load_tokenizer(tmp_path), validation=0.5)


def test_split_keeps_copies_together_and_follows_content_not_names() -> None:
    texts = [f"text number {i}".encode() * 5 for i in range(200)]
    documents = [Document(f"d{i}", t) for i, t in enumerate(texts)] + [Document("copy", texts[0])]
    train, held_out = split_documents(documents, 0.1)
    assert len(train) + len(held_out) == 201
    assert not {d.data for d in train} & {d.data for d in held_out}
    assert 0.07 < sum(len(d.data) for d in held_out) / sum(len(d.data) for d in documents) <= 0.1
    renamed = [Document("x" + d.name, d.data) for d in documents]
    assert [d.data for d in split_documents(renamed, 0.1)[1]] == [d.data for d in held_out]
    one_each = split_documents(documents[:2], 0.001)
    assert [len(part) for part in one_each] == [1, 1]


def test_single_document_gives_its_tail_for_validation(tmp_path) -> None:
    (tmp_path / "only.txt").write_bytes(bytes(range(1, 201)))
    corpus = build_corpus([str(tmp_path)], ByteTokenizer(), validation=0.1)
    assert len(corpus.train) + len(corpus.validation) == 202
    assert len(corpus.validation) == 20
    assert corpus.validation[-1] == ByteTokenizer.eos_id


def test_fingerprint_follows_every_token(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("one text")
    (tmp_path / "b.txt").write_text("other text")
    before = build_corpus([str(tmp_path)], ByteTokenizer(), validation=0.2)
    assert before.fingerprint == build_corpus([str(tmp_path)], ByteTokenizer(), validation=0.2).fingerprint
    (tmp_path / "b.txt").write_text("other texT")
    assert before.fingerprint != build_corpus([str(tmp_path)], ByteTokenizer(), validation=0.2).fingerprint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"x\.jsonl:2 is not JSON"),
        ('{"body": "t"}', r"x\.jsonl:2 has no string under 'text'; it has 'body'"),
        ("[1]", r"x\.jsonl:2 .*a list, not an object"),
    ],
)
def test_faulty_jsonl_line_is_located(tmp_path, line, message) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(InputError, match=message):
        read_documents([str(tmp_path)])


def test_sources_without_text_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"nowhere.*does not exist"):
        read_documents([str(tmp_path / "nowhere")])
    with pytest.raises(InputError, match="holds no text"):
        read_documents([str(tmp_path)])
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(InputError, match="at least 2"):
        build_corpus([str(tmp_path)], ByteTokenizer(), validation=0.5)
    (tmp_path / "one.txt").write_text("long enough")
    with pytest.raises(InputError, match=r"max_bytes=3 is less"):
        read_documents([str(tmp_path)], max_bytes=3)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_named(tmp_path) -> None:
    (tmp_path / "secret.txt").write_text("text")
    (tmp_path / "secret.txt").chmod(0)
    with pytest.raises(InputError, match=r"secret\.txt.*Permission denied"):
        read_documents([str(tmp_path / "secret.txt")])
