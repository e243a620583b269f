"""How `nosa-generate` shows what it generates: text as it comes, several results in turn, or JSONL."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nosa_jax.errors import InputError
from nosa_jax.infer.cli_prompts import STDIN, NamedPrompt
from nosa_jax.infer.engine import Engine
from nosa_jax.infer.requests import GenerationResult
from nosa_jax.infer.text_stream import StoppingStream
from nosa_jax.offload import OutOfPagesError
from nosa_jax.tokenizer import Tokenizer


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


def open_output(name: str | None) -> IO[str] | None:
    """The file for JSONL results, made anew; None stands for stdout.

    Raises InputError where it cannot be written, before anything is generated.
    """
    if name is None or name == STDIN:
        return None
    try:
        return Path(name).open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write the output {name!r}: {error.strerror}. Give a file in a folder of yours."
        ) from error


def write_line(file: IO[str] | None, index: int, prompt: NamedPrompt, result: GenerationResult) -> None:
    """A result as a table on a line; `index` is its id where its prompt gave none."""
    line = json.dumps(
        {
            "id": index if prompt.id is None else prompt.id,
            "text": result.text,
            "tokens": result.tokens,
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_length,
            "hits": result.hits,
            "misses": result.misses,
            "bytes_fetched": result.bytes_fetched,
        },
        ensure_ascii=False,
    )
    if file is None:
        write(line + "\n")
    else:
        file.write(line + "\n")
        file.flush()  # an interrupted run keeps what it has finished


def write(text: str) -> None:
    """Text to stdout at once, whatever characters the terminal knows."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def discard_output() -> None:
    """Nothing may be written any more: the reader, a pager for example, has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
