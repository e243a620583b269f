#!/usr/bin/env bash
# Makes .venv with everything pinned in constraints.txt and installs this checkout into it, editable.
#   scripts/setup.sh           does nothing when the environment is up to date
#   scripts/setup.sh --force   installs again
# Finds Python >= 3.12 by itself; NOSA_PYTHON=/path/to/python names one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fingerprint() { # of everything that decides what is installed
  { cat pyproject.toml constraints.txt CMakeLists.txt scripts/setup.sh
    find ffi/csrc -type f -print0 | sort -z | xargs -0 cat
    find nosa_jax ffi infer offload pallas_kernels train -name '__init__.py' -print | sort
    command -v nvcc || true
    pwd
  } | sha256sum | cut -d' ' -f1
}

is_recent() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() { # prints the first usable interpreter; 3.12 first: the pins were made with it
  local version candidate
  if [[ -n "${NOSA_PYTHON:-}" ]]; then
    is_recent "$NOSA_PYTHON" && { echo "$NOSA_PYTHON"; return; }
    echo "NOSA_PYTHON=$NOSA_PYTHON is no Python >= 3.12 with venv and ensurepip" >&2
    return 1
  fi
  for version in 3.12 3.13 3.14; do
    for candidate in $(type -ap "python$version") \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python /opt/python*/"$version"*/bin/python; do
      is_recent "$candidate" && { echo "$candidate"; return; }
    done
  done
  for candidate in $(type -ap python3 python); do
    is_recent "$candidate" && { echo "$candidate"; return; }
  done
  if command -v uv >/dev/null && uv python install 3.12 >&2; then
    uv python find 3.12 && return
  fi
  echo "No Python >= 3.12 found on PATH or in pyenv's versions folder, and uv could not fetch one." \
    "Install Python 3.12 (Debian: apt-get install python3.12-venv; or: pip install uv) or set NOSA_PYTHON." >&2
  return 1
}

link_typing() { # the installed layout as links, for the type checker and editors
  mkdir -p build/typing/nosa_jax
  find build/typing/nosa_jax -mindepth 1 -delete
  local item
  for item in nosa_jax/*; do
    [[ $item == *__pycache__ ]] || ln -s "../../../$item" build/typing/nosa_jax/
  done
  for item in ffi infer offload pallas_kernels train; do
    ln -s "../../../$item" "build/typing/nosa_jax/$item"
  done
}

link_typing
[[ ${1:-} == --links ]] && exit 0
print_status() { .venv/bin/python -c 'import nosa_jax.ffi as f; print(f.status())'; }

stamp=build/setup.stamp
if [[ ${1:-} != --force && -x .venv/bin/python && -f $stamp && "$(cat $stamp)" == "$(fingerprint)" ]]; then
  exit 0
fi

rm -f $stamp
if ! { [[ -x .venv/bin/python ]] && is_recent .venv/bin/python; }; then
  python=$(find_python)
  echo "set-up: making .venv with $python ($("$python" --version))"
  "$python" -m venv --clear .venv
fi
# Nothing is byte-compiled in advance: most modules are never imported. Only errors are shown.
install=(.venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt)
echo "set-up: installing pinned packages (a few minutes the first time)"
"${install[@]}" scikit-build-core nanobind jax cmake ninja
# Without build isolation the extension compiles against the very jaxlib that will load it, and needs no second copy.
"${install[@]}" --no-build-isolation --editable '.[dev]'
fingerprint >$stamp
echo "set-up: $(.venv/bin/python --version) from $(.venv/bin/python -c 'import sys; print(sys.base_prefix)'); $(print_status)"
