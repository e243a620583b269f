"""The options of `nosa-bench throughput`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nosa_jax.infer.systems import SYSTEMS


@dataclass(frozen=True)
class ThroughputOptions:
    """Time decode steps of several systems, contexts and batches within a device budget."""

    model: str = "nosa_8b"
    """nosa_8b, nosa_1b or tiny with random weights; a config.json, or a folder with no weights beside it, for random
    weights of that shape; or the folder of a checkpoint."""
    layers: int | None = None
    """Only so many layers of a preset or a config file."""
    suite: Literal["targets"] | None = None
    """targets: the rows of the project's targets, the most important first, and what they show. Overrides the sizes."""
    cases: tuple[str, ...] = ()
    """Rows to measure, in this order: SYSTEM:CONTEXT:ROWS, like nosa:64K:16 or dense:96K:max,budget=24GiB (K is 1024,
    M is 1024 K); further options are locality=weights|published|MISSES, steps=N (of a dispatch) and overlap=on|off.
    Overrides the sizes."""
    contexts: tuple[int, ...] = (16_384, 65_536)
    """Tokens per row."""
    batches: tuple[int, ...] = (16, 32, 64)
    """Rows. 0 stands for as many as the budget holds."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """nosa, infllmv2 (picks by score alone) and dma (by the eviction head alone) have 2C slots, with -c exactly C, with
    -resident one for every block; dense attends to every block, all of them on the device."""
    device_budget: str | None = None
    """For the cache and a step's workspace, beside the weights, like 24GiB."""
    host_budget: str = "16GiB"
    """At most so much for host pages; no more than the largest row needs is taken. Rows share pages where they need
    more, which does not change what is moved. With --prompt-file they cannot, and what needs more is left out."""
    prompt_file: tuple[str, ...] = ()
    """Fill caches by reading the text of these files instead of at random, a stretch of it for each row. Selection is
    by what was read with --locality weights."""
    tokenizer: str | None = None
    """For --prompt-file: "bytes", or the path of a tokenizer.json. Default: the model's own."""
    locality: Literal["published", "weights"] | None = None
    """Of systems without a trace. published: NOSA replays a synthetic trace with the misses measured for NOSA-8B, and
    the others select by the weights. weights: all do. Default: published for models that select 64 blocks, for which
    alone there is such a measurement, else weights."""
    trace: tuple[Path, ...] = ()
    """Files of nosa-bench trace to replay, one for each system that selects."""
    steps_per_dispatch: tuple[int, ...] = (8,)
    """Decode steps of one program; each number is a row of its own."""
    overlap: tuple[Literal["off", "on"], ...] = ("off",)
    """Whether attention begins while missing blocks arrive; each is a row of its own."""
    steps: int = 128
    """Steps of a round."""
    rounds: int = 3
    """Rounds, of which the median counts."""
    seconds: float = 3600.0
    """Begin no further row when they are over, or when the next one would likely end after them."""
    compile_together: int = 4
    """Programs that are compiled at the same time, before the first of their rows is measured."""
    xla_options: tuple[str, ...] = ()
    """Compiler options to try, as NAME=VALUE, like xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL."""
    rows_limit: int = 4096
    """Rows tried at most for batch 0."""
    out: Path | None = None
    """Folder for throughput.json, which grows row by row, and throughput.png."""
