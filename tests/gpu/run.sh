#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the GPU tests on the GPUs that are there: virtual ranks on one GPU, then processes and
# threads on several.  CASES random cases for each, SEED the first seed.
OUT=${GPU_OUT:-build/gpu}
CASES=${CASES:-60}
SEED=${SEED:-1}
GPUS=$(nvidia-smi -L | wc -l)
failed=0
run() { timeout 120 "$OUT/$@" || failed=1; }

for ranks in 1 2 4 8; do run api_step $ranks; done
for ranks in 1 2 3 8; do run api_data_errors $ranks; done
for ranks in 1 2 3 4 8; do run gpu_check $ranks 1 threads "$CASES" $((SEED + ranks * 1000)); done
run gpu_check 4 1 threads "$CASES" $((SEED + 9000)) tight
run gpu_graph 4 1 threads 200
run gpu_faults 4 1 threads 16
if [ "$GPUS" -gt 1 ]; then
    for ranks in $(seq 2 "$((GPUS < 8 ? GPUS : 8))"); do
        run gpu_check $ranks "$GPUS" processes "$CASES" $((SEED + ranks * 1000 + 500))
    done
    run gpu_check "$GPUS" "$GPUS" threads "$CASES" $((SEED + 10000))
    run gpu_check "$GPUS" "$GPUS" processes 4 "$SEED" big
    run gpu_graph "$GPUS" "$GPUS" processes 2000
    run gpu_faults "$GPUS" "$GPUS" processes 12
    run gpu_faults "$GPUS" "$GPUS" threads 12
else
    run gpu_check 2 1 threads 4 "$SEED" big
fi
exit $failed
