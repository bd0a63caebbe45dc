# SPDX-License-Identifier: Apache-2.0
# Creates virtual environments under $build for the tests of epic.torch. Sourced by run.sh and
# adapters.sh.
# shellcheck shell=sh disable=SC2154
. tests/environments.sh
export EPIC_LIBRARY_PATH="$build/lib" PYTHONPATH="$PWD/bindings/python"
export TORCHINDUCTOR_CACHE_DIR="$build/torchinductor" OMP_NUM_THREADS=1
# Each process that uses inductor would otherwise compile and load programs that test vector units.
export TORCHINDUCTOR_VEC_ISA_OK=0
NEEDED=9 # GB of disk for an environment: the index has no torch without CUDA's libraries

room() { df -Pk "$build" | awk -v need=$NEEDED 'NR == 2 { exit $4 < need * 1048576 }'; }

folder_of() { # pins
    echo "$build/venv-torch-$(echo "$1" | sed 's/.*torch==\([0-9]*\.[0-9]*\).*/\1/')"
}

environment() { # python folder pins
    if [ "$(cat "$2/pins" 2>/dev/null)" = "$3" ]; then return; fi
    room || { echo "left out: $3 needs $NEEDED GB in $build"; return 1; }
    # shellcheck disable=SC2086
    "$1" -m venv --clear "$2" && install_packages "$2" $3 || return 1
    echo "$3" >"$2/pins"
}
