"""`python -m nosa_jax.infer`, installed as `nosa-generate`."""

import contextlib
import dataclasses
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import tyro
from flax import nnx
from rich.console import Console

from nosa_jax.config import AttentionKind, ComputeDtype, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.ffi import HostMemoryError
from nosa_jax.infer.cli_chat import converse
from nosa_jax.infer.cli_output import (
    WriteError,
    discard_output,
    generate_all,
    open_output,
    stream,
    write,
    write_line,
    write_text,
)
from nosa_jax.infer.cli_prompts import STDIN, NamedPrompt, PromptReader, chat_options
from nosa_jax.infer.engine import Engine, require_steps_per_dispatch
from nosa_jax.infer.frozen import freeze
from nosa_jax.infer.plan import DEFAULT_PREFILL_CHUNK, DoesNotFitError, make_plan
from nosa_jax.infer.report import statistics_tables
from nosa_jax.infer.sampling import SamplingParams
from nosa_jax.model import NosaLM
from nosa_jax.offload import OutOfPagesError
from nosa_jax.tokenizer import Tokenizer, load_tokenizer
from nosa_jax.weights import ModelSource, find_model

_INTERRUPTED = 130  # what shells report for SIGINT
_CHAT_CONTEXT = 8192
_MAX_ROWS = 8  # decoded together unless --max-batch says otherwise

Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class GenerateConfig:
    """Continue prompts with a trained model, its KV cache in host memory. Text goes to stdout, all else to stderr."""

    model: Annotated[str, tyro.conf.arg(metavar="FOLDER|ID")]
    """A training run, one of its steps, an exported checkpoint, a folder with config.json and safetensors files, or a
    repository of the Hugging Face Hub (owner/name)."""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT...")] = ()
    """Prompts to continue. One is printed as it is written, several one after the other."""
    prompt_file: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE...")] = ()
    """Files to continue, after the prompts given as text."""
    jsonl: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE...")] = ()
    """Files with a prompt per line, "-" for stdin: tables with `prompt`, `messages` or `tokens`, and perhaps `id`,
    `max_new_tokens`, `temperature`, `top_k`, `top_p`, `seed`, `stop`. Results are then tables too, one per line."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Where results of --jsonl go. Default: stdout."""
    chat: Flag = False
    """Prompts are a user's messages, put into the model's chat template. Without prompts: a conversation on stdin."""
    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """With --chat: a system message before the user's."""
    chat_option: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE...")] = ()
    """With --chat: further variables of the template, like enable_thinking=false."""
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
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT...")] = ()
    """A text ends before the first of these strings."""
    resident: Flag = False
    """Keep the whole KV cache on the device instead of in host memory."""
    slots: int | None = None
    """Device slots per row and KV head. Default: twice the selected blocks, or what the device budget allows."""
    device_budget: str | None = None
    """Most device memory to plan with, like 20GiB."""
    host_budget: str | None = None
    """Most host memory for KV pages, like 200GiB."""
    max_context: int | None = None
    """Tokens that a row may reach, prompt included. Default: what the prompts need; for a conversation 8192, or what
    the model was made for."""
    max_batch: int | None = None
    """Rows decoded together. Default: one for each prompt, at most 8."""
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    """Tokens of a prompt that are read at once. More read long prompts faster, fewer need less memory."""
    steps_per_dispatch: int = 1
    """Tokens of a row that the device is told to write at once. More save the host's time, and come together."""
    attention: AttentionKind | None = None
    """Decode as another of the compared systems. Default: the model's own."""
    dtype: ComputeDtype | None = None
    """Convert weights and KV cache. Default: as saved."""
    tokenizer: str | None = None
    """"bytes", or the path of a tokenizer.json or of a folder with one. Default: the one in the checkpoint."""
    step: int | None = None
    """Which checkpoint of a run. Default: the latest."""
    revision: str | None = None
    """Branch, tag or commit of a repository. Default: its main branch."""
    plan: Flag = False
    """Print where every byte would go, and stop. Needs no prompt."""
    stats: Flag = False
    """Print hits, misses, bytes and locality when done."""


