#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests epic.torch on BUILD/lib with each torch of requirements.txt: all tests with the first, and with
# the others the tests that depend on the version. Prints what it leaves out because this machine lacks
# it.
# usage: run.sh BUILD [pytest arguments]
#   EPIC_TORCH_ALL=1    runs all tests, also those with the mark `night`, with each torch
#   EPIC_TORCH_QUICK=1  runs two halves at the same time, because most tests wait for processes, and
#                       nothing with the others, because another torch is 7 GB of packages
set -eu
cd "$(dirname "$0")/../.."
build=$(cd "$1" && pwd)
shift
. tests/torch/environments.sh

part() { # usage: part PART (of the test files, see tests/jax/selection.py), then pytest arguments
    files=$1
    shift
    "$folder/bin/python" -m pytest -q tests/torch $which --part "$files" "$@"
}

steps=30
[ -z "${EPIC_TORCH_QUICK-}" ] || steps=12
examples() {
    "$folder/bin/python" examples/torch/ep_moe.py --check --processes 4 &&
        "$folder/bin/python" examples/torch/train_text.py --check --steps $steps LICENSE
}

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
        if [ -n "${EPIC_TORCH_QUICK-}" ]; then
            (part 2/2 "$@" && examples) </dev/null >"$build/torch-other.log" 2>&1 &
            other=$!
            trap 'kill $other 2>/dev/null || :' EXIT
            part 1/2 "$@" </dev/null || failed=1
            wait $other || failed=1
            cat "$build/torch-other.log"
        else
            part 1/1 "$@" </dev/null || failed=1
            examples </dev/null || failed=1
        fi
        first=
    else
        "$folder/bin/python" -m pytest -q tests/torch/test_autograd.py tests/torch/test_compiled.py \
            tests/torch/test_imports.py tests/torch/test_transforms.py --one-case \
            -k "not inductor and not float64 and not apart" "$@" </dev/null || failed=1
    fi
done <"$build/torch-environments"
[ -z "$failed" ] || exit 1
check_missing
