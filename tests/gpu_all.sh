#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests tests/gpu/all.sh without GPUs, with stub programs that record their arguments: what runs on 2, 4
# and 8 GPUs, and that the script fails if a program fails or has no time.
set -eu
command -v python3 >/dev/null || { echo "left out: there is no python3"; exit 77; }
. "$(dirname "$0")/scratch.sh"

mkdir -p tests/gpu tests/torch/gpu tests/jax/gpu bench/gpu docs/lab build/lib build/gpu/hosts \
    build/gpu-torch/lib build/gpu-jax/lib bin
cp "$tests/gpu/all.sh" tests/gpu
cp "$tests/../bench/gpu/idle.sh" "$tests/../bench/gpu/table.py" bench/gpu
cp "$tests/../docs/lab/gpu-bench.json" docs/lab
touch build/lib/libepic_cuda_regroup.so bench/gpu/layer_torch.py

stub() { # usage: stub FILE [LINE OF THE STUB]
    cat >"$1" <<END
#!/bin/sh
echo "$1 \$* net=\${EPIC_NET-} host=\${EPIC_HOST-} counts=\${EPIC_GPU_COUNTS-} runs=\${EPIC_GPU_RUNS-}" >>runs
case "$1 \$*" in *"\$(cat fails)"*) exit 3 ;; esac
${2:-:}
END
    chmod +x "$1"
}
for name in api_deaths api_layer api_layer_invariant api_layer_rules api_layer_tokens api_nccl api_regroup \
    api_router api_stops api_window_memory conformance_p2p gpu_check gpu_faults gpu_graph gpu_graph_many \
    gpu_grouped gpu_storm; do stub build/gpu/$name; done
for name in check storm faults; do stub build/gpu/hosts/hosts_$name; done
stub tests/torch/gpu/run.sh
stub tests/jax/gpu/run.sh
result='{\"op\":\"layer\",\"hidden\":64,\"top_k\":8,\"experts\":64,\"layout\":\"expert\",\"type\":\"bf16\",'
result=$result'\"quantize\":0,\"scales\":0,\"alignment\":128,\"padding\":1,\"routing\":\"uniform\",'
result=$result'\"tokens\":4096,\"sms\":64,\"ranks\":8,\"us\":5.5}'
stub build/gpu/gpu_bench "for w; do case \$w in json=*) echo $result >>\${w#json=} ;; esac; done"
stub build/gpu/gpu_moe 'echo "layer, seven"'
stub bin/nvidia-smi 'case $1 in
-L) for gpu in $(seq $(cat gpus)); do echo "GPU $gpu"; echo "  MIG 1"; done ;;
*memory.used*) echo "0, 4" ;;
*name*) echo "a GPU" ;;
esac'
stub bin/python 'exec python3 "$@"'
export PATH="$PWD/bin:$PATH" GPU_PYTHON=python SEED=7

