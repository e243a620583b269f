"""Text to token ids and back: raw bytes, or any `tokenizer.json`."""

import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tokenizers

from nosa_jax.errors import InputError

BYTES = "bytes"
"""The name under which command lines and checkpoints know `ByteTokenizer`."""

_BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
_EOS_NAMES = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "[EOS]", "[SEP]")
_PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]", "<unk>")


@runtime_checkable
class Tokenizer(Protocol):
    """What training and generation need of a tokenizer. Ids of tokens that it lacks are None."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's `vocab_size` must be at least this."""

    @property
    def bos_id(self) -> int | None:
        """Begins a document."""

    @property
    def eos_id(self) -> int | None:
        """Ends a document."""

    @property
    def pad_id(self) -> int:
        """Fills places whose content never matters."""

    def encode(self, text: str | bytes, *, bos: bool = False, eos: bool = False) -> np.ndarray:
        """int32 ids of `text`, with bos and eos around it where asked for and known.

        Raises UnicodeDecodeError where bytes are not UTF-8 and the tokenizer needs characters.
        """

    def decode(self, ids: Any) -> str:
        """The text of a sequence of ids; special tokens give nothing."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; `tokenizer_from_dict` reads them back."""


class ByteTokenizer:
    """Every byte is a token (ids 0 to 255); then bos 256, eos 257 and pad 258. Any file can be encoded."""

    vocab_size = 259
    bos_id = 256
    eos_id = 257
    pad_id = 258

    def encode(self, text: str | bytes, *, bos: bool = False, eos: bool = False) -> np.ndarray:
        """int32 ids of the bytes (of the UTF-8 form of a string)."""
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        ids = np.frombuffer(raw, np.uint8).astype(np.int32)
        return _framed(ids, self.bos_id if bos else None, self.eos_id if eos else None)

    def decode(self, ids: Any) -> str:
        """Text of the bytes; sequences that are not UTF-8 become U+FFFD, ids that are no bytes nothing.

        A model may have more ids than this tokenizer: vocabularies are padded to round sizes.
        """
        ids = np.asarray(ids, np.int64).reshape(-1)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_dict(self) -> dict[str, Any]:
        """Only the name: bytes need no vocabulary."""
        return {"kind": BYTES}


class JsonTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    The special tokens are found by their usual names unless named here (`bos`, `eos`, `pad`: the token's text).
    """

    def __init__(self, spec: str, *, bos: str | None = None, eos: str | None = None, pad: str | None = None) -> None:
        self._spec = spec
        self._tokenizer = tokenizers.Tokenizer.from_str(spec)
        # Files may ask for both, for use in training code of fixed shapes; here they would cut and pad texts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._names = {"bos": bos, "eos": eos, "pad": pad}
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id = self._find("bos", _BOS_NAMES)
        self.eos_id = self._find("eos", _EOS_NAMES)
        pad_id = self._find("pad", _PAD_NAMES)
        self.pad_id = pad_id if pad_id is not None else 0  # its content never matters, so any id will do

    def _find(self, role: str, usual: tuple[str, ...]) -> int | None:
        named = self._names[role]
        if named is not None and self._tokenizer.token_to_id(named) is None:
            raise InputError(f"the tokenizer has no token {named!r} to use as {role}; name one of its own tokens")
        found = (self._tokenizer.token_to_id(name) for name in ((named,) if named else usual))
        return next((i for i in found if i is not None), None)

    @classmethod
    def from_file(cls, path: str | Path, **special: str | None) -> "JsonTokenizer":
        """Read a `tokenizer.json`. Raises InputError where it is missing or is not one."""
        path = Path(path)
        try:
            spec = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"cannot read the tokenizer {str(path)!r}: {error}. Give {BYTES!r} or the path of a tokenizer.json."
            ) from error
        try:
            return cls(spec, **special)
        except InputError:
            raise
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise InputError(
                f"{str(path)!r} is not a tokenizer.json that the tokenizers library "
                f"{tokenizers.__version__} can read: {error}. Give {BYTES!r} or another file."
            ) from error

    def encode(self, text: str | bytes, *, bos: bool = False, eos: bool = False) -> np.ndarray:
        """int32 ids of the text; raises UnicodeDecodeError where bytes are not UTF-8."""
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        return _framed(ids, self.bos_id if bos else None, self.eos_id if eos else None)

    def decode(self, ids: Any) -> str:
        """Text of the ids without special tokens."""
        return self._tokenizer.decode(np.asarray(ids).reshape(-1).tolist(), skip_special_tokens=True)

    def to_dict(self) -> dict[str, Any]:
        """The whole file and the named special tokens."""
        return {"kind": "tokenizer.json", "spec": json.loads(self._spec), **self._names}


def load_tokenizer(name: str | Path) -> Tokenizer:
    """`"bytes"`, or the path of a `tokenizer.json` (or of a folder that holds one). Raises InputError."""
    if str(name) == BYTES:
        return ByteTokenizer()
    path = Path(name)
    return JsonTokenizer.from_file(path / "tokenizer.json" if path.is_dir() else path)


def tokenizer_from_dict(values: dict[str, Any]) -> Tokenizer:
    """Rebuild a tokenizer from `to_dict`'s output. Raises InputError for a kind that does not exist."""
    match values.get("kind"):
        case "bytes":
            return ByteTokenizer()
        case "tokenizer.json":
            special = {role: values.get(role) for role in ("bos", "eos", "pad")}
            return JsonTokenizer(json.dumps(values["spec"]), **special)
        case kind:
            raise InputError(f"unknown tokenizer kind {kind!r}; this version reads {BYTES!r} and 'tokenizer.json'")


def _framed(ids: np.ndarray, bos: int | None, eos: int | None) -> np.ndarray:
    before = [] if bos is None else [bos]
    after = [] if eos is None else [eos]
    return np.concatenate([np.asarray(before, np.int32), ids, np.asarray(after, np.int32)])
