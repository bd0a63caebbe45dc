#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Repeats the random tests with new seeds until the time is up: the conformance suite on every host
# backend, tests of killed, stopped and malicious ranks, and of opening and closing. Stops at the first
# failure and prints the command that repeats it. It is also a failure if a test does not end, or leaves
# shared memory or processes behind.
# usage: soak.sh BUILD [MINUTES]     default: 10
#   SOAK="fault.shm conformance.threads"     runs these programs only
set -eu
build=$1
end=$(($(date +%s) + ${2:-10} * 60))
seed=$(date +%s)
runs=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

fail() {
    tail -n 30 "$log"
    echo "soak: $*"
    exit 1
}

left() { # counts shared memory and processes that a group left behind
    ls /dev/shm 2>/dev/null | grep -i epic || true
}

run() { # usage: run PROGRAM ARGUMENT...
    status=0
    EPIC_TEST_SEED=$seed timeout -k 10 600 "$@" >"$log" 2>&1 || status=$?
    case $status in
    0) ;;
    77) return 0 ;;
    124 | 137) fail "hangs: EPIC_TEST_SEED=$seed $*" ;;
    *) fail "failed with $status: EPIC_TEST_SEED=$seed $*" ;;
    esac
    runs=$((runs + 1))
    [ -z "$(left)" ] || fail "left behind by EPIC_TEST_SEED=$seed $*: $(left)"
}

wanted=${SOAK:-fault.threads fault.shm fault.open conformance.threads conformance.shm unit.repeated_groups \
    fault.mpi conformance.mpi}
[ -x "$build/tests/unit/repeated_groups" ] || { echo "soak: build the tests in $build first"; exit 1; }
while [ "$(date +%s)" -lt "$end" ]; do
    for name in $wanted; do
        program=$build/tests/$(echo "$name" | tr . /)
        [ -x "$program" ] || continue
        [ "$(date +%s)" -lt "$end" ] || break
        if [ "$name" = conformance.mpi ]; then
            run mpiexec -n 4 "$program"
        else
            run env EPIC_TEST_SCALE="${EPIC_TEST_SCALE:-1}" EPIC_MPIEXEC="$(command -v mpiexec)" "$program"
        fi
    done
    seed=$((seed + 1))
done
[ "$runs" -gt 0 ] || fail "nothing ran"
echo "soak: $runs runs, no failure, no hang, nothing left behind"
