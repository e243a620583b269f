"""Text from files, folders, JSONL and the Python standard library, split into training and held-out tokens."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nosa_jax.errors import InputError
from nosa_jax.tokenizer import Tokenizer

STDLIB = "stdlib"
_SKIPPED_DIRS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
_SKIPPED_STDLIB = {"test", "tests", "idle_test"}
_SNIFFED_BYTES = 8192
_FULL = 0.95  # of max_bytes: from here on no more files are opened


@dataclass(frozen=True)
class Document:
    """One text. `name` is what error messages call it: a path, with the line number for JSONL."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Corpus:
    """Token streams, documents framed by bos and eos. `fingerprint` changes whenever a token does."""

    train: np.ndarray  # [tokens], the smallest unsigned type that holds the vocabulary
    validation: np.ndarray
    documents: int
    num_bytes: int
    fingerprint: str


def build_corpus(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    *,
    validation: float,
    text_field: str = "text",
    max_bytes: int | None = None,
) -> Corpus:
    """Read, split and tokenize. Raises InputError where a source cannot be read or holds no text."""
    documents = read_documents(sources, text_field=text_field, max_bytes=max_bytes)
    train, held_out = split_documents(documents, validation)
    streams = [_tokens(part, tokenizer) for part in (train, held_out)]
    if not held_out:  # one document: hold out its tail
        cut = len(streams[0]) - max(2, int(len(streams[0]) * validation))
        streams = [streams[0][: max(cut, 0)], streams[0][max(cut, 0) :]]
    if len(streams[0]) < 2 or len(streams[1]) < 2:
        raise InputError(
            f"data={' '.join(sources)!r} gives {len(streams[0])} training and {len(streams[1])} validation tokens; "
            "each needs at least 2. Give more text."
        )
    digest = hashlib.sha256()
    for stream in streams:
        digest.update(stream.astype("<u4").tobytes())
        digest.update(b"/")
    size = sum(len(d.data) for d in documents)
    return Corpus(streams[0], streams[1], len(documents), size, digest.hexdigest())


def read_documents(sources: Sequence[str], *, text_field: str = "text", max_bytes: int | None = None) -> list[Document]:
    """Every document of the sources, in an order that depends on nothing but the files' names.

    The order is that of a hash of the names, so that a cap of `max_bytes` keeps an even sample of whole documents.
    """
    files: dict[Path, str] = {}
    for source in sources:
        for path, label in _stdlib_files() if source == STDLIB else _source_files(source):
            files.setdefault(path.resolve(), label)
    ordered = sorted(files.items(), key=lambda item: (hashlib.sha256(item[1].encode()).digest(), item[1]))
    documents: list[Document] = []
    size = too_long = 0
    for path, label in ordered:
        for document in _documents(path, label, text_field):
            if max_bytes is not None and size + len(document.data) > max_bytes:
                too_long += 1
                continue
            documents.append(document)
            size += len(document.data)
        if max_bytes is not None and size > _FULL * max_bytes:
            break
    if not documents and too_long:
        raise InputError(
            f"{max_bytes=} is less than the shortest of the {too_long} documents in data={' '.join(sources)!r}. "
            "Raise it or leave it out."
        )
    if not documents:
        raise InputError(f"data={' '.join(sources)!r} holds no text: every file is empty or binary. Give other paths.")
    return documents


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, held out): held out are the documents with the lowest content hashes, up to `fraction` of the bytes.

    Copies of a document never stand on both sides. Where there are two different documents or more, each side gets
    at least one; otherwise nothing is held out here.
    """
    sizes: dict[bytes, int] = {}  # by hash
    hashes = [hashlib.sha256(d.data).digest() for d in documents]
    for document, digest in zip(documents, hashes, strict=True):
        sizes[digest] = sizes.get(digest, 0) + len(document.data)
    wanted = fraction * sum(sizes.values())
    held_out: set[bytes] = set()
    taken = 0
    for digest in sorted(sizes)[:-1]:
        if not held_out or taken + sizes[digest] <= wanted:  # what would be too much is passed over
            held_out.add(digest)
            taken += sizes[digest]
    split = list(zip(documents, hashes, strict=True))
    return [d for d, h in split if h not in held_out], [d for d, h in split if h in held_out]


def _tokens(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray:
    parts = []
    for document in documents:
        try:
            parts.append(tokenizer.encode(document.data, bos=True, eos=True))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{document.name!r} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}. "
                "Convert or leave out the file, or train on bytes (tokenizer='bytes'), which takes any file."
            ) from error
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def _stdlib_files() -> Iterator[tuple[Path, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = False
    for path in _walk(root, _SKIPPED_STDLIB):
        if path.suffix == ".py":
            found = True
            yield path, f"{STDLIB}/{path.relative_to(root).as_posix()}"
    if not found:
        raise InputError(f"the standard library has no source files in {str(root)!r}. Give --data a folder of text.")


def _source_files(source: str) -> Iterator[tuple[Path, str]]:
    path = Path(source)
    if path.is_file():
        yield path, path.name
    elif path.is_dir():
        inside = [p for p in _walk(path, set()) if p.suffix == ".jsonl" or _looks_like_text(p)]
        if not inside:
            raise InputError(
                f"the folder {source!r} holds no text: every file in it is empty or binary, or there is none. "
                "Give a folder with text files or *.jsonl, or 'stdlib'."
            )
        for p in inside:
            yield p, p.relative_to(path).as_posix()
    else:
        raise InputError(f"data path {source!r} does not exist. Give a file, a folder, *.jsonl or {STDLIB!r}.")


def _walk(root: Path, skipped: set[str]) -> Iterator[Path]:
    def failed(error: OSError) -> None:
        raise InputError(f"cannot read the folder {str(error.filename)!r}: {error.strerror}. Check its permissions.")

    for folder, folders, names in os.walk(root, onerror=failed):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in _SKIPPED_DIRS | skipped)
        for name in sorted(names):
            if not name.startswith(".") and (path := Path(folder, name)).is_file():
                yield path


def _looks_like_text(path: Path) -> bool:
    """Not empty and without a NUL byte near the beginning, which text has in no usual encoding but UTF-16."""
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFFED_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error
    return bool(head) and b"\0" not in head


def _documents(path: Path, label: str, text_field: str) -> Iterator[Document]:
    try:
        if path.suffix != ".jsonl":
            if data := path.read_bytes():
                yield Document(label if label.startswith(STDLIB) else str(path), data)
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (data := _json_text(f"{path}:{number}", line, text_field)):
                    yield Document(f"{path}:{number}", data)
    except OSError as error:
        raise _unreadable(path, error) from error


def _json_text(where: str, line: bytes, text_field: str) -> bytes:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}. Every line of a *.jsonl must be one object.") from error
    text = value.get(text_field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(map(repr, value)) if isinstance(value, dict) else f"a {type(value).__name__}, not an object"
        raise InputError(f"{where} has no string under {text_field!r}; it has {keys}. Name the key with --text-field.")
    return text.encode("utf-8", "surrogatepass")


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot read {str(path)!r}: {error.strerror}. Check its permissions or leave it out.")