all() { tests/gpu/all.sh "$@" >said 2>&1; }
ran() { grep -q -e "$1" runs || fail "on $gpus GPUs no run has \"$1\": $(cat runs)"; }
echo nothing >fails
for gpus in 2 4 8; do
    echo $gpus >gpus
    : >runs
    all || fail "on $gpus GPUs: $(cat said)"
    # eight ranks on all GPUs and on fewer, with processes and threads
    for used in 2 4 8; do
        [ $used -le $gpus ] || continue
        for how in processes threads; do
            ran "gpu_check 8 $used $how [0-9]* [0-9]* net"
            ran "gpu_check 8 $used $how [0-9]* [0-9]* lowlat"
        done
        ran "gpu_storm 8 $used threads"
        ran "gpu_graph 8 $used threads"
    done
    for how in processes threads; do
        ran "gpu_check $gpus $gpus $how [0-9]* [0-9]* usual windows"
        ran "gpu_faults $gpus $gpus $how"
        ran "api_window_memory $gpus $how"
    done
    for name in storm graph graph_many; do ran "gpu_$name $gpus $gpus processes"; done
    ran "api_deaths $gpus $gpus"
    ran "api_layer_invariant 40 p2p 8"
    ran "api_layer_tokens step=401 ranks=2,4,8"
    ran "torch/gpu/run.sh "
    for what in check:processes layer:processes layer:one; do ran "jax/gpu/run.sh .*counts=$gpus runs=$what"; done
    for local in 1 2 4; do
        for name in check storm faults; do ran "hosts_$name 8 $gpus .*net=chaos host=%r/$local"; done
    done
    for model in deepseek-v3 kimi-k2 qwen3-235b gpt-oss-120b llama4-maverick qwen3-30b qwen3-next; do
        ran "gpu_bench ranks=$gpus gpus=$gpus .*model=$model .*tokens=4096,8192"
        ran "gpu_bench ranks=$gpus gpus=$gpus .*model=$model .*tokens=1,.*1024"
    done
    ran "gpu_bench .*windows=1"
    ran "gpu_moe .*experts=128 tokens=4096 whole"
    ran "layer_torch.py layers"
    ! grep 'gpu_bench\|gpu_moe\|layer_torch' runs | grep 'net=chaos' || fail "the net of the hosts is used elsewhere"
    grep -q '^64 8/64 .* 5.5' said && grep -q '^layer, seven' said || fail "no table: $(cat said)"
done

echo "gpu_storm 8 8" >fails
! all tests || fail "a failure is not reported: $(cat said)"
grep -q '^WRONG (3)' said || fail "$(cat said)"
! all table || fail "the table does not report the failure: $(cat said)"
echo nothing >fails
all tests || fail "$(cat said)"
all table || fail "$(cat said)"
! SECONDS_PER_PART=10 all hosts || fail "a part without time is good: $(cat said)"
grep -q '^not run' said || fail "$(cat said)"
rm build/gpu/all/hosts.txt
! all table || fail "a part that was not run is good: $(cat said)"
grep -q '^hosts: not run' said || fail "$(cat said)"
! all test || fail "an unknown part is run: $(cat said)"

# A run that ends, or is interrupted, leaves no process behind, not even one in another process group.
is_left() { # usage: is_left PROCESS
    state=$(sed 's/.*) \(.\).*/\1/' "/proc/$1/stat" 2>/dev/null) || return 1
    [ "$state" != Z ]
}
stub build/gpu/api_nccl 'timeout 300 sleep 300 & echo $! >left_over; sleep 0.2'
all tests || fail "$(cat said)"
! is_left "$(cat left_over)" || fail "a process is left: $(cat left_over), state $state"
stub build/gpu/gpu_check 'echo $$ >running; sleep 300'
rm -f running
tests/gpu/all.sh tests >said 2>&1 &
script=$!
for _ in $(seq 100); do [ -s running ] && break || sleep 0.1; done
kill -TERM $script
! wait $script || fail "an interrupted script ends with status 0: $(cat said)"
! is_left "$(cat running)" || fail "a process is left: $(cat running), state $state"

# tests/jax/gpu/run.sh: a process that kills itself after "right" is no failure, "wrong" and a crash are
mkdir -p one/tests/jax/gpu && cp "$tests/jax/gpu/run.sh" one/tests/jax/gpu && cd one
echo 2 >gpus
cp gpus fails
jax() { # usage: jax LAST LINES OF PROCESS 1
    printf '#!/bin/sh\n[ "$2" = 0 ] && echo right && exit\n%s\n' "$1" >python
    chmod +x python
    GPU_PYTHON=./python EPIC_GPU_COUNTS=2 EPIC_GPU_RUNS=check:processes tests/jax/gpu/run.sh >said 2>&1
}
jax 'echo right; kill -9 $$' || fail "a process that ends as planned is a failure: $(cat said)"
! jax 'echo right; echo wrong' || fail "a wrong result is no failure: $(cat said)"
! jax 'kill -9 $$' || fail "a crash is no failure: $(cat said)"
