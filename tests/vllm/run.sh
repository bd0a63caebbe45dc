#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests epic.vllm on BUILD/lib inside vLLM, in an environment with the packages of requirements.txt.
# Prints what it leaves out because it cannot be installed.
# usage: run.sh BUILD [pytest arguments]
set -eu
cd "$(dirname "$0")/../.."
build=$(cd "$1" && pwd)
shift
. tests/environments.sh
NEEDED=12 # GB of disk for the environment

python=$(interpreter 3.12)
[ -n "$python" ] || { echo "left out: there is no Python 3.12 (with venv)"; exit 0; }
wanted=tests/vllm/requirements.txt
venv=$build/venv-vllm
if ! cmp -s $wanted "$venv/pins"; then
    df -Pk "$build" | awk -v need=$NEEDED 'NR == 2 { exit $4 < need * 1048576 }' ||
        { echo "left out: vLLM needs $NEEDED GB in $build"; exit 0; }
    "$python" -m venv --clear "$venv"
    install_packages "$venv" --no-deps -r $wanted || { check_missing; exit 0; }
    cp $wanted "$venv/pins"
fi

"$venv/bin/python" tests/vllm/entry_point.py "$build/vllm-entry"
export EPIC_LIBRARY_PATH="$build/lib" PYTHONPATH="$PWD/bindings/python:$build/vllm-entry:$PWD/bench"
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CACHE_ROOT="$build/vllm-cache"
export TORCHINDUCTOR_CACHE_DIR="$build/vllm-cache/inductor"
exec "$venv/bin/python" -m pytest -q --durations=10 tests/vllm "$@"
