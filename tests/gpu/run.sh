#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the GPU tests on the GPUs of this machine: ranks that share one GPU as threads and as processes,
# then processes and threads on several GPUs. Variables: CASES (random cases per test), SEED (the
# first seed), BIG (cases of full size), FAULTS (faults in one process), DEATHS (killed processes), STORM
# (operations without pauses). EPIC_TEST_SCALE multiplies the numbers of random cases.
OUT=${GPU_OUT:-build/gpu}
CASES=${CASES:-60}
SEED=${SEED:-1}
BIG=${BIG:-3}
FAULTS=${FAULTS:-24}
DEATHS=${DEATHS:-6}
STORM=${STORM:-10000}
GPUS=$(nvidia-smi -L | grep -c "^GPU")
failed=0
REGROUP=false # true: groups of GPUs can continue without a rank
[ ! -e build/lib/libepic_cuda_regroup.so ] || REGROUP=true
run() { timeout ${LIMIT:-120} "$OUT/$@" || failed=1; }

# Runs tests with heaps that are memory of cuMemCreate(). usage: heaps RANKS GPUS
heaps() {
    export EPIC_HEAP=descriptor
    for how in threads processes; do
        run gpu_check "$1" "$2" $how 10 $((SEED + 9600))
        run gpu_check "$1" "$2" $how 10 $((SEED + 9700)) lowlat
        run gpu_check "$1" "$2" $how 10 $((SEED + 9800)) tight windows
        run gpu_storm "$1" "$2" $how 200 "$SEED"
    done
    run api_deaths 3 "$2" 3
    ! $REGROUP || run api_regroup 4 "$2" 2
    unset EPIC_HEAP
}

# Runs compute-sanitizer on small cases. It finds memory errors, leaks, races, and wrong barriers in
# a CTA.
sanitize() {
    timeout 120 compute-sanitizer --error-exitcode 9 --tool "$@" >"$OUT/sanitizer.log" 2>&1
    if [ $? = 0 ] && grep -q ' 0 errors\| 0 hazards' "$OUT/sanitizer.log"; then
        echo "compute-sanitizer $*: good"
    else
        tail -n 20 "$OUT/sanitizer.log"
        failed=1
    fi
}

"$(dirname "$0")"/early.sh $(ls build/lib/libepic_cuda*.so build/lib/libepic_hosts*.so 2>/dev/null) || failed=1
run api_budget
run api_trace
info=build/bin/epic-info
[ -x $info ] || info=
for tokens in 24 1100; do run api_waits 3 $tokens $info; done
run api_nccl
LIMIT=300 run conformance_p2p
"$(dirname "$0")"/step_cuda.sh build/examples/step_cuda || failed=1
run api_rogue 60
for ranks in 1 2 3 8; do run api_data_errors $ranks; done
run api_data_errors_many 3
for ranks in 2 4; do run api_mismatch $ranks; done
run api_mismatch_many 4
run api_deaths 3 1 "$DEATHS"
! $REGROUP || run api_regroup 4 1 "$DEATHS"
! $REGROUP || run api_regroup_tree
! $REGROUP || run api_regroup_layer
LIMIT=300 run api_stops # all ranks together
run api_windows 2
for how in threads processes; do
    for ranks in 1 2 4; do run api_window_memory $ranks $how; done
done
run api_router 3000 "$SEED"
run api_experts
LIMIT=300 run api_layer "$CASES" 4 "$SEED"
LIMIT=300 run api_layer_rules 30 "$SEED"
LIMIT=300 run api_layer_invariant 40
LIMIT=300 run api_layer_tokens step=101
run api_layer_scaled
run gpu_grouped "$CASES" "$SEED"
run gpu_gate_check "$CASES" "$SEED" large
run gpu_gate_blocks "$CASES" "$SEED" large
run gpu_experts_check "$CASES" "$SEED" 200
for ranks in 1 2 3 4 8; do run gpu_check $ranks 1 threads "$CASES" $((SEED + ranks * 1000)); done
for ranks in 1 2 3 4 8; do run gpu_check $ranks 1 threads "$CASES" $((SEED + ranks * 1000 + 300)) lowlat; done
for ranks in 1 2 3 4 8; do run gpu_check $ranks 1 threads "$CASES" $((SEED + ranks * 1000 + 400)) most; done
for ranks in 2 3 4; do # each form in turn, twice
    run gpu_check $ranks 1 threads 72 $((SEED + ranks * 1000 + 600)) usual forms
    run gpu_check $ranks 1 threads 72 $((SEED + ranks * 1000 + 700)) lowlat forms
