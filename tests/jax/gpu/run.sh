#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests epic.jax on the GPUs of this machine: one process with 1, 2, 4 and 8 of them, with all of
# them also without command buffers, then one process for each.
# usage: run.sh [cases of check.py]; with none also layer.py and invariant.py; run.sh layer, or
# run.sh invariant [kinds]: that alone
#   EPIC_GPU_COUNTS   numbers of GPUs, in place of "1 2 4 8"
#   EPIC_GPU_RUNS     only these runs, as PROGRAM:HOW, for example "check:one layer:processes". HOW
#                     is one (one process), processes (one for each GPU), or graphs (one process,
#                     without command buffers)
#   EPIC_GPU_LIMIT    time limit of each run in seconds (300)
#   EPIC_GPU_TOTAL    time limit of all runs in seconds (none). A run that has no time left fails
set -u
cd "$(dirname "$0")/../../.."
PYTHON=${GPU_PYTHON:-python3}
LIMIT=${EPIC_GPU_LIMIT:-300}
COUNTS=${EPIC_GPU_COUNTS:-1 2 4 8}
END=$(($(date +%s) + ${EPIC_GPU_TOTAL:-1000000}))
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")
[ "$GPUS" -gt 0 ] || { echo "there is no GPU"; exit 1; }
export EPIC_LIBRARY_PATH="${EPIC_LIBRARY_PATH:-$PWD/build/lib}" PYTHONPATH="$PWD/bindings/python"
export JAX_PLATFORMS=cuda,cpu PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2
failed=0

# usage: wants one|processes|graphs; succeeds if such a run of the current program is selected
wants() { case " ${EPIC_GPU_RUNS:-$program:$1} " in *" $program:$1 "*) ;; *) return 1 ;; esac; }

program=check
check() {
    left=$((END - $(date +%s)))
    [ "$left" -gt 10 ] || { echo "not run, the time was up"; return 1; }
    timeout -k 5 $((left < LIMIT ? left : LIMIT)) "$PYTHON" "tests/jax/gpu/$program.py" "$@" 2>&1
}

# usage: is_right LOG; succeeds if "right" is the last result in the log. A line "Killed" may follow it: the shell
# writes this line if the program has killed itself, as in the case "killed".
is_right() { [ "$(grep -x 'right\|wrong' "$1" | tail -n 1)" = right ]; }

# usage: alone GPUS [cases]
alone() {
    log=$(mktemp)
    devices=$(seq -s, 0 $(($1 - 1)))
    shift
    CUDA_VISIBLE_DEVICES=$devices check "$@" >"$log"
    is_right "$log" || failed=1
    cat "$log"
    rm -f "$log"
}

# usage: in_one [cases]; one process with some of the GPUs
in_one() {
    most=1
    for count in $COUNTS; do
        [ "$count" -le "$GPUS" ] || continue
        most=$count
        wants one || continue
        echo "== $program: one process, $count of $GPUS GPUs"
        alone "$count" "$@"
    done
    wants graphs || return
    echo "== $program: one process, $most of $GPUS GPUs, without command buffers"
    export EPIC_GRAPHS=0
    alone "$most" "$@"
    unset EPIC_GRAPHS
}

# usage: in_several [cases]; one process for each GPU
in_several() {
    wants processes || return
    for count in $COUNTS; do
        [ "$count" -gt 1 ] && [ "$count" -le "$GPUS" ] || continue
        echo "== $program: $count processes with a GPU each"
        log=$(mktemp -d)
        port=$((20000 + $$ % 12000 + count))
        for process in $(seq 0 $((count - 1))); do
            check "$process" "$count" "$port" "$@" >"$log/$process" &
        done
        wait
        for process in $(seq 0 $((count - 1))); do
            is_right "$log/$process" || { failed=1; cat "$log/$process"; }
        done
        cat "$log/0"
        rm -rf "$log"
    done
}

case ${1-} in
layer | invariant) ;;
*)
    in_one "$@"
    in_several "$@"
    ;;
esac
if [ $# = 0 ] || [ "$1" = layer ]; then
    program=layer
    in_one
    in_several
fi
if [ $# = 0 ] || [ "$1" = invariant ]; then
    program=invariant
    [ $# = 0 ] && set -- invariant bfloat16 e4m3
    shift
    if wants one; then
        echo "== $program: one process, $GPUS GPUs"
        alone "$GPUS" "$@"
    fi
    in_several "$@"
fi
exit $failed
