"""`python -m nosa_jax.train`, installed as `nosa-train`."""

import logging
import sys
import warnings
from collections.abc import Sequence

import tyro
from rich.console import Console

from nosa_jax.errors import InputError
from nosa_jax.train.config import TrainConfig
from nosa_jax.train.errors import RunFailure
from nosa_jax.train.loop import train

_INTERRUPTED = 130  # what shells report for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Train from the command line. Returns 0; 1 where the run broke; 2 for bad input; 130 when interrupted."""
    for name in ("absl", "asyncio"):  # orbax and its tasks log tracebacks of failures that are reported below
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        config = tyro.cli(TrainConfig, args=argv, prog="nosa-train")
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"nosa-train: {message}", file=sys.stderr)
            result = train(config)
    except SystemExit as request:  # tyro has printed its help or what is wrong with the arguments
        return request.code if isinstance(request.code, int) else 2
    except InputError as error:
        print(f"nosa-train: {error}", file=sys.stderr)
        return 2
    except RunFailure as error:
        print(f"nosa-train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nosa-train: interrupted; checkpoints that were complete by now remain", file=sys.stderr)
        return _INTERRUPTED
    speeds = ", ".join(f"{kind} {rate:,.0f} tokens/s" for kind, rate in result.tokens_per_second.items())
    parts = (f"step {result.step}", speeds, str(result.out))
    Console(stderr=True).print("  ".join(filter(None, parts)), highlight=False, soft_wrap=True, markup=False)
    return _INTERRUPTED if result.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
