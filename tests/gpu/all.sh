#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs tests and benchmarks on all GPUs of this machine, in parts of at most ten minutes each, and prints
# one table. It shows whether EPIC works there and how fast it is.  `make gpu-all` builds everything first.
# usage: all.sh [PART]...   PART: tests, bindings, hosts, bench, table (default: all, in this order)
# The parts may run in separate calls.  Results are kept in build/gpu/all.  Variables: SEED, the first
# seed of random cases (default: the time); SECONDS_PER_PART (default 570), after which the rest of a part
# is reported as not run.
cd "$(dirname "$0")/../.."
OUT=build/gpu ALL=build/gpu/all HOSTS=build/gpu/hosts
LIMIT=${SECONDS_PER_PART:-570}
SEED=${SEED:-$(date +%s)}
GPUS=$(nvidia-smi -L | wc -l)
RANKS=$((GPUS < 8 ? GPUS : 8))
PYTHON=${GPU_PYTHON:-python3}
[ "$GPUS" -gt 0 ] || { echo "there is no GPU"; exit 1; }
bench/gpu/idle.sh || exit 1
mkdir -p $ALL

# usage: run SECONDS COMMAND...; appends "verdict, seconds, command" to the results of the part.
run() {
    local limit=$1 begin=$(date +%s) left status verdict
    shift
    left=$((END - begin))
    if [ $left -lt 15 ]; then
        echo "not run	0	$*" >>"$results"
        return
    fi
    timeout -k 5 $((limit < left ? limit : left)) "$@" >"$ALL/last.log" 2>&1
    status=$?
    verdict=good
    [ $status = 0 ] || verdict="WRONG ($status)"
    printf '%s\t%d\t%s\n' "$verdict" $(($(date +%s) - begin)) "$*" | tee -a "$results"
    [ $status = 0 ] || tail -n 15 "$ALL/last.log" | cut -c 1-300 | tee -a "$ALL/failures.log"
}

# Runs ranks on all GPUs, on half and on a quarter of them.
part_tests() {
    run 200 $OUT/conformance_p2p
    run 60 $OUT/api_router 3000 "$SEED"
    run 120 $OUT/api_layer 60 4 "$SEED"
    run 120 $OUT/api_layer_rules 30 "$SEED"
    run 120 $OUT/api_layer_invariant 40
    run 120 $OUT/api_layer_tokens step=101
    run 60 $OUT/gpu_grouped 60 "$SEED"
    for gpus in $RANKS $((RANKS / 2)) $((RANKS / 4)); do
        [ $gpus -ge 1 ] || continue
        run 60 $OUT/gpu_check $RANKS $gpus processes 40 $((SEED + gpus))
        run 60 $OUT/gpu_check $RANKS $gpus processes 40 $((SEED + gpus + 100)) lowlat
    done
    run 60 $OUT/gpu_check $RANKS "$GPUS" threads 40 $((SEED + 200))
    run 60 $OUT/gpu_check $RANKS "$GPUS" processes 40 $((SEED + 300)) usual windows
    run 60 $OUT/gpu_check $RANKS "$GPUS" threads 40 $((SEED + 400)) usual windows
    for how in threads processes; do run 60 $OUT/api_window_memory $RANKS $how; done
    run 60 $OUT/gpu_storm $RANKS "$GPUS" processes 5000 "$SEED"
    run 60 $OUT/gpu_graph $RANKS "$GPUS" processes 1000
    run 60 $OUT/gpu_graph_many $RANKS "$GPUS" processes 500
    run 90 $OUT/gpu_faults $RANKS "$GPUS" processes 12
    run 60 $OUT/api_deaths $RANKS "$GPUS" 3
    [ ! -e build/lib/libepic_cuda_regroup.so ] || run 60 $OUT/api_regroup 4 "$GPUS" 8
    run 60 $OUT/api_stops
    run 60 $OUT/api_nccl
}

part_bindings() {
    run 280 env EPIC_GPU_TOTAL=270 make gpu-test-torch
    run 290 env EPIC_GPU_LIMIT=140 make gpu-test-jax
}

# Runs the ranks of this machine as hosts, over chaos: 8 hosts of 1 rank, 4 of 2, and 2 of 4.
part_hosts() {
    if [ ! -x $HOSTS/hosts_check ]; then
        echo "left out: no libepic_hosts.so" | tee -a "$results"
        return
    fi
    export LD_LIBRARY_PATH=$HOSTS:$PWD/build/lib:$LD_LIBRARY_PATH EPIC_NET=chaos EPIC_NET_MEMORY=host
    for local in 1 2 4; do
        [ $local -lt $RANKS ] || continue
        EPIC_TEST_RANKS_PER_HOST=$local EPIC_HOST=%r/$local \
            run 120 $HOSTS/hosts_check $RANKS "$GPUS" threads 15 $((SEED + local)) usual rows
        EPIC_TEST_RANKS_PER_HOST=$local EPIC_HOST=%r/$local \
            run 60 $HOSTS/hosts_storm $RANKS "$GPUS" threads 500 "$SEED"
    done
}

part_bench() {
    [ $RANKS -gt 1 ] || { echo "left out: the benchmarks need two GPUs" | tee -a "$results"; return; }
    local json=$ALL/bench.json bench="$OUT/gpu_bench ranks=$RANKS gpus=$RANKS json=$ALL/bench.json"
    rm -f $json
    for model in deepseek-v3 gpt-oss-120b llama4-maverick qwen3-30b; do
        run 60 $bench model=$model alignment=1 ops=PDC tokens=1,8,128,512 sms=64
        run 60 $bench model=$model ops=PDCGB tokens=4096 sms=64,132
    done
    run 60 $bench ops=PDC tokens=8192 sms=64
    run 60 $bench layout=flat ops=PU tokens=4096 sms=32,64
    run 60 $bench type=e4m3 scales=128 quantize=1 ops=PD tokens=4096 sms=64
    run 60 $bench type=e4m3 scales=128 ops=PD tokens=4096 sms=64
    for routing in zipf hot; do run 60 $bench routing=$routing ops=PDC tokens=4096 sms=64; done
    run 150 $OUT/gpu_moe ranks=$RANKS rounds=2
    for count in 128 4096; do
        run 60 $OUT/gpu_moe ranks=$RANKS rounds=2 tokens=$count models=4 invariant
    done
    cp $ALL/last.log $ALL/layers.log
}

part_table() {
    nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c
    cat $ALL/tests.txt $ALL/bindings.txt $ALL/hosts.txt 2>/dev/null |
        awk -F '\t' '{ split($1, v, " "); n[v[1]]++ } END { for (v in n) printf "%d runs: %s\n", n[v], v }'
    grep -h 'WRONG\|^not run\|^left out' $ALL/*.txt 2>/dev/null
    [ ! -s $ALL/bench.json ] || "$PYTHON" bench/gpu/table.py $ALL/bench.json
    grep -h 'ms' $ALL/layers.log 2>/dev/null | grep -i 'layer' | head -n 20
    ! grep -qs 'WRONG\|^not run' $ALL/*.txt
}

status=0
for part in ${*:-tests bindings hosts bench table}; do
    results=$ALL/$part.txt
    END=$(($(date +%s) + LIMIT))
    case $part in
    table) part_table || status=1 ;;
    tests | bindings | hosts | bench)
        rm -f "$results"
        echo "== $part, seed $SEED"
        part_$part
        ;;
    *) echo "$part is no part: must be tests, bindings, hosts, bench or table" >&2; exit 2 ;;
    esac
done
exit $status
