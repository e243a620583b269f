"""The whole road once: train on real text, export, reload, and decode with the KV cache in host memory.

Trains the tiny byte-level model on the standard library's sources, writes its orbax checkpoint, reads it back, and
continues a source file that it has not been trained on, three times: with every KV block on the device, with as many
device slots as a step selects blocks, and with twice as many. The text must be the same each time.

    python scripts/demo.py [--out demo_output] [--scale 1.0]
"""

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")  # figures go to files; no display is needed

import matplotlib.pyplot as plt
import numpy as np
import tyro
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from nosa_jax.infer import Engine, FrozenModel, SamplingParams, decode_step, freeze
from nosa_jax.infer.plan import format_bytes
from nosa_jax.tokenizer import Tokenizer
from nosa_jax.train import Document, Phase, TrainConfig, load_model, read_documents, split_documents, train

PROMPT_TOKENS = 4096
NEW_TOKENS = 256
SCORED_TOKENS = 256


@dataclass(frozen=True)
class DemoConfig:
    """Train, export, reload and decode with the KV cache in host memory."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("demo_output")
    """Folder for the run, the checkpoint and the pictures; an earlier demo in it is replaced."""
    scale: float = 1.0
    """Multiplies the training steps."""


@dataclass(frozen=True)
class Continuation:
    """What one engine did with the file."""

    name: str
    tokens: list[int]
    log_probs: np.ndarray  # of the file's own next tokens [nats], teacher-forced
    locality: np.ndarray  # [steps, L, K]
    misses: np.ndarray  # [steps, L, K]
    hit_rate: float
    bytes_per_step: float
    min_locality: float
    bound: float
    tokens_per_second: float
    device_bytes: int
    host_bytes: int


def held_out_file(config: TrainConfig) -> Document:
    """The held-out source file whose length is closest to twice what the demo reads: a middle, and not an end."""
    documents = read_documents(config.data)
    _, held_out = split_documents(documents, config.validation)
    needed = PROMPT_TOKENS + SCORED_TOKENS
    long_enough = [d for d in held_out if len(d.data) >= needed]
    return min(long_enough, key=lambda d: (abs(len(d.data) - 2 * needed), d.name))


def continue_file(
    name: str, model: FrozenModel, tokenizer: Tokenizer, file_tokens: np.ndarray, **engine_options: Any
) -> Continuation:
    """Score the file's own continuation token by token, then let the model write its own."""
    prompt, truth = file_tokens[:PROMPT_TOKENS], file_tokens[PROMPT_TOKENS:][:SCORED_TOKENS]
    with Engine(
        model,
        max_batch=1,
        max_context=PROMPT_TOKENS + max(NEW_TOKENS, SCORED_TOKENS),
        tokenizer=tokenizer,
        prefill_chunk=PROMPT_TOKENS,  # in one piece: no other row waits for it
        **engine_options,
    ) as engine:
        state = engine.prefill([prompt])
        logits, log_probs, locality, misses = state.logits, [], [], []
        for token in truth:
            row = np.asarray(logits[0], np.float64)
            log_probs.append(row[token] - np.logaddexp.reduce(row))
            logits, state = decode_step(model, state, jnp.asarray([token]))
            stats = state.stats()
            locality.append(stats.locality_last[:, 0])
            misses.append(stats.last.misses[:, 0])
        del state  # the engine makes its own; both would be in memory at once
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.7, top_p=0.95, seed=1)
        engine.generate([prompt], SamplingParams(max_new_tokens=2, temperature=0.7))  # compile
        start = time.perf_counter()
        first_token = start

        def on_token(index: int, token: int) -> None:
            nonlocal first_token
            if first_token == start:
                first_token = time.perf_counter()

        result = engine.generate([prompt], sampling, on_token=on_token)[0]
        seconds = time.perf_counter() - first_token
        return Continuation(
            name=name,
            tokens=result.tokens,
            log_probs=np.array(log_probs),
            locality=np.array(locality),
            misses=np.array(misses),
            hit_rate=stats.hit_rate,
            bytes_per_step=float(stats.bytes_total.sum() / len(truth)),
            min_locality=float(np.nanmin(stats.min_locality)),
            bound=stats.locality_bound,
            tokens_per_second=(len(result.tokens) - 1) / seconds,
            device_bytes=engine.layout.device_bytes(),
            host_bytes=engine.plan.host_bytes,
        )


