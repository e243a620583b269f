#!/usr/bin/env bash
# Everything that needs a GPU, in one go: build, tests, benchmarks, memory and race checkers.
#   benchmarks/gpu_lane.sh OUT          with the environment made by `make setup` plus the cuda extra
#   PYTHON=python3 benchmarks/gpu_lane.sh OUT   with another interpreter that has JAX for CUDA and the test tools
# Steps run in the order of their importance, each with a time limit of its own, so that one which hangs costs no other.
# Logs and results lie in OUT as they come. To run some steps only, and to end in time:
#   STEPS="build throughput kernels" LANE_SECONDS=580 benchmarks/gpu_lane.sh OUT
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:?usage: benchmarks/gpu_lane.sh OUT}")
mkdir -p "$out"
python=${PYTHON:-.venv/bin/python}
steps=${STEPS:-build tests throughput profile kernels parity swap decode prefill plan sanitize suite shapes pools serving whole_prefill}
lane_seconds=${LANE_SECONDS:-7200}
results=()
export out python

step() { # name, most seconds
  local name=$1 limit=$2 start=$SECONDS left=$((lane_seconds - SECONDS)) status
  [[ " $steps " == *" $name "* ]] || return 0
  if ((left < 20)); then
    results+=("$name: not begun, no time left")
    return 0
  fi
  ((limit = left < limit ? left : limit))
  echo "== $name (at most $limit s)"
  SECONDS_LEFT=$limit timeout --kill-after=10 "$limit" bash -uo pipefail -c "$name" >"$out/$name.log" 2>&1
  status=$?
  case $status in
    0) results+=("$name: ok in $((SECONDS - start)) s") ;;
    124 | 137) results+=("$name: FAILED, not done within $limit s") ;;
    *) results+=("$name: FAILED with status $status after $((SECONDS - start)) s") ;;
  esac
  tail -n "${TAIL:-25}" "$out/$name.log"
  echo "${results[-1]}"
}

