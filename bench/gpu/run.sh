#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the benchmarks of the p2p backend on the GPUs of this machine: the shapes of several models, few
# tokens, and skewed routing. Each figure is printed with its floor.
#   JSON=FILE    file for the results, one JSON object per line
#   SMS=48,64    numbers of SMs
#   LAST=FILE    earlier results of this script, for the last column of the table
set -e
OUT=${GPU_OUT:-build/gpu}
JSON=${JSON:-$OUT/bench.json}
LAST=${LAST:-docs/lab/gpu-bench.json}
SMS=${SMS:-48,64,132}
MODELS=${MODELS:-deepseek-v3 qwen3-235b gpt-oss-120b llama4-maverick qwen3-30b dbrx}
timeout 60 "$OUT/gpu_router"
GPUS=$(nvidia-smi -L | wc -l)
if [ "$GPUS" -lt 2 ]; then
    echo "left out: the benchmarks need two GPUs, there is $GPUS"
    exit 0
fi
RANKS=$((GPUS < 8 ? GPUS : 8))
: >"$JSON"
bench() { timeout 300 "$OUT/gpu_bench" ranks=$RANKS gpus=$RANKS sms="$SMS" json="$JSON" "$@"; }

for model in $MODELS; do bench model="$model" ops=PDCGBL tokens=4096; done
bench ops=PDCTUGB tokens=8192
bench layout=flat ops=PDUGBL tokens=4096 sms="32,$SMS"
bench alignment=1 ops=PDCGBL tokens=1,8,32,64,128
for model in deepseek-v3 qwen3-235b qwen3-30b llama4-maverick; do
    bench model=$model alignment=1 ops=PDCGBL tokens=1,8,128,512,1024
done
bench model=qwen3-next alignment=1 ops=PDCGB tokens=1,8,32,128,512,4096
bench model=deepseek-v3 hidden=1536 experts=512 ops=PDCGB tokens=4096
for quantize in 0 1; do
    for scales in 128 32; do
        bench type=e4m3 scales=$scales quantize=$quantize ops=PD tokens=4096
        bench type=e4m3 scales=$scales quantize=$quantize alignment=1 ops=PD tokens=1,8,32,64,128
    done
done
for scales in 128 32; do bench type=e4m3 scales=$scales quantize=1 ops=G tokens=4096; done
bench padding=0 ops=PDG tokens=4096
bench padding=0 ops=PDG tokens=8,64,128
for routing in zipf hot; do bench routing=$routing ops=PDCUGB tokens=4096; done
[ -e "$LAST" ] || LAST=
python3 bench/gpu/table.py "$JSON" $LAST
echo "results as JSON: $JSON"
