#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests the adapters for Megatron-Core and torchtitan, and training with trainers, against the packages
# of adapters.txt, with the first torch of requirements.txt.  Prints what it leaves out because it
# cannot be installed.
# usage: adapters.sh BUILD [pytest arguments]
set -eu
cd "$(dirname "$0")/../.."
build=$(cd "$1" && pwd)
shift
. tests/torch/environments.sh

grep -v '^#' tests/torch/requirements.txt | head -n 1 >"$build/torch-environments"
read -r version pins <"$build/torch-environments"
python=$(interpreter "$version")
[ -n "$python" ] || { echo "left out: there is no Python $version (with venv)"; exit 0; }
base=$(folder_of "$pins")
environment "$python" "$base" "$pins" </dev/null || { check_missing; exit 0; }

# An environment on top of that one: torch is not installed twice.
wanted=tests/torch/adapters.txt
venv=$build/venv-torch-adapters
if ! cmp -s $wanted "$venv/pins"; then
    "$python" -m venv --clear "$venv"
    ls -d "$base"/lib/python*/site-packages >"$(ls -d "$venv"/lib/python*/site-packages)/base.pth"
    WITHOUT_UV=1 install_packages "$venv" -r $wanted || { check_missing; exit 0; }
    cp $wanted "$venv/pins"
fi

handlers() { # libepic_jax.so, as tests/jax/run.sh makes it
    include=$("$venv/bin/python" -c 'import jax; print(jax.ffi.include_dir())')
    cmake -S bindings/jax -B "$build/jax" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$build/lib" \
        -DEPIC_JAX_INCLUDE="$include" -DEPIC_LIBRARY="$build/lib/libepic.so" &&
        cmake --build "$build/jax"
}

handlers >"$build/jax.log" 2>&1 || { cat "$build/jax.log"; exit 1; }
failed=
"$venv/bin/python" -m pytest -q tests/torch/test_megatron.py tests/torch/test_titan.py \
    tests/torch/test_trainers.py tests/torch/test_jax_bits.py tests/torch/test_torchao.py "$@" || failed=1
for example in megatron_moe titan_moe; do
    "$venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 4 \
        examples/torch/$example.py --check || failed=1
done
[ -z "$failed" ] || exit 1
