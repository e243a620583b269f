"""What `nosa-generate` continues: texts, files, JSONL lines and chat messages, as token ids with their parameters."""

import dataclasses
import json
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

STDIN = "-"
_CONTENT = ("prompt", "messages", "tokens")
_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop")


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
        except ValueError as error:  # among them bytes that are no UTF-8
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
            case "tokens" if isinstance(content, list) and content and all(type(i) is int for i in content):
                return np.asarray(content, np.int64)  # the engine checks their range
        kinds = {"prompt": "a text", "messages": "a list of messages", "tokens": "a list of ids"}
        raise InputError(f"{key} must be {kinds[key]} that is not empty, not {content!r:.100}")


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Name the place in errors that are raised inside."""
    try:
        yield
    except (InputError, TypeError) as error:
        raise InputError(f"{where}: {error}") from error


def _changed(params: SamplingParams, values: dict[str, Any]) -> SamplingParams:
    # JSON writes whole numbers without a point.
    values = {k: float(v) if k in ("temperature", "top_p") and type(v) is int else v for k, v in values.items()}
    stop = values.get("stop")
    if stop is not None:
        values = values | {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    return dataclasses.replace(params, **values)


def _read(what: str, name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the {what} {name!r}: {error.strerror}. Give a readable file.") from error


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
