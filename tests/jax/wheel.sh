#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel as `pip install .` does and uses it in a fresh environment, outside the checkout;
# then installs the checkout as `pip install -e .` does.
# usage: wheel.sh BIN, where BIN is the bin folder of an environment with requirements.txt
set -eu
cd "$(dirname "$0")/../.."
bin=$(cd "$1" && pwd)
checkout=$PWD
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
unset EPIC_LIBRARY_PATH PYTHONPATH

"$bin/pip" wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    --config-settings=cmake.define.EPIC_CUDA=OFF --wheel-dir "$away" .
set -- "$away"/*.whl
case $# in 1) ;; *) echo "$# wheels: one is needed" >&2; exit 1 ;; esac
case $1 in *-py3-none-*.whl) ;; *) echo "$1 is not for every Python" >&2; exit 1 ;; esac

"$bin/python" -m venv "$away/venv"
"$away/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "$1"
# Everything except epic comes from the environment that already has it.
"$bin/python" -c 'import site; print(site.getsitepackages()[0])' \
    >"$(echo "$away"/venv/lib/python*/site-packages)/others.pth"
cp "$checkout"/tests/jax/conftest.py "$checkout"/tests/jax/reference.py \
    "$checkout"/tests/jax/selection.py "$checkout"/tests/jax/steps.py \
    "$checkout"/tests/jax/test_steps.py \
    "$checkout"/examples/jax/ep_moe.py "$away"
cd "$away"
"$away/venv/bin/python" -c 'import epic, sys; assert epic.__file__.startswith(sys.prefix), epic'
# the wheel has its own libraries, and the MPI plugin if the build found MPI
"$away/venv/bin/epic-info" >info
grep -q "^backend mpi *$away/.*/epic/bin/../lib/libepic_mpi.so loads" info ||
    grep -q '^backend mpi *not built' info || { cat info; exit 1; }
"$away/venv/bin/python" ep_moe.py --check
"$away/venv/bin/python" -m pytest -q -p no:cacheprovider test_steps.py --each-value \
    -k "every_slot or sum"

# An editable install uses the sources of the checkout, and libraries in its own folder.
"$away/venv/bin/pip" install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    --config-settings=cmake.define.EPIC_CUDA=OFF --editable "$checkout"
"$away/venv/bin/python" - "$checkout" <<'END'
import sys
from pathlib import Path

import epic._native

epic.Layer(num_experts=8, top_k=2)
assert Path(epic.__file__).is_relative_to(sys.argv[1]), epic.__file__
for found in (epic._native.find("libepic_jax.so"), epic._native.find("epic-info", "bin")):
    assert found.is_relative_to(Path(sys.prefix).resolve()), found
epic._native.core()
END
"$away/venv/bin/epic-info" | grep -q '^epic '
