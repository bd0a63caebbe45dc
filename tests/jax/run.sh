#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests epic.jax on BUILD/lib/libepic.so with one JAX for each Python (see requirements.txt), each in a
# virtual environment of its own under build/. Prints what it leaves out because this machine lacks it.
# usage: run.sh BUILD [pytest arguments]
#   EPIC_JAX_PYTHONS  versions of Python; default: "3.13 3.11", or that of python3 if it is neither
#   EPIC_JAX_QUICK=1  runs every test without the mark `night` with the first Python only, and of its
#                     cases as many as each value of each parameter needs to occur. XLA compiles the
#                     tests without the optimizations of LLVM, which take most of the time, and the
#                     examples with them.
set -eu
cd "$(dirname "$0")/../.."
build=$(cd "$1" && pwd)
shift
export EPIC_LIBRARY_PATH="$build/lib" PYTHONPATH="$PWD/bindings/python" JAX_PLATFORMS=cpu
pins=tests/jax/requirements.txt
. tests/environments.sh
# XLA compiles a program once for all processes of this run.
export JAX_COMPILATION_CACHE_DIR="$build/jax-programs" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
rm -rf "$JAX_COMPILATION_CACHE_DIR"

environment() { # usage: environment PYTHON FOLDER
    if cmp -s $pins "$2/pins"; then return; fi
    "$1" -m venv --clear "$2" && install_packages "$2" -r $pins && cp $pins "$2/pins"
}

plugin() { # builds libepic_mpi.so, if the build has an MPI
    case $(cmake --build "$build" --target help) in
    *" epic_mpi"*) cmake --build "$build" --target epic_mpi ;;
    esac >"$build/jax.log" || { cat "$build/jax.log"; return 1; }
}

# usage: handlers PYTHON, of an environment; builds libepic_jax.so, which works with every JAX
handlers() {
    include=$("$1" -c 'import jax; print(jax.ffi.include_dir())')
    cmake -S bindings/jax -B "$build/jax" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$build/lib" \
        -DEPIC_JAX_INCLUDE="$include" -DEPIC_LIBRARY="$build/lib/libepic.so" >"$build/jax.log" ||
        { cat "$build/jax.log"; return 1; }
    cmake --build "$build/jax" >>"$build/jax.log" || { cat "$build/jax.log"; return 1; }
}

libraries() { # uses the first environment
    plugin
    handlers "$1/python"
    "$build/jax/epic_jax_frames"
}

# Uses the first environment. Each command ends with "|| return", because sh ignores set -e here.
checks() {
    # Only ruff also checks the PyTorch files: in this environment mypy does not know torch.
    "$1/ruff" check -q bindings/python tests/jax tests/torch tests/vllm examples bench tools \
        tests/pages &&
        "$1/ruff" format --check -q bindings/python tests/jax tests/torch tests/vllm examples bench tools \
            tests/pages &&
        "$1/mypy" --config-file pyproject.toml bindings/python/epic tests/jax examples/jax \
            bench/*jax*.py &&
        "$1/mypy" --config-file pyproject.toml tests/torch examples/torch bench/torch_bench.py bench/torch_host.py &&
        tests/jax/wheel.sh "$1" || return 1
    [ ! -x "$build/tests/unit/experts" ] || # numpy's OpenBLAS and scipy's
        tests/openblas.sh "$build/tests/unit/experts" \
            "$PWD/$1"/../lib/python*/site-packages/*.libs/libscipy_openblas*
}

steps=200
[ -z "${EPIC_JAX_QUICK-}" ] || steps=10
examples() { # usage: examples PYTHON; the text for the check is one that never changes
    "$1" examples/jax/ep_moe.py --check --devices 4 &&
        "$1" examples/jax/ep_moe.py --check --processes 4 &&
        "$1" examples/jax/train_text.py --check --steps "$steps" LICENSE
}

suite() { # usage: suite ENVIRONMENT, then pytest arguments
    bin=$1
    shift
    "$bin/python" -c 'import sys, jax; print("-- jax", jax.__version__, "Python", sys.version.split()[0])' &&
        "$bin/python" -m pytest -q "$@"
}

pythons=${EPIC_JAX_PYTHONS-}
if [ -z "$pythons" ]; then
    for version in 3.13 3.11; do
        if [ -n "$(interpreter $version)" ]; then
            pythons="$pythons $version"
        else
            echo "left out: there is no Python $version (with venv)"
        fi
    done
fi
if [ -z "$pythons" ] && [ -n "$(interpreter 3.12)" ]; then pythons=3.12; fi

first= others=
for version in $pythons; do
    [ -z "$first" ] || [ -z "${EPIC_JAX_QUICK-}" ] || {
        echo "left out: the tests with Python $version and its JAX (make test-jax)"
        continue
    }
    python=$(interpreter "$version")
    [ -n "$python" ] || { echo "there is no Python $version (with venv)" >&2; exit 1; }
    environment "$python" "build/venv-py$version" || continue
    if [ -z "$first" ]; then first=$version; else others="$others $version"; fi
done
check_missing
[ -n "$pythons" ] || { echo "left out: no Python of 3.11 to 3.13 (with venv) is here"; exit 0; }
[ -n "$first" ] || exit 0
failed=

# The quick run has two halves at the same time, because one suite uses only one core. The half with
# fewer tests also runs the checks and the examples.
part() { # usage: part NUMBER (of the test files, see selection.py), then pytest arguments
    which=$1
    shift
    (
        export JAX_DISABLE_MOST_OPTIMIZATIONS=1
        suite "build/venv-py$first/bin" tests/jax --each-value --part "$which" "$@"
    )
}

in_parallel() {
    wrong=0
    part 3/3 "$@" || wrong=1
    checks "build/venv-py$first/bin" || wrong=1
    examples "build/venv-py$first/bin/python" || wrong=1
    return $wrong
}

libraries "build/venv-py$first/bin"
if [ -n "${EPIC_JAX_QUICK-}" ]; then
    (in_parallel "$@") >"$build/jax-parallel.log" 2>&1 &
    other=$!
    trap 'kill $other 2>/dev/null || :' EXIT
    part 1,2/3 "$@" || failed=1
    wait $other || failed=1
    cat "$build/jax-parallel.log"
else
    checks "build/venv-py$first/bin"
    for version in $first $others; do
        suite "build/venv-py$version/bin" tests/jax "$@" || failed=1
        examples "build/venv-py$version/bin/python" || failed=1
    done
fi
[ -z "$failed" ] || { echo "the tests of epic.jax failed"; exit 1; }
