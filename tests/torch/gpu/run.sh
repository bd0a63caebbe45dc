#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests epic.torch on the GPUs of this machine: threads of one process with 1, 2 and 4 of them, then
# a process for each; then the example.  usage: run.sh [cases of check.py]
set -u
cd "$(dirname "$0")/../../.."
PYTHON=${GPU_PYTHON:-python3}
LIMIT=${EPIC_GPU_LIMIT:-300} # seconds for each run
GPUS=$(nvidia-smi -L 2>/dev/null | wc -l)
[ "$GPUS" -gt 0 ] || { echo "there is no GPU"; exit 1; }
export EPIC_LIBRARY_PATH="${EPIC_LIBRARY_PATH:-$PWD/build/lib}" PYTHONPATH="$PWD/bindings/python"
export PYTHONUNBUFFERED=1
failed=0

right() { # last line, command
    last=$1
    shift
    log=$(mktemp)
    timeout -k 5 "$LIMIT" "$@" >"$log" 2>&1
    tail -n 1 "$log" | grep -q "$last" || failed=1
    cat "$log"
    rm -f "$log"
}

for how in threads processes; do
    for count in 1 2 4; do
        [ "$count" -le "$GPUS" ] || continue
        echo "== $count of $GPUS GPUs, $how"
        right '^right$' "$PYTHON" tests/torch/gpu/check.py "$how" "$count" "$@"
    done
done
if [ $# = 0 ]; then
    most=$((GPUS >= 2 ? 2 : 1))
    right ': right$' "$PYTHON" examples/torch/ep_moe.py --check --device cuda \
        --processes $most --ep $most
fi
exit $failed