build() {
  # The architecture of this machine alone: a GPU lane has no use for the others.
  local arch
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=${arch}-real" \
    "$python" -m pip install --quiet --no-build-isolation --no-deps --editable . &&
    "$python" -c 'import jax, nosa_jax.ffi as f; print(f.status(), jax.devices()); assert f.has_cuda()'
}
tests() { # most of their time is compiling: several processes share the GPU
  XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -m pytest -p no:benchmark -n "${WORKERS:-12}" -m gpu --durations=10 \
    tests/ffi tests/offload tests/kernels tests/infer --deselect tests/infer/test_plan_on_gpu.py
}
throughput() { # NOSA-8B with random weights and the published locality; room is left to end before the limit
  "$python" -m nosa_jax.infer.bench throughput --suite targets --seconds $((SECONDS_LEFT - 15)) --out "$out"
}
profile() { # few layers compile soon, and a layer is like the others
  local rows
  for rows in 16 64; do
    "$python" benchmarks/decode_profile.py --layers 4 --rows "$rows" --graphs default --out "$out/profile_$rows" || return
  done
}
kernels() { "$python" benchmarks/kernels.py --seconds $((SECONDS_LEFT - 15)) --out "$out"; }
parity() { "$python" benchmarks/model_parity.py --out "$out"; }
swap() { "$python" benchmarks/swap.py --out "$out"; }
decode() { "$python" benchmarks/decode_step.py --out "$out"; }
prefill() { "$python" benchmarks/prefill.py --seconds $((SECONDS_LEFT - 30)) --out "$out"; }
whole_prefill() { # all layers of the 8B shape: how long a prompt of 128K tokens takes, and what memory
  local prefill=("$python" benchmarks/prefill.py --layers 32 --contexts 131072 --rounds 1)
  "${prefill[@]}" --systems nosa --chunks 0 2048 8192 --out "$out/whole_prefill" &&
    "${prefill[@]}" --systems dense --chunks 0 --out "$out/whole_prefill_dense"
}
plan() { XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -m pytest -m gpu -s tests/infer/test_plan_on_gpu.py; }
sanitize() { # all of it, whatever one of them finds
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  local status=0 check=(--error-exitcode 9 "$python" -m pytest -p no:benchmark -m gpu --timeout 0 -q)
  compute-sanitizer --tool memcheck "${check[@]}" tests/ffi/test_transfers.py tests/ffi/test_assign_slots.py \
    tests/ffi/test_fetch_store.py tests/offload/test_append.py tests/offload/test_overlap.py \
    -k "bit_exact or counts_are_exact or first_step or repeats_count or wanted_slots or fresh_blocks or any_number \
or one_launch and not 70" || status=$?
  # The kernels that share memory between threads.
  compute-sanitizer --tool racecheck "${check[@]}" tests/ffi/test_assign_slots.py tests/ffi/test_fetch_store.py \
    tests/ffi/test_cuda.py \
    -k "first_step or repeats_count or wanted_slots or fresh_blocks or any_number or listed_as_nothing" || status=$?
  # A process for each kernel. Over sparse attention compute-sanitizer itself ends by a segmentation fault.
  local kernel
  for kernel in decode_attention pooled_scores select_blocks; do
    compute-sanitizer --tool memcheck "${check[@]}" "tests/kernels/test_$kernel.py" \
      -k "negative_position or two_runs_are_bit_equal or every_length" || status=$?
  done
  return "$status"
}
shapes() { # other sizes than the 8B one; those of 3B are not published, so the file's are made up between the others'
  local model
  for model in nosa_1b benchmarks/shape_3b.json; do
    "$python" -m nosa_jax.infer.bench throughput --model "$model" --seconds $((SECONDS_LEFT / 2 - 15)) \
      --cases nosa:64K:16,overlap=on nosa:64K:64,overlap=on dense:64K:16 nosa:96K:max,budget=24GiB,overlap=on \
      dense:96K:max,budget=24GiB --steps-per-dispatch 1 --out "$out/shape_$(basename "$model" .json)" || return
  done
}
pools() { # whether reads and decode steps depend on how much host memory the blocks are spread over, and how it was pinned
  nvcc -std=c++17 -O3 -arch=native benchmarks/host_mapping.cu -o "$out/host_mapping" &&
    "$out/host_mapping" >"$out/host_mapping.json" && cat "$out/host_mapping.json" || return
  local gib
  for gib in 1 4 16 48; do
    "$python" benchmarks/decode_profile.py --layers 4 --rows 16 --overlap --graphs default --host-budget-gib "$gib" \
      --out "$out/pool_$gib" || return
  done
}
serving() { # whole engines: prompts are read, rows come and go
  "$python" -m nosa_jax.infer.bench serve --systems nosa dense --requests 32 --rows 0 --prompt-tokens 8192 16384 \
    --new-tokens 768 1536 --device-budget 24GiB --out "$out"
}
suite() { # the tests that run anywhere, with this GPU as the default device; slow ones too, but for those about time or
  # the command line, and those of the plan, which has tests of its own on a GPU
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  local status=0 run=("$python" -m pytest -n 8 -p no:benchmark --durations=10 tests/offload tests/infer)
  "${run[@]}" -m "not slow and not gpu" || status=$?
  "${run[@]}" -m "slow and not gpu" -k "not soak and not workspace and not by_command" || status=$?
  return "$status"
}
export -f build tests throughput profile kernels parity swap decode prefill plan sanitize suite shapes pools serving \
  whole_prefill

step build 240
step tests 420
step throughput 330
step profile 150
step kernels 300
step parity 180
step swap 120
step decode 90
step prefill 270
step plan 240
step sanitize 300
step suite 600
step shapes 420
step pools 300
step serving 500
step whole_prefill 300
printf '%s\n' "${results[@]}" | tee "$out/lane.txt"
! printf '%s\n' "${results[@]}" | grep -q FAILED