done
for ranks in 1 2 3 4; do run gpu_check $ranks 1 threads "$CASES" $((SEED + ranks * 1000 + 900)) usual windows; done
for ranks in 2 3 4; do run gpu_check $ranks 1 threads "$CASES" $((SEED + ranks * 1000 + 5700)) tight windows; done
run gpu_check 2 1 processes 10 $((SEED + 9800)) usual windows
run gpu_check 16 1 threads 20 $((SEED + 16000))
run gpu_check 16 1 threads 20 $((SEED + 16300)) lowlat
run gpu_check 32 1 threads 5 $((SEED + 32000))
if $REGROUP; then
    for ranks in 1 2 4 8; do run gpu_check_regroup $ranks 1 threads 20 $((SEED + ranks * 1000 + 70)); done
    for ranks in 2 4; do run gpu_check_regroup $ranks 1 threads 20 $((SEED + ranks * 1000 + 370)) lowlat; done
    run gpu_check_regroup 2 1 threads 20 $((SEED + 2970)) usual windows
fi
for ranks in 1 2 4 8; do run gpu_check_many_ranks $ranks 1 threads 20 $((SEED + ranks * 1000 + 40)); done
run gpu_check_many_ranks 32 1 threads 5 $((SEED + 32040))
run gpu_check_many_ranks 34 1 17 1 $((SEED + 34000)) small # two processes of 17 ranks
EPIC_TEST_SCALE=0.1 LIMIT=300 run conformance_p2p 16
run gpu_check 4 1 threads "$CASES" $((SEED + 9000)) tight
run gpu_check 2 1 processes 10 $((SEED + 9500))
heaps 2 1
run gpu_storm 4 1 threads "$STORM" "$SEED"
run gpu_graph 4 1 threads 200
run gpu_graph_many 4 1 threads 200
run gpu_graph_many 4 1 threads 200 flat
run gpu_graph_many 4 1 threads 200 rare
run gpu_graph_many 4 1 threads 200 usual windows
run gpu_graph_many 4 1 threads 200 flat windows
run gpu_faults 4 1 threads "$FAULTS"
run gpu_faults_many 4 1 threads "$FAULTS"
if command -v compute-sanitizer >/dev/null; then
    # processes, because the tools may not run two kernels of one process at the same time
    for tool in memcheck initcheck synccheck racecheck; do
        sanitize $tool --target-processes all "$OUT/gpu_check" 2 1 processes 6 "$SEED" small
    done
else
    echo "left out: there is no compute-sanitizer"
fi
if [ "$GPUS" -gt 1 ]; then
    for ranks in $(seq 2 "$((GPUS < 8 ? GPUS : 8))"); do
        run gpu_check $ranks "$GPUS" processes "$CASES" $((SEED + ranks * 1000 + 500))
        run gpu_check $ranks "$GPUS" processes "$CASES" $((SEED + ranks * 1000 + 800)) lowlat
        run gpu_check $ranks "$GPUS" processes "$CASES" $((SEED + ranks * 1000 + 950)) usual windows
        run gpu_check $ranks "$GPUS" processes "$CASES" $((SEED + ranks * 1000 + 5950)) tight windows
    done
    run gpu_check "$GPUS" "$GPUS" threads "$CASES" $((SEED + 10000))
    heaps "$GPUS" "$GPUS"
    run gpu_storm "$GPUS" "$GPUS" processes "$STORM" $((SEED + 20))
    run gpu_graph "$GPUS" "$GPUS" processes 2000
    run gpu_faults "$GPUS" "$GPUS" processes 12
    run gpu_faults "$GPUS" "$GPUS" threads 12
    run api_deaths "$GPUS" "$GPUS" "$DEATHS"
    ! $REGROUP || run api_regroup 4 "$GPUS" "$DEATHS"
    LIMIT=600 run gpu_check "$GPUS" "$GPUS" processes "$BIG" "$SEED" big
    LIMIT=600 run gpu_check "$GPUS" "$GPUS" processes "$BIG" "$SEED" big windows
else
    LIMIT=600 run gpu_check 2 1 threads "$BIG" "$SEED" big
fi
exit $failed
