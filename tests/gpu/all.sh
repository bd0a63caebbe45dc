#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs tests and benchmarks on all GPUs of this machine, in parts of at most ten minutes each and 25
# minutes together, and prints one table. It shows whether EPIC works there and how fast it is.
# `make gpu-all` builds everything first.
# usage: all.sh [PART]...   PART: tests, bindings, hosts, bench, table (default: all, in this order)
# The parts may run in separate calls.  Results are kept in build/gpu/all.  The exit status is 1 if a
# run failed or was not run.  Variables: SEED, the first seed of random cases (default: the time);
# SECONDS_PER_PART, the time limit of each part (default: another limit for each part). Runs of a part that
# do not begin or end within the limit are reported as not run.
cd "$(dirname "$0")/../.." || exit 1
OUT=build/gpu ALL=build/gpu/all HOSTS=build/gpu/hosts
TORCH=$PWD/build/gpu-torch/lib JAX=$PWD/build/gpu-jax/lib
SEED=${SEED:-$(date +%s)}
GPUS=$(nvidia-smi -L | grep -c '^GPU')
RANKS=$((GPUS < 8 ? GPUS : 8)) # largest number of ranks that have a GPU each, at most 8
EQUAL=$((RANKS == 8 ? 8 : RANKS >= 4 ? 4 : RANKS >= 2 ? 2 : 1)) # a power of two, for layers and JAX
PYTHON=${GPU_PYTHON:-python3}
MODELS="deepseek-v3 kimi-k2 qwen3-235b gpt-oss-120b llama4-maverick qwen3-30b qwen3-next dbrx mixtral-8x7b"
PARTS=${*:-tests bindings hosts bench table}
for part in $PARTS; do
    case $part in
    tests | bindings | hosts | bench | table) ;;
    *) echo "$part is no part: must be tests, bindings, hosts, bench or table" >&2; exit 2 ;;
    esac
done
[ "$PARTS" = table ] || [ "$GPUS" -gt 0 ] || { echo "there is no GPU"; exit 1; }
mkdir -p $ALL

# Kills the processes of the current run, and waits up to 5 s until none is left.
end_session() {
    local try
    for try in {1..50}; do pkill -KILL -s "$session" && sleep 0.1 || break; done
    session=
}
session= # id of the session of the current run; empty: no run
trap '[ -z "$session" ] || end_session; exit 130' INT TERM

# usage: run SECONDS COMMAND...; appends "verdict, seconds, command" to the results of the part.
run() {
    local limit=$1 begin=$(date +%s) left status verdict
    shift
    left=$((END - begin))
    if [ $left -lt 15 ]; then
        echo "not run	0	$*" | tee -a "$results"
        return
    fi
    # The command runs in a session of its own. Processes that it starts can be in other process groups, and
    # then `timeout` does not end them. They would use the GPUs during the next runs, so they are killed.
    setsid timeout -k 5 $((limit < left ? limit : left)) "$@" >"$ALL/last.log" 2>&1 &
    session=$!
    wait $session
    status=$?
    end_session
    verdict=good
    [ $status = 0 ] || verdict="WRONG ($status)"
    [ $status != 124 ] || [ $limit -le $left ] || verdict="not run" # the part had no more time
    printf '%s\t%d\t%s\n' "$verdict" $(($(date +%s) - begin)) "$*" | tee -a "$results"
    [ $status = 0 ] || { echo "== $*"; tail -n 15 "$ALL/last.log" | cut -c 1-300; } | tee -a "$ALL/$part.failed"
}

leave_out() {
    echo "left out: $*" | tee -a "$results"
}

# Prints pairs of a number of ranks and a number of GPUs: first one rank per GPU, then eight ranks on all, on
# half and on a quarter of the GPUs. Leaves out pairs with more than four ranks on a GPU.
list_shapes() {
    echo "$RANKS $RANKS"
    for gpus in $RANKS $((RANKS / 2)) $((RANKS / 4)); do
        [ "$RANKS $gpus" = "8 8" ] || [ $((gpus * 4)) -lt 8 ] || echo "8 $gpus"
    done
}

