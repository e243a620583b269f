"""`python -m nosa_jax.infer`, installed as `nosa-generate`."""

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nosa_jax.checkpoint import find_checkpoint, load_model, read_meta, saved_config, saved_tokenizer
from nosa_jax.config import AttentionKind, ComputeDtype, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.ffi import HostMemoryError
from nosa_jax.infer.engine import Engine
from nosa_jax.infer.frozen import freeze
from nosa_jax.infer.plan import DoesNotFitError, make_plan
from nosa_jax.infer.report import statistics_tables
from nosa_jax.infer.requests import GenerationResult
from nosa_jax.infer.sampling import SamplingParams
from nosa_jax.infer.text_stream import TextStream
from nosa_jax.model import NosaLM
from nosa_jax.offload import OutOfPagesError
from nosa_jax.tokenizer import Tokenizer, load_tokenizer

_INTERRUPTED = 130  # what shells report for SIGINT
_MAX_ROWS = 8  # decoded together unless --max-batch says otherwise

Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class GenerateConfig:
    """Continue prompts with a trained model, its KV cache in host memory. Text goes to stdout, all else to stderr."""

    model: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """A training run, one of its steps, or an exported checkpoint."""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT...")] = ()
    """Prompts to continue. One is printed as it is written, several one after the other."""
    prompt_file: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE...")] = ()
    """Files to continue, after the prompts given as text."""
    max_new_tokens: int = 128
    """Most tokens to write for each prompt."""
    temperature: float = 0.0
    """0 takes the most likely token; higher values sample more freely."""
    top_k: int = 0
    """Sample among so many of the most likely tokens; 0: among all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that have this probability together."""
    seed: int = 0
    """Of the sampling. The same seed gives the same text."""
    ignore_eos: Flag = False
    """Go on after the end-of-document token."""
    resident: Flag = False
    """Keep the whole KV cache on the device instead of in host memory."""
    slots: int | None = None
    """Device slots per row and KV head. Default: twice the selected blocks, or what the device budget allows."""
    device_budget: str | None = None
    """Most device memory to plan with, like 20GiB."""
    host_budget: str | None = None
    """Most host memory for KV pages, like 200GiB."""
    max_context: int | None = None
    """Tokens that a row may reach, prompt included. Default: what the prompts need."""
    max_batch: int | None = None
    """Rows decoded together. Default: one for each prompt, at most 8."""
    attention: AttentionKind | None = None
    """Decode as another of the compared systems. Default: the model's own."""
    dtype: ComputeDtype | None = None
    """Convert weights and KV cache. Default: as saved."""
    tokenizer: str | None = None
    """"bytes", or the path of a tokenizer.json. Default: the one in the checkpoint."""
    step: int | None = None
    """Which checkpoint of a run. Default: the latest."""
    plan: Flag = False
    """Print where every byte would go, and stop. Needs no prompt."""
    stats: Flag = False
    """Print hits, misses, bytes and locality when done."""


class _Prompt(NamedTuple):
    name: str  # what messages call it
    ids: np.ndarray


def main(argv: Sequence[str] | None = None) -> int:
    """Generate from the command line. Returns 0; 2 for bad input and for what does not fit; 130 when interrupted."""
    for name in ("absl", "asyncio"):  # orbax and its tasks log tracebacks of failures that are reported below
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        _generate(tyro.cli(GenerateConfig, args=argv, prog="nosa-generate"))
    except SystemExit as request:  # tyro has printed its help or what is wrong with the arguments
        return request.code if isinstance(request.code, int) else 2
    except (InputError, DoesNotFitError, OutOfPagesError, HostMemoryError) as error:
        print(f"nosa-generate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nnosa-generate: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, a pager for example, has gone; nothing may be written any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _generate(config: GenerateConfig) -> None:
    """Everything that can be refused is, before the weights are read."""
    params = SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
    )
    folder = find_checkpoint(config.model, config.step)
    meta = read_meta(folder)
    model_config = _model_config(meta, config, folder)
    tokenizer = _tokenizer(meta, config, model_config, folder)
    if not config.ignore_eos and tokenizer.eos_id is not None:
        params = SamplingParams(**(vars(params) | {"eos_ids": (tokenizer.eos_id,)}))
    prompts = _read_prompts(config, tokenizer)
    attention = config.attention or model_config.attention
    if attention == "dense" and not config.resident:
        raise InputError(
            "attention 'dense' reads every block in every step, so none can wait on the host; add --resident"
        )

    sizes: dict[str, Any] = dict(
        max_batch=max(1, min(len(prompts), _MAX_ROWS)) if config.max_batch is None else config.max_batch,
        max_context=_context(config, model_config, prompts),
        attention=attention,
        offload=not config.resident,
        slots=config.slots,
        device_budget=config.device_budget,
        host_budget=config.host_budget,
    )
    weight_bytes = jax.eval_shape(lambda: freeze(NosaLM(model_config, rngs=nnx.Rngs(0)))).nbytes
    plan = make_plan(model_config, weight_bytes=weight_bytes, **sizes)
    if config.plan:
        print(plan)
        return

    model, _, _ = load_model(folder, dtype=config.dtype)
    with Engine(model, tokenizer=tokenizer, **sizes) as engine:
        start = time.perf_counter()
        results = _run(engine, tokenizer, prompts, params, record_steps=config.stats)
        seconds = time.perf_counter() - start
    if config.stats:
        console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 110)
        for table in statistics_tables([p.name for p in prompts], results, engine.layout, seconds):
            console.print(table)


