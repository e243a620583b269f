#!/usr/bin/env bash
# Everything that needs a GPU, in one go: build, tests, memory and race checkers, benchmarks.
#   benchmarks/gpu_lane.sh OUT          with the environment made by `make setup` plus the cuda extra
#   PYTHON=python3 benchmarks/gpu_lane.sh OUT   with another interpreter that has JAX for CUDA and the test tools
# Steps may be named to run only those: STEPS="build tests" benchmarks/gpu_lane.sh OUT
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: benchmarks/gpu_lane.sh OUT}
mkdir -p "$out"
python=${PYTHON:-.venv/bin/python}
steps=${STEPS:-build tests suite sanitize swap decode kernels parity throughput}
failed=()

step() { # name, command...
  local name=$1
  shift
  [[ " $steps " == *" $name "* ]] || return 0
  echo "== $name"
  local start=$SECONDS
  if "$@" >"$out/$name.log" 2>&1; then echo "ok in $((SECONDS - start)) s"; else failed+=("$name"); echo "FAILED"; fi
  tail -n 15 "$out/$name.log"
}

build() {
  # The architecture of this machine alone: a GPU lane has no use for the others.
  local arch
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=${arch}-real" \
    "$python" -m pip install --quiet --no-build-isolation --no-deps --editable .
  "$python" -c 'import jax, nosa_jax.ffi as f; print(f.status(), jax.devices()); assert f.has_cuda()'
}
tests() { "$python" -m pytest -m gpu --durations=10 tests/ffi tests/kernels tests/offload tests/infer; }
sanitize() {
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  local check=(--error-exitcode 9 "$python" -m pytest -m gpu --timeout 0 -q)
  compute-sanitizer --tool memcheck "${check[@]}" tests/ffi/test_transfers.py tests/ffi/test_assign_slots.py \
    tests/ffi/test_fetch_store.py \
    -k "bit_exact or counts_are_exact or first_step or repeats_count or wanted_slots or fresh_blocks or any_number" &&
    # The kernels that share memory between threads.
    compute-sanitizer --tool racecheck "${check[@]}" tests/ffi/test_assign_slots.py \
      -k "first_step or repeats_count or wanted_slots or fresh_blocks"
}
suite() { # the tests that run anywhere, with this GPU as the default device
  XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -m pytest -n 8 -p no:benchmark -m "not slow and not gpu" tests/offload tests/infer
}
decode() { "$python" benchmarks/decode_step.py --out "$out"; }
swap() { "$python" benchmarks/swap.py --out "$out"; }
kernels() { "$python" benchmarks/kernels.py --out "$out"; }
parity() { "$python" benchmarks/model_parity.py --out "$out"; }
throughput() { # NOSA-8B with random weights, the locality of a trained model replayed, within 24 GiB beside the weights
  "$python" -m nosa_jax.infer.bench throughput --device-budget 24GiB --contexts 16384 98304 --batches 16 0 --out "$out"
}

step build build
step tests tests
step suite suite
step sanitize sanitize
step swap swap
step decode decode
step kernels kernels
step parity parity
step throughput throughput
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}"; exit 1; }