part_tests() {
    local shape
    while read -r shape; do
        for how in processes threads; do
            run 60 $OUT/gpu_check $shape $how 25 $((SEED += 100))
            run 60 $OUT/gpu_check $shape $how 25 $((SEED += 100)) lowlat
        done
        run 60 $OUT/gpu_storm $shape threads 1000 "$SEED"
        run 60 $OUT/gpu_graph $shape threads 300
    done <<END
$(list_shapes)
END
    for how in processes threads; do
        run 60 $OUT/gpu_check $RANKS $RANKS $how 40 $((SEED += 100)) usual windows
        run 60 $OUT/api_window_memory $RANKS $how
        run 90 $OUT/gpu_faults $RANKS $RANKS $how 14
    done
    run 60 $OUT/gpu_storm $RANKS $RANKS processes 5000 "$SEED"
    run 60 $OUT/gpu_graph $RANKS $RANKS processes 1000
    run 60 $OUT/gpu_graph_many $RANKS $RANKS processes 500
    run 60 $OUT/gpu_graph_many $RANKS $RANKS processes 200 usual windows
    run 60 $OUT/api_deaths $RANKS $RANKS 4
    [ ! -e build/lib/libepic_cuda_regroup.so ] || run 60 $OUT/api_regroup 4 $RANKS 8
    # sums in tree order must have the same bits with 1, 2, 4 and 8 ranks (on one GPU: 1, 2 and 4)
    local most=$((RANKS >= 2 ? 8 : 4)) list=2,4
    [ $most = 4 ] || list=2,4,8
    run 120 $OUT/api_layer_invariant 40 p2p $most
    run 150 $OUT/api_layer_tokens step=401 ranks=$list
    run 120 $OUT/api_layer 40 $((RANKS < 4 ? 4 : RANKS)) "$SEED"
    run 120 $OUT/api_layer_rules 30 "$SEED"
    run 60 $OUT/api_stops
    run 60 $OUT/api_nccl
    run 60 $OUT/api_router 3000 "$SEED"
    run 60 $OUT/gpu_grouped 60 "$SEED"
    run 200 $OUT/conformance_p2p
}

# Runs the tests of PyTorch, then those of JAX: with a process for each GPU, and some also in one process.
part_bindings() {
    export GPU_PYTHON=$PYTHON
    if [ -d "$TORCH" ]; then
        run 250 env EPIC_LIBRARY_PATH="$TORCH" EPIC_GPU_TOTAL=240 tests/torch/gpu/run.sh
    else
        leave_out "PyTorch: make gpu-build-torch has not run"
    fi
    if [ -d "$JAX" ]; then
        for what in check:processes layer:processes layer:one check:one invariant:processes; do
            run 110 env EPIC_LIBRARY_PATH="$JAX" EPIC_GPU_COUNTS=$EQUAL EPIC_GPU_RUNS=$what \
                EPIC_GPU_LIMIT=100 tests/jax/gpu/run.sh
        done
    else
        leave_out "JAX: make gpu-build-jax has not run"
    fi
}

# Runs eight ranks of this machine as hosts, over chaos: 8 hosts of 1 rank, 4 of 2, and 2 of 4.
part_hosts() {
    if [ ! -x $HOSTS/hosts_check ]; then
        leave_out "no libepic_hosts.so"
        return
    fi
    local ranks=8 cases=usual local
    [ "$RANKS" -ge 2 ] || ranks=4
    [ "$RANKS" -ge 8 ] || cases=small
    local hosts="env LD_LIBRARY_PATH=$HOSTS:$PWD/build/lib:$LD_LIBRARY_PATH EPIC_NET=chaos EPIC_NET_MEMORY=host"
    for local in 1 2 4; do
        [ $local -lt $ranks ] || continue
        local as="$hosts EPIC_TEST_RANKS_PER_HOST=$local EPIC_HOST=%r/$local"
        run 60 $as $HOSTS/hosts_check $ranks "$RANKS" threads 15 $((SEED + local)) $cases rows
        run 60 $as $HOSTS/hosts_storm $ranks "$RANKS" threads 500 "$SEED"
        run 60 $as EPIC_CHAOS_STRICT=0 $HOSTS/hosts_faults $ranks "$RANKS" threads 7
    done
}

