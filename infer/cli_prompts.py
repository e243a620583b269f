"""What `nosa-generate` continues: texts, files, JSONL lines and chat messages, as token ids with their parameters."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nosa_jax.chat import encode_chat
from nosa_jax.errors import InputError
from nosa_jax.infer.sampling import SamplingParams
from nosa_jax.tokenizer import Tokenizer

STDIN = "-"  # in place of a file's name
_CONTENT = ("prompt", "messages", "tokens")
_INTEGERS, _NUMBERS, _STOP = ("max_new_tokens", "top_k", "seed"), ("temperature", "top_p"), "stop"
_SAMPLING = (*_INTEGERS, *_NUMBERS, _STOP)


@dataclass(frozen=True)
class NamedPrompt:
    """One prompt: what messages call it, its ids, its parameters, and the id that its JSONL line gave."""

    name: str
    ids: np.ndarray
    params: SamplingParams
    id: Any = None


@dataclass(frozen=True)
class PromptReader:
    """Turns what the command line names into prompts.

    chat: texts are messages of a user and go through the model's chat template, after the message `system`.
    chat_options: further variables of the template.
    """

    tokenizer: Tokenizer
    params: SamplingParams
    chat: bool = False
    system: str | None = None
    chat_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def texts(self, texts: Sequence[str]) -> Iterator[NamedPrompt]:
        """Texts of the command line."""
        for i, text in enumerate(texts):
            # Arguments that are not UTF-8 reach Python as surrogates; these are their bytes.
            yield self._text(f"prompt {i}", text.encode("utf-8", "surrogateescape"))

    def files(self, names: Sequence[str]) -> Iterator[NamedPrompt]:
        """Whole files. Raises InputError where one cannot be read."""
        for name in names:
            yield self._text(repr(name), _read("prompt file", name))

    def lines(self, names: Sequence[str]) -> Iterator[NamedPrompt]:
        """Every line of JSONL files: a table with `prompt`, `messages` or `tokens`, and what is its own.

        Raises InputError naming file and line for what cannot be used.
        """
        for name in names:
            for number, line in enumerate(_read("JSONL file", name).splitlines(), start=1):
                if line.strip():
                    yield self._line(f"{name}:{number}", line)

    def conversation(self, turns: Sequence[Any]) -> np.ndarray:
        """Ids of a conversation that goes on with the assistant's turn."""
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return encode_chat(self.tokenizer, [*before, *turns], **self.chat_options)

    def _text(self, name: str, data: bytes) -> NamedPrompt:
        if not data:
            raise InputError(f"{name} is empty; give at least one character to continue")
        try:
            if self.chat:
                return NamedPrompt(name, self._user(data.decode("utf-8")), self.params)
            return NamedPrompt(name, self.tokenizer.encode(data, bos=True), self.params)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}. Convert it; only models "
                "that were trained on bytes take any file."
            ) from error

    def _user(self, text: str) -> np.ndarray:
        return self.conversation([{"role": "user", "content": text}])

    def _line(self, where: str, line: bytes) -> NamedPrompt:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:  # among them bytes that are no UTF-8, and lists within lists
            raise InputError(f"{where} is no JSON: {error}. Every line must be a table by itself.") from error
        given = [key for key in _CONTENT if isinstance(values, dict) and key in values]
        if len(given) != 1:
            raise InputError(f"{where} must be a table with one of {', '.join(_CONTENT)}, and has {given or 'none'}")
        if unknown := sorted(set(values) - {"id", *_CONTENT, *_SAMPLING}):
            raise InputError(
                f"{where} has the unknown key {unknown[0]!r}; known are id, {', '.join(_CONTENT + _SAMPLING)}"
            )
        content, sampling = values[given[0]], {key: values[key] for key in _SAMPLING if key in values}
        with _at(where):
            params = _changed(self.params, sampling)
            ids = self._content(given[0], content)
        return NamedPrompt(where, ids, params, values.get("id"))

    def _content(self, key: str, content: Any) -> np.ndarray:
        match key:
            case "prompt" if isinstance(content, str) and content:
                return self._user(content) if self.chat else self.tokenizer.encode(content, bos=True)
            case "messages" if isinstance(content, list) and content:
                return self.conversation(content)
            case "tokens" if isinstance(content, list) and content and all(map(_is_id, content)):
                return np.asarray(content, np.int64)  # the engine checks their range
        kinds = {"prompt": "a text", "messages": "a list of messages", "tokens": "a list of ids"}
        raise InputError(f"{key} must be {kinds[key]} that is not empty, not {content!r:.100}")


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Name the place in errors that are raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _is_id(value: Any) -> bool:
    """Whether a JSON value can be a token's id at all; the engine checks its range."""
    return type(value) is int and abs(value) < 2**63


def _changed(params: SamplingParams, values: dict[str, Any]) -> SamplingParams:
    return dataclasses.replace(params, **{key: _checked(key, value) for key, value in values.items()})


def _checked(key: str, value: Any) -> Any:
    """A JSON value in the type of its parameter, whose limits SamplingParams checks."""
    match value:
        case int() if key in _INTEGERS and type(value) is int:
            return value
        case int() | float() if key in _NUMBERS and not isinstance(value, bool):
            return math.inf if isinstance(value, int) and abs(value) > sys.float_info.max else float(value)
        case str() if key == _STOP:
            return (value,)
        case list() if key == _STOP and all(isinstance(text, str) for text in value):
            return tuple(value)
    kind = "an integer" if key in _INTEGERS else "a number" if key in _NUMBERS else "a text or a list of texts"
    raise InputError(f"{key} must be {kind}, not {value!r:.100}")


def require_stdin() -> None:
    """Raise InputError where the program was started without a standard input."""
    if sys.stdin is None:
        raise InputError("stdin is closed; give a file, or start the program with an input")


def _read(what: str, name: str) -> bytes:
    if name == STDIN:
        require_stdin()
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except (OSError, ValueError) as error:  # a name may be none at all
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot read the {what} {name!r}: {reason}. Give a readable file.") from error


def chat_options(pairs: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON, or else a text. Raises InputError for one without a name."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"chat option {pair!r} must be NAME=VALUE, like enable_thinking=false")
        options[name] = _or_text(json.loads, value)
    return options


def _or_text(parse: Callable[[str], Any], value: str) -> Any:
    try:
        return parse(value)
    except ValueError:
        return value
