#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Tests backend hosts on the GPUs of this machine, whose ranks act as hosts: over the net chaos, over UCX
# on lo, and over the net "local". With "local" the memory of the net is on GPUs, otherwise on the host,
# except where EPIC decides.
# Variables: CASES (random cases), STORM (operations in a storm), FAULTS and DEATHS (of each shape),
# PARTS (parts of the script to run), LIMIT (time limit of a test in seconds).
OUT=${HOSTS_OUT:-build/gpu/hosts}
CASES=${CASES:-30}
STORM=${STORM:-1000}
FAULTS=${FAULTS:-140}
DEATHS=${DEATHS:-30}
PARTS=${PARTS:-check storm faults deaths jax idle}
GPUS=$(nvidia-smi -L | grep -c "^GPU")
[ "$GPUS" -gt 2 ] && GPUS=2
SOME=$((GPUS < 2 ? 1 : 2))
LOG=$(mktemp)
trap 'rm -f "$LOG"' EXIT
export LD_LIBRARY_PATH=$OUT:$PWD/build/lib:$LD_LIBRARY_PATH
export UCX_LOG_LEVEL=error UCX_ERROR_SIGNALS= UCX_TLS=${UCX_TLS:-tcp} EPIC_TEST_SLACK_MS=${SLACK:-0}
[ "$UCX_TLS" = tcp ] && export UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo}
failed=0 total=0
UCX=$(ls "$OUT/libepic_ucx.so" build/lib/libepic_ucx.so 2>/dev/null | head -n 1)
[ -n "$UCX" ] || echo "left out: no libepic_ucx.so (Debian: libucx-dev, then build again): tests over UCX and of deaths are left out"

# usage: run NET RANKS-PER-HOST PROGRAM... Prints one line of its output, and its time. Unless
# EPIC_NET_MEMORY is already set, it is set to host. If it is empty, EPIC decides.
run() {
    local net=$1 local=$2 begin=$(date +%s%N) status memory=${EPIC_NET_MEMORY-host}
    shift 2
    [ "$net" = ucx ] && [ -z "$UCX" ] && return
    total=$((total + 1))
    EPIC_NET=$net EPIC_NET_MEMORY=$memory EPIC_TEST_RANKS_PER_HOST=$local EPIC_HOST=%r/$local \
        timeout "${LIMIT:-120}" "$OUT/$@" >"$LOG" 2>&1
    status=$?
    printf '%5.1f s  %s, memory %s, hosts of %s: %s\n' "$(($(date +%s%N) - begin))e-9" "$net" \
        "${memory:-by default}" "$local" \
        "$(tail -n 1 "$LOG" | cut -c 1-110)"
    [ $status = 0 ] && return
    failed=$((failed + 1))
    echo "FAILED ($status): $*"
    tail -n "${TAIL:-12}" "$LOG" | cut -c 1-160
}
has() { case " $PARTS " in *" $1 "*) true ;; *) false ;; esac; }

if has check; then
    for net in ucx chaos; do
        how=threads
        [ $net = ucx ] && [ "$GPUS" -gt 1 ] && how=processes
        run $net 1 hosts_check 2 $SOME $how "$CASES" 2000 usual rows
        run $net 2 hosts_check 4 $SOME threads "$CASES" 4700 usual rows
        run $net 1 hosts_check 4 $SOME threads "$CASES" 4000
        run $net 4 hosts_check 8 $SOME threads $((CASES / 3)) 8700 small rows
    done
    run chaos 1 hosts_check 3 $SOME threads $((CASES / 3)) 9000 tight
    run ucx 4 hosts_check 4 $SOME threads $((CASES / 3)) 4800 # all ranks on one host
    EPIC_NET_MEMORY= run ucx 1 hosts_check 2 $SOME threads $((CASES / 3)) 2500 usual rows
    EPIC_NET_MEMORY= run local 1 hosts_check 2 $SOME threads $((CASES / 3)) 2600 usual rows
    if [ "$GPUS" -gt 1 ]; then
        run local 1 hosts_check 2 $SOME threads "$CASES" 2200 usual rows
        for local in 1 2; do
            EPIC_NET_MEMORY=gpu run local $local hosts_check 4 $SOME threads "$CASES" 4300 usual rows
        done
        EPIC_NET_MEMORY=gpu run local 1 hosts_check 2 $SOME processes "$CASES" 2400 usual rows
    fi
    EPIC_TEST_SCALE=${EPIC_TEST_SCALE:-0.05} run ucx 1 conformance_hosts 2
    EPIC_TEST_SCALE=${EPIC_TEST_SCALE:-0.05} run chaos 2 conformance_hosts 4
fi
if has storm; then
    run chaos 1 hosts_storm 4 $SOME threads "$STORM" 1
    run chaos 2 hosts_storm 4 $SOME threads "$STORM" 2
    run ucx 2 hosts_storm 4 $SOME threads "$STORM" 3
    run ucx 1 hosts_graph 2 $SOME threads 200
    run chaos 2 hosts_graph 4 $SOME threads 100
fi
# seven kinds of faults in turn: a skipped call, another call, a late rank, a slow rank, ...
if has faults; then
    for local in 1 2; do
        run ucx $local hosts_faults 4 $SOME threads "$FAULTS"
        EPIC_CHAOS_STRICT=0 run chaos $local hosts_faults 4 $SOME threads $((FAULTS / 7 * 2))
    done
fi
# faults of processes: kill -9, SIGSTOP, exit; prints the time until a killed rank is named
if has deaths && [ -n "$UCX" ]; then
    for local in 1 2; do
        run ucx $local api_deaths_hosts 4 $SOME "$DEATHS" 0 1000
        sed -n 's/^ *rank.*: \(SIG[A-Z]*\|exit\) of.*seen \(-\?[0-9]*\) ms later/\1 \2/p' "$LOG" |
            sort | awk '{ if (!($1 in n) || $2 > m[$1]) m[$1] = $2; n[$1]++; s[$1] += $2 }
                        END { for (k in n) printf "         %s: seen by %d ranks, %.0f ms later on average, %d at most%s\n", k,
                              n[k], s[k] / n[k], m[k], k == "SIGSTOP" ? ", of a deadline of 1000" : " (bar of kill -9: 300)" }'
        run ucx $local api_stops_hosts
    done
fi
if has jax; then # processes, whose net can access GPU memory of other processes
    if [ -e build/lib/libepic_jax.so ]; then
        total=$((total + 1))
        EPIC_NET=local EPIC_NET_MEMORY=gpu EPIC_LIBRARY_PATH=$PWD/build/lib \
            PYTHONPATH=bindings/python JAX_PLATFORMS=cuda,cpu timeout "${LIMIT:-120}" \
            "${GPU_PYTHON:-python3}" tests/jax/gpu/hosts.py 2 2>&1 | tail -n 3
        [ "${PIPESTATUS[0]}" = 0 ] || failed=$((failed + 1))
    else
        echo "left out: no build/lib/libepic_jax.so: a layer of epic.jax over hosts"
    fi
fi
if has idle; then
    net=ucx
    [ -n "$UCX" ] || net=local
    EPIC_NET=$net EPIC_NET_MEMORY=host EPIC_HOST=%r timeout 60 "$OUT/gpu_hosts" ranks=2 threads=$([ $net = local ] && echo 1 || echo 0) tokens=8 rounds=3 |
        grep idle
fi
echo "gpu-test-hosts: $((total - failed)) of $total good on $GPUS GPUs"
exit $((failed > 0))
