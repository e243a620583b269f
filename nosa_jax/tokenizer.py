"""Text to token ids and back: raw bytes, or any `tokenizer.json`."""

import json
from collections.abc import Iterable
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

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a generated text: `eos_id`, and the ends of turns that the model's files name."""

    @property
    def chat_template(self) -> str | None:
        """A Jinja template that turns messages into text (`nosa_jax.chat`)."""

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
    stop_ids: tuple[int, ...] = (eos_id,)
    chat_template: str | None = None

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

    Args:
      begins: whether documents begin with bos; without, `bos_id` is None and only chat templates know the token.
      stop_ids: ends of a generated text besides eos.
      chat_template: a Jinja template for `nosa_jax.chat`.
    """

    def __init__(
        self,
        spec: str,
        *,
        bos: str | None = None,
        eos: str | None = None,
        pad: str | None = None,
        begins: bool = True,
        stop_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizers.Tokenizer.from_str(spec)
        # Files may ask for both, for use in training code of fixed shapes; here they would cut and pad texts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._names = {"bos": bos, "eos": eos, "pad": pad}
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        bos_id = self._find("bos", _BOS_NAMES)
        self.bos_id = bos_id if begins else None
        self.eos_id = self._find("eos", _EOS_NAMES)
        pad_id = self._find("pad", _PAD_NAMES)
        self.pad_id = pad_id if pad_id is not None else 0  # its content never matters, so any id will do
        self.begins = begins
        self.chat_template = chat_template
        self._more_stop_ids = tuple(dict.fromkeys(int(i) for i in stop_ids if i != self.eos_id))
        self.stop_ids = (*(() if self.eos_id is None else (self.eos_id,)), *self._more_stop_ids)
        self.special_tokens = {
            f"{role}_token": None if i is None else self._tokenizer.id_to_token(i)
            for role, i in (("bos", bos_id), ("eos", self.eos_id), ("pad", pad_id))
        }
        """The special tokens' texts, for chat templates."""

    def _find(self, role: str, usual: tuple[str, ...]) -> int | None:
        named = self._names[role]
        if named is not None and self._tokenizer.token_to_id(named) is None:
            raise InputError(f"the tokenizer has no token {named!r} to use as {role}; name one of its own tokens")
        found = (self._tokenizer.token_to_id(name) for name in ((named,) if named else usual))
        return next((i for i in found if i is not None), None)

    @classmethod
    def from_file(cls, path: str | Path, **settings: Any) -> "JsonTokenizer":
        """Read a `tokenizer.json`; settings as for the class. Raises InputError where it is missing or is not one."""
        path = Path(path)
        try:
            spec = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"cannot read the tokenizer {str(path)!r}: {error}. Give {BYTES!r} or the path of a tokenizer.json."
            ) from error
        try:
            return cls(spec, **settings)
        except InputError:
            raise
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise InputError(
                f"{str(path)!r} is not a tokenizer.json that the tokenizers library "
                f"{tokenizers.__version__} can read: {error}. Give {BYTES!r} or another file."
            ) from error

    def encode(self, text: str | bytes, *, bos: bool = False, eos: bool = False) -> np.ndarray:
        """int32 ids of the text.

        Raises UnicodeDecodeError where bytes are not UTF-8, and InputError where a string holds a lone surrogate.
        """
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        try:
            ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except TypeError as error:
            wrong = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if wrong is None:
                raise
            raise InputError(
                f"the text is not Unicode: {text[wrong]!r} at character {wrong} is half of a character, or a byte that "
                "is not UTF-8. Convert the text; only models that were trained on bytes take any."
            ) from error
        return _framed(ids, self.bos_id if bos else None, self.eos_id if eos else None)

    def decode(self, ids: Any) -> str:
        """Text of the ids without special tokens."""
        return self._tokenizer.decode(np.asarray(ids).reshape(-1).tolist(), skip_special_tokens=True)

    @property
    def spec(self) -> str:
        """The contents of the tokenizer.json."""
        return self._spec

    def to_dict(self) -> dict[str, Any]:
        """The whole file, the named special tokens, and what else was set."""
        values: dict[str, Any] = {"kind": "tokenizer.json", "spec": json.loads(self._spec), **self._names}
        if not self.begins:
            values["begins"] = False
        if self._more_stop_ids:
            values["stop_ids"] = list(self._more_stop_ids)
        if self.chat_template is not None:
            values["chat_template"] = self.chat_template
        return values


def load_tokenizer(name: str | Path) -> Tokenizer:
    """`"bytes"`, or the path of a `tokenizer.json` (or of a folder that holds one). Raises InputError."""
    if str(name) == BYTES:
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        from nosa_jax.tokenizer_files import read_tokenizer  # it builds on this module

        found = read_tokenizer(path)
        if found is not None:
            return found
        path = path / "tokenizer.json"
    return JsonTokenizer.from_file(path)


def tokenizer_from_dict(values: dict[str, Any]) -> Tokenizer:
    """Rebuild a tokenizer from `to_dict`'s output. Raises InputError for a kind that does not exist."""
    match values.get("kind"):
        case "bytes":
            return ByteTokenizer()
        case "tokenizer.json":
            return JsonTokenizer(
                json.dumps(values["spec"]),
                bos=values.get("bos"),
                eos=values.get("eos"),
                pad=values.get("pad"),
                begins=values.get("begins", True),
                stop_ids=values.get("stop_ids", ()),
                chat_template=values.get("chat_template"),
            )
        case kind:
            raise InputError(f"unknown tokenizer kind {kind!r}; this version reads {BYTES!r} and 'tokenizer.json'")


def _framed(ids: np.ndarray, bos: int | None, eos: int | None) -> np.ndarray:
    before = [] if bos is None else [bos]
    after = [] if eos is None else [eos]
    return np.concatenate([np.asarray(before, np.int32), ids, np.asarray(after, np.int32)])