def main(argv: Sequence[str] | None = None) -> int:
    """Generate from the command line.

    Returns 0; 1 where results cannot be written; 2 for bad input and for what does not fit; 130 when interrupted.
    """
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
    except BrokenPipeError:
        discard_output()
        return 1
    except WriteError as error:
        discard_output()
        print(f"nosa-generate: {error}", file=sys.stderr)
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
        stop=config.stop,
    )
    _require_sense(config)
    source = find_model(config.model, step=config.step, revision=config.revision)
    changed = {} if config.dtype is None else {"dtype": config.dtype, "param_dtype": config.dtype}
    model_config = source.config.replace(**changed)
    tokenizer = _tokenizer(source, config, model_config)
    if not config.ignore_eos:
        params = dataclasses.replace(params, eos_ids=tokenizer.stop_ids)
    reader = PromptReader(tokenizer, params, config.chat, config.system, chat_options(config.chat_option))
    prompts = [*reader.texts(config.prompt), *reader.files(config.prompt_file), *reader.lines(config.jsonl)]
    conversation = config.chat and not prompts and not config.jsonl
    if conversation:
        reader.conversation([{"role": "user", "content": "?"}])  # a model without a template is refused now
    elif not prompts and not config.plan:
        raise InputError("there is nothing to continue; give --prompt TEXT, --prompt-file FILE, --jsonl FILE or --chat")
    attention = config.attention or model_config.attention
    if config.slots is not None and config.resident:
        raise InputError(
            f"--slots {config.slots} is how many blocks of a row are on the device, and with --resident all are; leave "
            "one of them out"
        )
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
        prefill_chunk=config.prefill_chunk,
    )
    require_steps_per_dispatch(config.steps_per_dispatch, sizes["max_context"])
    weight_bytes = jax.eval_shape(lambda: freeze(NosaLM(model_config, rngs=nnx.Rngs(0)))).nbytes
    plan = make_plan(model_config, weight_bytes=weight_bytes, **sizes)
    if config.plan:
        write(f"{plan}\n")
        return

    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(open_output(config.output, config.jsonl))
        model = _load(source, config)
        steps = config.steps_per_dispatch
        engine = stack.enter_context(Engine(model, tokenizer=tokenizer, steps_per_dispatch=steps, **sizes))
        start = time.perf_counter()
        names = [p.name for p in prompts]
        if conversation:
            names, results = converse(engine, reader, record_steps=config.stats)
        elif len(prompts) == 1 and not config.jsonl:
            results = [stream(engine, tokenizer, prompts[0], record_steps=config.stats)]
        else:
            results = []
            for index, (prompt, result) in enumerate(generate_all(engine, prompts, record_steps=config.stats)):
                write_line(lines, index, prompt, result) if config.jsonl else write_text(prompt, result)
                results.append(result)
        seconds = time.perf_counter() - start
        layout = engine.layout
    if config.stats and results:
        console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 110)
        for table in statistics_tables(names, results, layout, seconds):
            console.print(table)


def _require_sense(config: GenerateConfig) -> None:
    """Refuse options that would have no effect, and a size that later messages would build on."""
    if config.max_context is not None and config.max_context < 1:
        raise InputError(f"--max-context {config.max_context} must be at least 1")
    if [*config.prompt_file, *config.jsonl].count(STDIN) > 1:
        raise InputError("stdin (-) can be read once; name it in --prompt-file or in --jsonl, and once only")
    if config.output is not None and not config.jsonl:
        raise InputError(f"--output {config.output!r} is for the results of --jsonl; redirect stdout for texts")
    for name, given in (("--system", config.system is not None), ("--chat-option", bool(config.chat_option))):
        if given and not config.chat and not config.jsonl:
            raise InputError(f"{name} has no effect without --chat, or --jsonl with messages")


def _load(source: ModelSource, config: GenerateConfig) -> NosaLM:
    """The model; what the reader has to say goes to stderr in this program's own form."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = source.load(dtype=config.dtype)
    for warning in caught:
        print(f"nosa-generate: {warning.message}", file=sys.stderr)
    return model


def _tokenizer(source: ModelSource, config: GenerateConfig, model_config: NosaConfig) -> Tokenizer:
    tokenizer = source.tokenizer if config.tokenizer is None else load_tokenizer(config.tokenizer)
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


def _context(config: GenerateConfig, model_config: NosaConfig, prompts: list[NamedPrompt]) -> int:
    """Tokens per row: as asked for, or what the longest prompt needs. Refuses prompts that do not fit."""
    given = config.max_context is not None
    limit = model_config.max_context if config.max_context is None else config.max_context
    for prompt in prompts:
        length, new = len(prompt.ids), prompt.params.max_new_tokens
        if length + new > limit:
            fewer = f", ask for at most {limit - length} new tokens" if limit > length else ""
            raise InputError(
                f"{prompt.name} has {length} tokens and may get {new} new ones, but a row holds {limit} "
                f"({'--max-context' if given else 'the longest that the model was made for'}). Shorten it{fewer}"
                f"{', or raise --max-context' if given else ''}."
            )
    if given or (not prompts and not config.chat):
        return limit
    if not prompts:
        return min(limit, _CHAT_CONTEXT)
    return max(len(p.ids) + p.params.max_new_tokens for p in prompts)


if __name__ == "__main__":
    sys.exit(main())
