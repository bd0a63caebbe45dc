#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests epic.torch on BUILD/lib with each torch of requirements.txt: all tests with the first, and with
# the others the tests that depend on the version. Prints what it leaves out because this machine lacks
# it.
# usage: run.sh BUILD [pytest arguments]
#   EPIC_TORCH_ALL=1    runs all tests, also those with the mark `night`, with each torch
#   EPIC_TORCH_QUICK=1  runs nothing with the others, because another torch is 7 GB of packages
set -eu
cd "$(dirname "$0")/../.."
build=$(cd "$1" && pwd)
shift
. tests/torch/environments.sh

failed=
first=1
which=--each-value
[ -z "${EPIC_TORCH_ALL-}" ] || which=
grep -v '^#' tests/torch/requirements.txt >"$build/torch-environments"
while read -r version pins; do
    if [ -z "$first" ] && [ -n "${EPIC_TORCH_QUICK-}" ]; then
        echo "left out: the tests with ${pins%% *} (make test-torch)"
        continue
    fi
    python=$(interpreter "$version")
    [ -n "$python" ] || { echo "left out: there is no Python $version (with venv)"; continue; }
    folder=$(folder_of "$pins")
    environment "$python" "$folder" "$pins" </dev/null || continue
    "$folder/bin/python" -c 'import sys, torch; print("-- torch", torch.__version__, "Python", sys.version.split()[0])'
    if [ -n "$first" ] || [ -n "${EPIC_TORCH_ALL-}" ]; then
        "$folder/bin/python" -m pytest -q tests/torch $which "$@" </dev/null || failed=1
        "$folder/bin/python" examples/torch/ep_moe.py --check --processes 4 </dev/null || failed=1
        "$folder/bin/python" examples/torch/train_text.py --check --steps 30 LICENSE </dev/null ||
            failed=1
        first=
    else
        "$folder/bin/python" -m pytest -q tests/torch/test_autograd.py tests/torch/test_compiled.py \
            tests/torch/test_imports.py tests/torch/test_transforms.py --one-case \
            -k "not inductor and not float64 and not apart" "$@" </dev/null || failed=1
    fi
done <"$build/torch-environments"
[ -z "$failed" ] || exit 1
check_missing