def _model_config(meta: dict[str, Any], config: GenerateConfig, folder: Path) -> NosaConfig:
    saved = saved_config(meta, folder)
    return saved if config.dtype is None else saved.replace(dtype=config.dtype, param_dtype=config.dtype)


def _tokenizer(meta: dict[str, Any], config: GenerateConfig, model_config: NosaConfig, folder: Path) -> Tokenizer:
    tokenizer = saved_tokenizer(meta, folder) if config.tokenizer is None else load_tokenizer(config.tokenizer)
    if tokenizer is None:
        raise InputError(
            f"{config.model!r} holds no tokenizer. Name one with --tokenizer: 'bytes' or the path of a tokenizer.json."
        )
    if tokenizer.vocab_size > model_config.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model has vocab_size={model_config.vocab_size}. "
            "Give the tokenizer that the model was trained with."
        )
    return tokenizer


def _read_prompts(config: GenerateConfig, tokenizer: Tokenizer) -> list[_Prompt]:
    """Token ids of all prompts, begun as documents were in training."""
    # Arguments that are not UTF-8 reach Python as surrogates; these are their bytes.
    sources = [(f"prompt {i}", text.encode("utf-8", "surrogateescape")) for i, text in enumerate(config.prompt)]
    for name in config.prompt_file:
        try:
            sources.append((repr(name), Path(name).read_bytes()))
        except OSError as error:
            raise InputError(
                f"cannot read the prompt file {name!r}: {error.strerror}. Give a readable file."
            ) from error
    if not sources and not config.plan:
        raise InputError("there is nothing to continue; give --prompt TEXT or --prompt-file FILE")
    prompts = []
    for name, data in sources:
        if not data:
            raise InputError(f"{name} is empty; give at least one character to continue")
        try:
            prompts.append(_Prompt(name, tokenizer.encode(data, bos=True)))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}. Convert it; only models "
                "that were trained on bytes take any file."
            ) from error
    return prompts


def _context(config: GenerateConfig, model_config: NosaConfig, prompts: list[_Prompt]) -> int:
    """Tokens per row: as asked for, or what the longest prompt needs. Refuses prompts that do not fit."""
    given = config.max_context is not None
    limit = model_config.max_context if config.max_context is None else config.max_context
    for name, ids in prompts:
        if len(ids) + config.max_new_tokens > limit:
            fewer = f", ask for at most {limit - len(ids)} new tokens" if limit > len(ids) else ""
            raise InputError(
                f"{name} has {len(ids)} tokens and may get {config.max_new_tokens} new ones, but a row holds {limit} "
                f"({'--max-context' if given else 'the longest that the model was made for'}). Shorten it{fewer}"
                f"{', or raise --max-context' if given else ''}."
            )
    if given or not prompts:
        return limit
    return max(len(ids) for _, ids in prompts) + config.max_new_tokens


def _run(
    engine: Engine, tokenizer: Tokenizer, prompts: list[_Prompt], params: SamplingParams, *, record_steps: bool
) -> list[GenerationResult]:
    """Generate, printing the text: of one prompt token by token, of several when all are done."""
    ids = [p.ids for p in prompts]
    if len(prompts) == 1:
        stream = TextStream(tokenizer)
        results = engine.generate(
            ids, params, on_token=lambda _, token: _write(stream.push(token)), record_steps=record_steps
        )
        _write(stream.flush() + "\n")
        return results

    bar = Progress(
        TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn(),
        console=Console(stderr=True), disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("tokens", total=len(ids) * params.max_new_tokens)
        results = engine.generate(
            ids, params, on_token=lambda _index, _token: bar.advance(task), record_steps=record_steps
        )
    for prompt, result in zip(prompts, results, strict=True):
        _write(f"=== {prompt.name}\n{result.text}\n")
    return results


def _write(text: str) -> None:
    """Text to stdout at once, whatever characters the terminal knows."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
