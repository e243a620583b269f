"""The Pallas kernels against their floors and against the best alternative on the same GPU, in one run.

    python benchmarks/kernels.py [--parts attention scores ...] [--seconds 300] --out benchmarks/results
    python benchmarks/kernels.py --small --kernel reference        # anywhere: all of it, up to the kernels

Shapes are those of NOSA-8B (32 query heads, 2 KV heads, head dimension 128, blocks of 64 tokens, 64 selected) in
bfloat16. A floor is bytes over the memory bandwidth or operations over the matrix rate, both measured first. Every part
runs in a process of its own. Writes kernels.json after each part, and kernels.png.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_append
import kernel_decode
import kernel_sequence
import tyro
from kernel_bench import Bench, Options, OutOfTimeError
from kernel_plot import plot
from timing import matmul_rate

from nosa_jax.infer.environment import environment
from nosa_jax.infer.rates import measure_rates

PARTS: dict[str, Callable[[Bench], None]] = {  # the most important first
    "scores": kernel_decode.scores,
    "selection": kernel_decode.selection,
    "attention": kernel_decode.attention,
    "append": kernel_append.append,
    "sequence_attention": kernel_sequence.attention,
    "dense_decode": kernel_decode.dense_decode,
    "sequence_scores": kernel_sequence.scores,
}
GRACE_SECONDS = 30.0  # for the case that a part has begun when its time is over
SMALL_SIZES: dict[str, Any] = dict(rows=(2,), contexts=(256, 512), lengths=(512,))


def run_here(options: Options) -> dict[str, Any]:
    """Measure the parts in this process: figures, what failed, and what there was no time for."""
    deadline = time.monotonic() + options.seconds
    if options.rates:
        bandwidth, matmul = options.rates
    else:
        bandwidth, matmul = measure_rates().memory, matmul_rate(256 if options.small else 8192)
        print(f"memory {bandwidth / 1e12:.2f} TB/s, matrix products {matmul / 1e12:.3g} TFLOP/s", flush=True)
    left_out: list[str] = []
    made_with = {
        "environment": environment(),
        "selection": f"synthetic: {options.changed_picks} of the blocks picked by query change from token to token",
        "kernel": options.kernel,
        "small": options.small,
        "bytes_per_second": bandwidth,
        "operations_per_second": matmul,
    }

    def report(bench: Bench) -> dict[str, Any]:
        return made_with | {"figures": bench.figures, "failures": bench.failures, "left_out": left_out}

    bench = Bench(options, bandwidth, matmul, deadline, keep=lambda bench: write(report(bench), options.out))
    for name in options.parts:
        try:
            PARTS[name](bench)
        except OutOfTimeError as error:
            left_out.append(f"{name}, from {error} on: no time left")
            print(left_out[-1], flush=True)
        except Exception as error:  # one part must not take the others along
            bench.failures.append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc()
    return report(bench)


def write(report: dict[str, Any], folder: Path) -> None:
    """What there is so far, whole or not at all."""
    part = folder / "kernels.json.part"
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(folder / "kernels.json")


def run_apart(name: str, options: Options, seconds: float) -> dict[str, Any]:
    """Measure one part in a process of its own, which is ended when it takes longer than it may.

    It writes what it has after every case, so that nothing measured is lost then.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--no-isolate",
            "--parts",
            name,
            "--seconds",
            str(seconds),
            "--out",
            folder,
        ]
        command += ["--kernel", options.kernel, "--changed-picks", str(options.changed_picks)]
        for sizes in ("rows", "contexts", "lengths"):
            command += [f"--{sizes}", *map(str, getattr(options, sizes))]
        command += ["--small"] if options.small else []
        command += ["--rates", *map(str, options.rates)] if options.rates else []
        try:
            code = subprocess.run(command, timeout=seconds + GRACE_SECONDS, check=False).returncode
            problems = [] if code in (0, 1) else [f"{name}: ended with status {code}"]
        except subprocess.TimeoutExpired:
            problems = [f"{name}: did not end within {seconds + GRACE_SECONDS:.0f} s"]
        file = Path(folder) / "kernels.json"
        if not file.exists():
            return {"figures": [], "failures": problems or [f"{name}: ended without a result"], "left_out": []}
        report = json.loads(file.read_text())
    return report | {"failures": report["failures"] + problems}


def merge(total: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Both reports as one; of what is said once, the first counts."""
    lists = {name: total.get(name, []) + part[name] for name in ("figures", "failures", "left_out")}
    return part | total | lists


def main() -> int:
    """Time what was asked for and write the figures; 1 if something failed."""
    options = tyro.cli(Options, description=__doc__)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        print(f"kernels: unknown parts {', '.join(unknown)}; known: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    options = dataclasses.replace(options, parts=options.parts or tuple(PARTS))
    if options.small:
        default = Options()
        sizes = {k: v for k, v in SMALL_SIZES.items() if getattr(options, k) == getattr(default, k)}
        options = dataclasses.replace(options, **sizes)
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {}
    end = time.monotonic() + options.seconds
    for names in [(name,) for name in options.parts] if options.isolate else [options.parts]:
        left = end - time.monotonic()
        if left <= 0:
            part = {"figures": [], "failures": [], "left_out": [f"{', '.join(names)}: no time left"]}
        elif options.isolate:
            part = run_apart(names[0], options, min(left, options.part_seconds))
            if options.rates is None and "bytes_per_second" in part:
                options = dataclasses.replace(options, rates=(part["bytes_per_second"], part["operations_per_second"]))
        else:
            part = run_here(options)
        report = merge(report, part)
        write(report, options.out)
    plot(report["figures"], options.kernel, options.out / "kernels.png")
    for line in report["failures"]:
        print(f"FAILED {line[:300]}")
    for line in report["left_out"]:
        print(f"left out: {line}")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
