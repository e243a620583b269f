"""A conversation on the terminal."""

import io
import sys

from nosa_jax.errors import InputError
from nosa_jax.infer.cli_output import stream
from nosa_jax.infer.cli_prompts import NamedPrompt, PromptReader, require_stdin
from nosa_jax.infer.engine import Engine
from nosa_jax.infer.requests import GenerationResult

_NEW = "/new"


def converse(engine: Engine, reader: PromptReader, *, record_steps: bool) -> tuple[list[str], list[GenerationResult]]:
    """Read a user's messages from stdin, one a line, and write the model's replies, until the input ends.

    The whole conversation is read again for every reply. A message that does not fit any more, or that the model's
    template refuses, is left out, and the conversation goes on.

    Returns: what to call the turns, and their results.
    """
    require_stdin()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused like any other
    turns: list[dict[str, str]] = []
    names: list[str] = []
    results: list[GenerationResult] = []
    _note(f"Type a message; {_NEW} begins another conversation, Ctrl-D ends.")
    while line := _next_line():
        text = line.strip()
        if text == _NEW:
            turns.clear()
        if not text or text == _NEW:
            continue
        asked = [*turns, {"role": "user", "content": text}]
        try:
            prompt = NamedPrompt(f"message {len(results)}", reader.conversation(asked), reader.params)
            result = stream(engine, reader.tokenizer, prompt, record_steps=record_steps)
        except InputError as error:
            print(f"nosa-generate: {error} ({_NEW} begins another conversation.)", file=sys.stderr)
            continue
        turns = [*asked, {"role": "assistant", "content": result.text or ""}]
        names.append(prompt.name)
        results.append(result)
    return names, results


def _next_line() -> str:
    _note("> ", end="")
    return sys.stdin.readline()


def _note(text: str, end: str = "\n") -> None:
    """For a person at a terminal only."""
    if sys.stdin.isatty():
        print(text, end=end, file=sys.stderr, flush=True)
