"""How `nosa-generate` shows what it generates: text as it comes, several results in turn, or JSONL."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nosa_jax.errors import InputError
from nosa_jax.infer.cli_prompts import STDIN, NamedPrompt
from nosa_jax.infer.engine import Engine
from nosa_jax.infer.requests import GenerationResult
from nosa_jax.infer.text_stream import StoppingStream
from nosa_jax.offload import OutOfPagesError
from nosa_jax.tokenizer import Tokenizer


class WriteError(Exception):
    """Results cannot be written; the message says where and why."""


def stream(engine: Engine, tokenizer: Tokenizer, prompt: NamedPrompt, *, record_steps: bool) -> GenerationResult:
    """Generate for one prompt, writing its text token by token."""
    text = StoppingStream(tokenizer, prompt.params.stop)
    (result,) = engine.generate(
        [prompt.ids], [prompt.params], on_token=lambda _, token: write(text.push(token)), record_steps=record_steps
    )
    write(text.flush() + "\n")
    return result


def generate_all(
    engine: Engine, prompts: Sequence[NamedPrompt], *, record_steps: bool
) -> Iterator[tuple[NamedPrompt, GenerationResult]]:
    """Generate for all prompts, giving each with its result in their order, as soon as it and those before it are done.

    Shows how far it is.

    Raises:
      InputError, OutOfPagesError: a prompt that the engine cannot take; names it. Nothing was generated then.
    """
    bar = Progress(
        TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn(),
        console=Console(stderr=True), disable=not sys.stderr.isatty(),
    )  # fmt: skip
    task = bar.add_task("tokens", total=sum(p.params.max_new_tokens for p in prompts))
    handles = []
    for index, prompt in enumerate(prompts):
        try:
            handle = engine.submit(
                prompt.ids,
                prompt.params,
                on_token=lambda _: bar.advance(task),
                record_steps=record_steps,
                stream=index,
            )
        except (InputError, OutOfPagesError) as error:
            raise type(error)(f"{prompt.name}: {error}") from error
        handles.append(handle)
    with bar:
        for prompt, handle in zip(prompts, handles, strict=True):
            yield prompt, handle.result()


def write_text(prompt: NamedPrompt, result: GenerationResult) -> None:
    """A text under its prompt's name."""
    write(f"=== {prompt.name}\n{result.text}\n")


@contextmanager
def open_output(name: str | None, inputs: Sequence[str]) -> Iterator[IO[str] | None]:
    """The file for JSONL results, made anew; None stands for stdout.

    Raises InputError where it cannot be written or is one of the inputs, before anything is generated.
    """
    if name is None or name == STDIN:
        yield None
        return
    if any(os.path.exists(i) and os.path.exists(name) and os.path.samefile(i, name) for i in inputs):
        raise InputError(f"--output {name!r} is one of the files that prompts are read from; give another file")
    try:
        file = Path(name).open("w", encoding="utf-8")  # noqa: SIM115 - closed below, whatever happens
    except (OSError, ValueError) as error:  # a name may be none at all
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot write the output {name!r}: {reason}. Give a file in a folder of yours.") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # every line was flushed: this is one that could not be, and that was said
            file.close()


def write_line(file: IO[str] | None, index: int, prompt: NamedPrompt, result: GenerationResult) -> None:
    """A result as a table on a line; `index` is its id where its prompt gave none."""
    values = {
        "id": index if prompt.id is None else prompt.id,
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_length,
        "hits": result.hits,
        "misses": result.misses,
        "bytes_fetched": result.bytes_fetched,
    }
    if file is None:
        _require_stdout()
    where = sys.stdout if file is None else file
    line = json.dumps(values, ensure_ascii=False)
    try:
        line.encode(_encoding(where))
    except UnicodeEncodeError:  # JSON can say it in ASCII
        line = json.dumps(values)
    with _writing("stdout" if file is None else file.name):
        where.write(line + "\n")
        where.flush()  # an interrupted run keeps what it has finished


def write(text: str) -> None:
    """Text to stdout at once, whatever characters the terminal knows. Raises WriteError."""
    _require_stdout()
    encoding = _encoding(sys.stdout)
    with _writing("stdout"):
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


def _require_stdout() -> None:
    if sys.stdout is None:  # the program was started without
        raise WriteError("stdout is closed")


def _encoding(file: Any) -> str:
    return getattr(file, "encoding", None) or "utf-8"


@contextmanager
def _writing(name: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader has enough
        raise
    except OSError as error:
        raise WriteError(f"cannot write to {name}: {error.strerror}. Free space or give another file.") from error


def discard_output() -> None:
    """Nothing can be written any more: the reader, a pager for example, has gone, or the disk is full."""
    with suppress(AttributeError, OSError):  # stdout is closed, or no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
