#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Trains a tiny Mixture-of-Experts model with MaxText on four CPU devices, once with MaxText's own experts
# and once with examples/jax/maxtext_train.py, and compares the losses of all steps. It is not a part
# of `make test`, because MaxText needs many packages.
# usage: maxtext.sh BUILD
set -eu
cd "$(dirname "$0")/../.."
build=$(cd "$1" && pwd)
. tests/environments.sh
pins=tests/jax/maxtext.txt
python=$(interpreter 3.12)
[ -n "$python" ] || { echo "left out: there is no Python 3.12 (with venv)"; exit 0; }
venv=$build/venv-maxtext
if ! cmp -s $pins "$venv/pins"; then
    "$python" -m venv --clear "$venv"
    install_packages "$venv" --no-deps -r $pins || { check_missing; exit 0; }
    cp $pins "$venv/pins"
fi
export EPIC_LIBRARY_PATH="$build/lib" PYTHONPATH="$PWD/bindings/python" JAX_PLATFORMS=cpu
include=$("$venv/bin/python" -c 'import jax; print(jax.ffi.include_dir())')
cmake -S bindings/jax -B "$build/jax" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$build/lib" \
    -DEPIC_JAX_INCLUDE="$include" -DEPIC_LIBRARY="$build/lib/libepic.so" >"$build/jax.log" &&
    cmake --build "$build/jax" >>"$build/jax.log" || { cat "$build/jax.log"; exit 1; }
exec timeout -k 5 600 "$venv/bin/python" tests/jax/train_maxtext.py
