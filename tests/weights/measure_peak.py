"""Resident memory while a checkpoint is loaded, in its own process: `python measure_peak.py FOLDER`."""

import gc
import json
import sys

import jax
import jax.numpy as jnp

from nosa_jax import NosaLM
from nosa_jax.checkpoint import split_model


def resident(key: str) -> int:
    """Bytes of a field of this process's status."""
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(f"{key}:"))


def main() -> None:
    folder = sys.argv[1]
    jax.block_until_ready(jnp.ones(8) + 1)  # the backend is there before anything is measured
    results = []
    for dtype in (None, None, "float32"):  # what the first run loads of libraries is not the checkpoint's
        gc.collect()
        before = resident("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak so far
        model = NosaLM.from_pretrained(folder, dtype=dtype)
        peak = resident("VmHWM")
        parameters = sum(p.nbytes for p in split_model(model)[1].values())
        results.append({"before": before, "peak": peak, "parameters": parameters})
        del model
    print(json.dumps(results[1:]))


main()
