#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds libepic_jax.so beside BUILD/lib/libepic.so and tests it with each JAX.  One library serves
# them all: it is compiled on the header of the first.  An interpreter that is missing is said.
# usage: run.sh BUILD [pytest arguments]
set -eu
cd "$(dirname "$0")/../.."
build=$(cd "$1" && pwd)
shift
pairs=${EPIC_JAX_PAIRS:-"0.10.2:3.11 0.12:3.13"} # of JAX and Python
export EPIC_LIBRARY_PATH="$build/lib" PYTHONPATH="$PWD/bindings/python" JAX_PLATFORMS=cpu

works() { "$1" -c "import sys; assert sys.version_info[:2] == tuple(map(int, '$2'.split('.')))" 2>/dev/null; }

interpreter() { # of a version; prints nothing if there is none
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if works "$candidate" "$1"; then
            echo "$candidate"
            return
        fi
    done
}

environment() { # jax python: sees to build/venv-jaxJAX
    venv=build/venv-jax$1
    wanted="jax==$1.* numpy pytest ruff mypy flatbuffers"
    case $1 in *.*.*) wanted="jax==$1 numpy pytest ruff mypy flatbuffers" ;; esac
    [ "$(cat "$venv/wanted" 2>/dev/null)" != "$wanted" ] || return 0
    "$2" -m venv --clear "$venv"
    # shellcheck disable=SC2086
    "$venv/bin/pip" install --quiet $wanted
    echo "$wanted" >"$venv/wanted"
}

handlers() { # python of an environment
    include=$("$1" -c 'import jax; print(jax.ffi.include_dir())')
    cmake -S bindings/jax -B "$build/jax" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$build/lib" \
        -DEPIC_JAX_INCLUDE="$include" -DEPIC_LIBRARY="$build/lib/libepic.so" >"$build/jax.log" ||
        { cat "$build/jax.log"; return 1; }
    cmake --build "$build/jax" >>"$build/jax.log" || { cat "$build/jax.log"; return 1; }
}

built=
mkdir -p build
for pair in $pairs; do
    jax=${pair%%:*} python=$(interpreter "${pair##*:}")
    if [ -z "$python" ]; then
        echo "left out: jax $jax, as there is no Python ${pair##*:}"
        continue
    fi
    environment "$jax" "$python"
    bin=build/venv-jax$jax/bin
    if [ -z "$built" ]; then
        handlers "$bin/python"
        "$build/jax/epic_jax_frames"
        built=yes
        "$bin/ruff" check -q bindings/python tests/jax examples/jax
        "$bin/mypy" --config-file pyproject.toml bindings/python/epic
    fi
    echo "-- jax $jax, Python ${pair##*:}"
    "$bin/python" -m pytest -q tests/jax "$@"
    for options in "--devices 4" "--processes 4"; do
        # shellcheck disable=SC2086
        "$bin/python" examples/jax/ep_moe.py --check $options
    done
done
