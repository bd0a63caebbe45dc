#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests epic.torch on BUILD/lib with each torch of requirements.txt: all with the first, with the
# others what depends on the torch.  What a machine lacks is left out and said.
# usage: run.sh BUILD [pytest arguments]
#   EPIC_TORCH_ALL=1  all with each of them
set -eu
cd "$(dirname "$0")/../.."
build=$(cd "$1" && pwd)
shift
export EPIC_LIBRARY_PATH="$build/lib" PYTHONPATH="$PWD/bindings/python"
export TORCHINDUCTOR_CACHE_DIR="$build/torchinductor" OMP_NUM_THREADS=1
NEEDED=9 # GB of disk for an environment: the index has no torch without CUDA's libraries

works() { "$1" -c "import sys, venv, ensurepip; assert '%d.%d' % sys.version_info[:2] == '$2'" 2>/dev/null; }

interpreter() { # of a version; prints nothing if there is none
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python python3; do
        if works "$candidate" "$1"; then
            echo "$candidate"
            return
        fi
    done
}

room() { df -Pk "$build" | awk -v need=$NEEDED 'NR == 2 { exit $4 < need * 1048576 }'; }

try() { # a command, twice: networks fail
    "$@" || { sleep 10 && "$@"; }
}

environment() { # python folder pins
    if [ "$(cat "$2/pins" 2>/dev/null)" = "$3" ]; then return; fi
    room || { echo "left out: $3 needs $NEEDED GB in $build"; return 1; }
    "$1" -m venv --clear "$2"
    # shellcheck disable=SC2086
    try "$2/bin/pip" install --quiet --disable-pip-version-check $3 >"$2/pip.log" 2>&1 ||
        { echo "left out: pip cannot install $3 ($(tail -n 1 "$2/pip.log"))"; return 1; }
    echo "$3" >"$2/pins"
}

failed=
first=1
grep -v '^#' tests/torch/requirements.txt >"$build/torch-environments"
while read -r version pins; do
    python=$(interpreter "$version")
    [ -n "$python" ] || { echo "left out: there is no Python $version (with venv)"; continue; }
    folder=$build/venv-torch-$(echo "$pins" | sed 's/.*torch==\([0-9]*\.[0-9]*\).*/\1/')
    environment "$python" "$folder" "$pins" </dev/null || continue
    "$folder/bin/python" -c 'import sys, torch; print("-- torch", torch.__version__, "Python", sys.version.split()[0])'
    if [ -n "$first" ] || [ -n "${EPIC_TORCH_ALL-}" ]; then
        "$folder/bin/python" -m pytest -q tests/torch "$@" </dev/null || failed=1
        "$folder/bin/python" examples/torch/ep_moe.py --check --processes 4 </dev/null || failed=1
        first=
    else
        "$folder/bin/python" -m pytest -q tests/torch/test_autograd.py tests/torch/test_groups.py \
            tests/torch/test_moe.py -k "not inductor and not float64" "$@" </dev/null || failed=1
    fi
done <"$build/torch-environments"
[ -z "$failed" ] || exit 1