def plot_locality(runs: list[Continuation], path: Path) -> None:
    """Locality per layer over the steps, and the blocks fetched, beside what is guaranteed."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6.5), sharex=True, constrained_layout=True)
    selected = runs[0].locality.min(axis=2)  # the worst KV head of each layer
    for layer in range(selected.shape[1]):
        top.plot(selected[:, layer], lw=0.9, label=f"layer {layer}")
    top.axhline(runs[0].bound, color="black", ls="--", lw=1.2, label=f"guaranteed {runs[0].bound:.4g}")
    top.set(ylabel="locality (worst KV head)", ylim=(min(0.6, runs[0].bound - 0.1), 1.02))
    top.set_title("share of a step's selected blocks that the step before had selected too")
    top.legend(ncols=3, fontsize=8, loc="lower right")
    for run in runs[1:]:
        bottom.plot(run.misses.sum(axis=(1, 2)), lw=0.9, label=run.name)
    bottom.set(xlabel="decode step", ylabel="blocks fetched, all layers and heads")
    bottom.set_ylim(0, 1.25 * max(run.misses.sum(axis=(1, 2)).max() for run in runs[1:]) + 1)
    bottom.legend(fontsize=8, ncols=2, loc="upper right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    """Run the demo; returns 0 if the three continuations are the same."""
    options = tyro.cli(DemoConfig, description=__doc__)
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=118, highlight=False)
    out = options.out
    for name in ("run", "model"):
        shutil.rmtree(out / name, ignore_errors=True)
    dense_steps, nosa_steps = (max(1, round(n * options.scale)) for n in (260, 60))
    config = TrainConfig(
        out=str(out / "run"),
        export=str(out / "model"),
        dense=Phase(steps=dense_steps, seq_len=512, batch=4, attention="dense"),
        nosa=Phase(steps=nosa_steps, seq_len=1024, batch=2, attention="nosa"),
        eval_every=0,
        checkpoint_every=0,
    )
    console.rule("1. train: dense attention first, then NOSA")
    trained = train(config, console=console)
    speeds = ", ".join(f"{kind} {rate:,.0f} tokens/s" for kind, rate in trained.tokens_per_second.items())
    console.print(
        f"training loss {trained.losses[0]:.3f} -> {np.mean(trained.losses[-10:]):.3f} nats per byte; "
        f"held-out perplexity {np.exp(trained.validation_losses[-1]):.2f} per byte; {speeds}"
    )
    shutil.copy(trained.out / "loss.png", out / "loss.png")

    console.rule("2. reload the exported checkpoint")
    model, tokenizer, metadata = load_model(out / "model")
    frozen = freeze(model)
    console.print(f"{out / 'model'}: step {metadata['metadata']['step']}, {format_bytes(frozen.nbytes)} of parameters")

    console.rule("3. continue a held-out source file")
    document = held_out_file(config)
    file_tokens = tokenizer.encode(document.data, bos=True)
    budget = model.config.budget
    console.print(
        f"{document.name}: {PROMPT_TOKENS} tokens are read, a step attends to {budget.total} blocks of "
        f"{model.config.block_size} of them ({budget.total * model.config.block_size / PROMPT_TOKENS:.0%})"
    )
    variants: list[tuple[str, dict[str, Any]]] = [
        ("all on device", {"offload": False}),
        (f"{budget.total} slots", {"slots": budget.total}),
        (f"{2 * budget.total} slots", {"slots": 2 * budget.total}),
    ]
    runs = [continue_file(name, frozen, tokenizer, file_tokens, **kwargs) for name, kwargs in variants]

    resident = runs[0]
    console.print(Panel(tokenizer.decode(file_tokens[PROMPT_TOKENS - 300 : PROMPT_TOKENS]), title="end of the prompt"))
    console.print(Panel(tokenizer.decode(resident.tokens), title=f"{NEW_TOKENS} tokens by the model"))
    plot_locality(runs, out / "locality.png")

    table = Table(title=f"decoding after {PROMPT_TOKENS} tokens, batch 1, this machine's CPU")
    for column in ("KV cache", "equal", "perplexity", "hit rate", "least locality", "bytes/step", "tokens/s",
                   "on device", "on host"):  # fmt: skip
        table.add_column(column, justify="left" if column == "KV cache" else "right", no_wrap=True)
    same = True
    for run in runs:
        equal = run.tokens == resident.tokens and np.array_equal(run.log_probs, resident.log_probs)
        same &= equal
        table.add_row(
            run.name, "yes" if equal else "NO", f"{np.exp(-run.log_probs.mean()):.3f}", f"{run.hit_rate:.2%}",
            f"{run.min_locality:.4f}", format_bytes(round(run.bytes_per_step)), f"{run.tokens_per_second:.0f}",
            format_bytes(run.device_bytes), format_bytes(run.host_bytes),
        )  # fmt: skip
    console.print(table)
    console.print(
        "equal: the same text, and the same bits in the logits of the file's next tokens, whose perplexity it is"
    )
    console.print(
        f"measured minimum locality {resident.min_locality:.4f}, guaranteed {resident.bound:.4f}: at most "
        f"{budget.query} of {budget.total} blocks are fetched per step, layer and KV head "
        f"(most seen: {runs[1].misses.max()})"
    )
    console.print(f"pictures: {out / 'loss.png'}, {out / 'locality.png'}")
    figures = {
        "loss_first": trained.losses[0],
        "loss_last_10": float(np.mean(trained.losses[-10:])),
        "validation_losses": trained.validation_losses,
        "train_tokens_per_second": trained.tokens_per_second,
        "decode": {
            run.name: {
                "hit_rate": run.hit_rate,
                "min_locality": run.min_locality,
                "bytes_per_step": run.bytes_per_step,
                "tokens_per_second": run.tokens_per_second,
                "perplexity": float(np.exp(-run.log_probs.mean())),
            }
            for run in runs
        },
    }
    (out / "demo.json").write_text(json.dumps(figures, indent=2) + "\n")
    if not same or any(run.min_locality < run.bound for run in runs):
        console.print("[bold red]the continuations differ, or the locality bound was broken: this is a bug[/]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
