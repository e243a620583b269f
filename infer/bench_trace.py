"""`nosa-bench trace`: record what a model selects while it continues real text."""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from nosa_jax.config import AttentionKind, ComputeDtype, NosaConfig, SelectionBudget
from nosa_jax.errors import InputError
from nosa_jax.infer.bench_output import require_writable, writing
from nosa_jax.infer.bench_text import read_texts
from nosa_jax.infer.frozen import freeze
from nosa_jax.infer.progress import token_bar
from nosa_jax.infer.record import Recording, least_prompt, record_trace, require_recordable
from nosa_jax.infer.trace import PUBLISHED_MISSES, SelectionTrace
from nosa_jax.weights import find_model

SLOT_FACTORS = (1.0, 1.25, 1.5, 2.0)  # of C: 64, 80, 96 and 128 slots in the published measurement


@dataclass(frozen=True)
class TraceOptions:
    """Record the blocks that a model selects while it continues text, for `nosa-bench throughput --trace`."""

    model: Annotated[str, tyro.conf.arg(metavar="FOLDER|ID")]
    """What nosa-generate --model takes: a run, a checkpoint, or a repository of the Hugging Face Hub."""
    prompt_file: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE...")]
    """Real text; it is cut into pieces, one for each row."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The .npz file to write."""
    tokens: int = 320
    """Decode steps; `nosa-bench throughput` replays up to 265 unless told otherwise."""
    context: int | None = None
    """Tokens of each piece. Default: each file whole."""
    rows: int = 4
    """Most pieces to read."""
    attention: AttentionKind | None = None
    """Select as another of the compared systems. Default: the model's own."""
    dtype: ComputeDtype | None = None
    """Convert weights and KV cache. Default: as saved."""
    tokenizer: str | None = None
    """"bytes", or the path of a tokenizer.json. Default: the one in the checkpoint."""


def pieces(texts: dict[str, np.ndarray], context: int | None, rows: int) -> list[np.ndarray]:
    """The first `rows` pieces of `context` tokens of some texts, in their order; whole texts if that is None.

    Raises:
      InputError: no text is that long, or the numbers make no sense.
    """
    for name, value in (("--rows", rows), ("--context", 1 if context is None else context)):
        if value < 1:
            raise InputError(f"{name} {value} must be at least 1")
    if context is None:
        return list(texts.values())[:rows]
    found = [ids[at : at + context] for ids in texts.values() for at in range(0, len(ids) - context + 1, context)]
    if not found:
        longest = max(texts, key=lambda name: len(texts[name]))
        raise InputError(
            f"no file has --context {context} tokens; the longest, {longest}, has {len(texts[longest])}. "
            "Ask for fewer, or give longer text."
        )
    return found[:rows]


def record(options: TraceOptions) -> tuple[Recording, NosaConfig]:
    """Read the model and the text, and record. Everything that can be refused is, before weights are read."""
    if options.out.suffix != ".npz":
        raise InputError(f"--out {str(options.out)!r} must end in .npz, the format of a trace")
    if not options.out.absolute().parent.is_dir():
        raise InputError(f"--out {str(options.out)!r} lies in a folder that does not exist; make it first")
    if options.tokens < 2:
        raise InputError(f"--tokens {options.tokens} must be at least 2: fewer steps show no change of picks")
    require_writable(options.out, options.out)
    source = find_model(options.model)
    attention = options.attention or source.config.attention
    positions, least = source.config.max_context, least_prompt(source.config, attention)
    if options.tokens > positions - least:
        raise InputError(
            f"--tokens {options.tokens} must be at most {positions - least}: {least} of the model's {positions} "
            "positions are the least text to record from"
        )
    texts = read_texts(options.prompt_file, options.model, source.tokenizer, options.tokenizer)
    prompts = pieces(texts, options.context, options.rows)
    limit = positions - options.tokens
    if max(len(prompt) for prompt in prompts) > limit:
        raise InputError(
            f"a piece of {max(len(prompt) for prompt in prompts)} tokens and --tokens {options.tokens} exceed the "
            f"model's {positions} positions; cut with --context {limit} or less"
        )
    require_recordable(source.config, prompts, tokens=options.tokens, attention=attention)
    lengths = sorted({len(prompt) for prompt in prompts})
    origin = (
        f"recorded from {Path(options.model).name}, {attention}, {len(prompts)} rows of "
        f"{' .. '.join(str(n) for n in dict.fromkeys((lengths[0], lengths[-1])))} tokens of "
        f"{', '.join(Path(name).name for name in options.prompt_file)}, {options.tokens} steps"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = freeze(source.load(dtype=options.dtype))
    for warning in caught:  # such as an eviction head that was not in the checkpoint
        print(f"nosa-bench: {warning.message}", file=sys.stderr)
    with token_bar(options.tokens, shown=True) as tick:
        recording = record_trace(model, prompts, tokens=options.tokens, attention=attention, origin=origin, tick=tick)
    return recording, source.config


def miss_table(trace: SelectionTrace, budget: SelectionBudget) -> Table:
    """Misses per layer, row, KV head and step by slots, beside the published ones."""
    table = Table(title=f"blocks of {budget.total} that miss, per layer, row, KV head and step")
    for name in ("slots", "of C", "this trace", "NOSA-8B at 16K, published (C = 64)"):
        table.add_column(name, justify="right")
    for factor in SLOT_FACTORS:
        slots = round(budget.total * factor)
        published = PUBLISHED_MISSES[round(64 * factor)]
        table.add_row(
            str(slots), f"{factor:g}", f"{trace.misses(slots, budget.sink + budget.local):.2f}", f"{published:.2f}"
        )
    return table


def run(options: TraceOptions) -> None:
    """Record, print and save. Raises WriteError where the file can no longer be written; the rates are printed then."""
    recording, config = record(options)
    budget = config.budget_for(recording.trace.attention)
    console = Console(highlight=False)
    console.print(miss_table(recording.trace, budget))
    with writing(options.out):
        recording.trace.save(options.out)
    steps, streams, picks = recording.trace.picks.shape
    print(
        f"{options.out}: {steps} steps of {streams} streams of {picks} picks, {recording.trace.origin}. The engine "
        f"counted {recording.misses:.2f} misses with {recording.slots} slots; least locality "
        f"{recording.min_locality:.3f}"
    )
