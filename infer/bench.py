"""The command `nosa-bench`: decode throughput beside its floors, serving, and traces of what a model selects."""

import sys

import tyro

from nosa_jax.errors import InputError
from nosa_jax.ffi import HostMemoryError
from nosa_jax.infer import bench_serve, bench_throughput, bench_trace
from nosa_jax.infer.bench_cases import targets
from nosa_jax.infer.bench_options import ThroughputOptions
from nosa_jax.infer.bench_output import show
from nosa_jax.infer.bench_report import table
from nosa_jax.infer.bench_serve import ServeOptions
from nosa_jax.infer.bench_trace import TraceOptions
from nosa_jax.infer.cli_output import WriteError, discard_output
from nosa_jax.offload import OutOfPagesError

USAGE = """usage: nosa-bench throughput [options]   time decode steps of the compared systems
       nosa-bench serve [options]        serve requests that come and go with some of them
       nosa-bench trace [options]        record what a model selects, to be replayed
Each lists its options with --help."""


def main() -> int:
    """Entry point.

    Returns 0; 1 if nothing could be measured, a request failed or a result could not be written; 2 for bad input; 130
    when interrupted.
    """
    command, *arguments = sys.argv[1:] or [""]
    if command not in ("throughput", "serve", "trace"):
        print(USAGE, file=sys.stderr)
        return 0 if command in ("-h", "--help") else 2
    prog = f"nosa-bench {command}"
    try:
        if command == "trace":
            bench_trace.run(tyro.cli(TraceOptions, args=arguments, prog=prog))
        elif command == "serve":
            return bench_serve.main(tyro.cli(ServeOptions, args=arguments, prog=prog))
        else:
            return _throughput(tyro.cli(ThroughputOptions, args=arguments, prog=prog))
    except HostMemoryError as error:
        options = "--rows or --context" if command == "trace" else "--host-budget"
        print(f"nosa-bench: {error} Lower {options}.", file=sys.stderr)
        return 2
    except WriteError as error:
        print(f"nosa-bench: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has enough
        discard_output()
        return 1
    except OSError as error:  # stdout is on a full disk, say
        discard_output()
        print(f"nosa-bench: {error}", file=sys.stderr)
        return 1
    except (InputError, MemoryError, OutOfPagesError) as error:
        print(f"nosa-bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nnosa-bench: interrupted", file=sys.stderr)
        return 130
    return 0


def _throughput(options: ThroughputOptions) -> int:
    results, made_with = bench_throughput.run(options)
    show(table(results))
    for origin in dict.fromkeys(r.locality for r in results):
        print(f"selection of {', '.join(dict.fromkeys(r.system for r in results if r.locality == origin))}: {origin}")
    shared = max((r.shared_pages for r in results), default=1.0)
    if shared > 1:
        print(f"host pages are shared, by up to {shared:.1f} blocks each: what is moved is the same")
    for target in targets(results):
        print(target)
    if made_with["left_out"]:
        print(f"left out: {len(made_with['left_out'])} rows")
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
