# SPDX-License-Identifier: Apache-2.0
# Virtual environments under $build for the tests of epic.torch: run.sh and adapters.sh read this.
# shellcheck shell=sh disable=SC2154
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

folder_of() { # pins
    echo "$build/venv-torch-$(echo "$1" | sed 's/.*torch==\([0-9]*\.[0-9]*\).*/\1/')"
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