# Runs whole layers, and adds their output to layers.log.
run_layers() {
    run "$@"
    cat $ALL/last.log >>$ALL/layers.log
}

part_bench() {
    bench/gpu/idle.sh || { leave_out "benchmarks: another process uses the GPUs"; return; }
    [ $RANKS -gt 1 ] || { leave_out "the benchmarks need two GPUs"; return; }
    local json=$ALL/bench.json
    local bench="$OUT/gpu_bench ranks=$EQUAL gpus=$EQUAL json=$json"
    local moe="$OUT/gpu_moe ranks=$EQUAL rounds=3 json=$json"
    rm -f $json $ALL/layers.log
    # the layers, in C, and in PyTorch next to torch
    run_layers 60 $moe first=0 models=1 experts=64 tokens=4096 whole
    run_layers 60 $moe first=3 models=4 experts=128 tokens=4096 whole
    for count in 8 128; do run_layers 30 $moe first=3 models=4 experts=128 tokens=$count decode; done
    if [ -d "$TORCH" ]; then
        run_layers 90 env EPIC_LIBRARY_PATH="$TORCH" PYTHONPATH=bindings/python \
            "$PYTHON" -W ignore bench/gpu/layer_torch.py layers
    else
        leave_out "layers of PyTorch: make gpu-build-torch has not run"
    fi
    # every model, with many and with few tokens; two models also with windows
    for model in $MODELS; do
        local more=
        case $model in deepseek-v3 | qwen3-235b) more=windows=1 ;; esac
        run 60 $bench model=$model ops=PDCGB tokens=4096,8192 sms=64,132 $more
    done
    for model in $MODELS; do
        run 60 $bench model=$model alignment=1 ops=PDC tokens=1,8,32,128,512,1024 sms=64
    done
    run 60 $bench model=deepseek-v3 hidden=1536 experts=512 ops=PDCGB tokens=4096 sms=64
    run 60 $bench layout=flat ops=PU tokens=4096 sms=32,64
    for quantize in 0 1; do
        run 60 $bench type=e4m3 scales=128 quantize=$quantize ops=PD tokens=4096 sms=64
    done
    for routing in zipf hot; do run 60 $bench routing=$routing ops=PDC tokens=4096 sms=64; done
}

# Prints the results of all parts. Fails if a run failed or was not run.
part_table() {
    local of status=0
    nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c
    for of in tests bindings hosts bench; do
        [ -s $ALL/$of.txt ] || { echo "$of: not run"; status=1; continue; }
        echo "$of: $(grep -c '^good' $ALL/$of.txt) runs good, $(grep -c '^WRONG' $ALL/$of.txt) wrong," \
            "$(grep -c '^not run' $ALL/$of.txt) not run, $(cat $ALL/$of.when)"
        grep '^WRONG\|^not run\|^left out' $ALL/$of.txt
        ! grep -q '^WRONG\|^not run' $ALL/$of.txt || status=1
    done
    [ ! -s $ALL/bench.json ] || "$PYTHON" bench/gpu/table.py $ALL/bench.json docs/lab/gpu-bench.json
    grep -hE "^layer|^decode|compared with torch" $ALL/layers.log 2>/dev/null
    return $status
}

status=0
for part in $PARTS; do
    results=$ALL/$part.txt
    case $part in
    tests) limit=470 ;;
    bindings) limit=540 ;;
    hosts) limit=90 ;;
    *) limit=400 ;;
    esac
    END=$(($(date +%s) + ${SECONDS_PER_PART:-$limit}))
    if [ $part = table ]; then
        part_table || status=1
        continue
    fi
    bench/gpu/idle.sh || exit 1
    rm -f "$results" "$ALL/$part.failed"
    echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), seed $SEED, $(date -u '+%F %H:%M')" |
        tee $ALL/$part.when
    echo "== $part"
    part_$part
    ! grep -qs '^WRONG\|^not run' "$results" || status=1
done
exit $status
