"""The commands as they are begun: Ctrl-C in the seconds of importing JAX and others ends them at once, without a word.

Until a command's own code is there to answer an interrupt, one would come up as a traceback from within some module, or
be swallowed there.
"""

import importlib
import signal


def _run(module: str) -> int:
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # neither ignored, as under nohup, nor somebody's own
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = importlib.import_module(module).main
    signal.signal(signal.SIGINT, usual)
    return main()


def train() -> int:
    """`nosa-train`."""
    return _run("nosa_jax.train.__main__")


def generate() -> int:
    """`nosa-generate`."""
    return _run("nosa_jax.infer.__main__")


def export() -> int:
    """`nosa-export`."""
    return _run("nosa_jax.export")


def bench() -> int:
    """`nosa-bench`."""
    return _run("nosa_jax.infer.bench")
