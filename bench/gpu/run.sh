#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the benchmarks of the p2p backend on the GPUs of this machine: the shapes of several models, few
# tokens, skewed routing, and whole layers. Each figure is printed with its floor. The script fails if
# another process uses the GPUs before or after the benchmarks.
#   JSON=FILE    file for the results, one JSON object per line
#   SMS=48,64    numbers of SMs
#   LAST=FILE    earlier results of this script, for the last column of the table
set -e
bench/gpu/idle.sh
OUT=${GPU_OUT:-build/gpu}
JSON=${JSON:-$OUT/bench.json}
LAST=${LAST:-docs/lab/gpu-bench.json}
SMS=${SMS:-48,64,132}
MODELS=${MODELS:-deepseek-v3 qwen3-235b gpt-oss-120b llama4-maverick qwen3-30b dbrx}
timeout 60 "$OUT/gpu_router"
GPUS=$(nvidia-smi -L | grep -c "^GPU")
if [ "$GPUS" -lt 2 ]; then
    echo "left out: the benchmarks need two GPUs, there is $GPUS"
    exit 0
fi
# a power of two, because the ranks must divide the experts of each model
RANKS=$((GPUS >= 8 ? 8 : GPUS >= 4 ? 4 : 2))
: >"$JSON"
bench() { timeout 300 "$OUT/gpu_bench" ranks=$RANKS gpus=$RANKS sms="$SMS" json="$JSON" "$@"; }

for model in $MODELS; do bench model="$model" ops=PDCGBL tokens=4096; done
bench ops=PDCTUGB tokens=8192
bench layout=flat ops=PDUGBL tokens=4096 sms="32,$SMS"
bench alignment=1 ops=PDCGBL tokens=1,8,32,64,128
for model in deepseek-v3 qwen3-235b qwen3-30b llama4-maverick; do
    bench model=$model alignment=1 ops=PDCGBL tokens=1,8,128,512,1024
done
# 4,096 tokens have a run of their own, because the largest number of tokens of a run is max_tokens of its
# context, on which the limits of the low-latency kernels depend
bench model=qwen3-next alignment=1 ops=PDCGB tokens=1,8,32,128,512,1024
bench model=qwen3-next alignment=1 ops=PDCGB tokens=4096
bench hidden=1536 experts=512 alignment=1 ops=PDCGB tokens=1,8,128,512,1024
bench hidden=1536 experts=512 ops=PDCGB tokens=4096
bench hidden=2048 experts=1024 alignment=1 ops=PDC tokens=1,8,128
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
bench windows=1 ops=PDCGB tokens=4096
# usage: layer NUMBER EXPERTS OPTION...; times whole layers of the model of gpu_moe with this number
layer() {
    first=$1 experts=$2
    shift 2
    timeout 300 "$OUT/gpu_moe" ranks=$RANKS first=$first models=$((first + 1)) experts=$experts json="$JSON" "$@"
}
layer 0 64 tokens=4096 whole  # 7168, inner 2048, top-8
layer 3 128 tokens=4096 whole # Qwen3-30B
for tokens in 1 8 32 128; do layer 3 128 tokens=$tokens decode; done
bench/gpu/idle.sh
[ -e "$LAST" ] || LAST=
python3 bench/gpu/table.py "$JSON" $LAST
echo "results as JSON: $JSON"
