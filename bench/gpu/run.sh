#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every benchmark of the p2p backend on the GPUs that are there: each number of tokens with uniform
# routing, then skewed routing.  Lines of JSON go to JSON, SMS are the numbers of SMs.
set -e
OUT=${GPU_OUT:-build/gpu}
JSON=${JSON:-$OUT/bench.json}
SMS=${SMS:-48,64,132}
timeout 60 "$OUT/gpu_router"
GPUS=$(nvidia-smi -L | wc -l)
if [ "$GPUS" -lt 2 ]; then
    echo "left out: the benchmarks need two GPUs, there is $GPUS"
    exit 0
fi
RANKS=$((GPUS < 8 ? GPUS : 8))
: >"$JSON"
bench() { timeout 300 "$OUT/gpu_bench" ranks=$RANKS gpus=$RANKS sms="$SMS" json="$JSON" "$@"; }

bench ops=PDCTUGBp tokens=4096,8192
bench tokens=1,8,64,512,1024
for routing in zipf hot; do bench routing=$routing tokens=4096; done
echo "results as JSON: $JSON"
