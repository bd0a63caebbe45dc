#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests the scripts of the GPU benchmarks without a GPU: the check that no other process uses the GPUs, with
# a small nvidia-smi, and the table of results.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/nvidia-smi" <<'END'
#!/bin/sh
case $1 in
-L) [ -z "${NO_GPU-}" ] && seq -f "GPU %g" "${GPUS:-2}" ;;
*compute-apps*) printf "$PIDS" ;;
*) printf "0, 4\n1, $MIB\n" ;;
esac
END
chmod +x "$folder/nvidia-smi"
export PATH="$folder:$PATH"

idle() { PIDS=$1 MIB=$2 bench/gpu/idle.sh >"$folder/out" 2>&1; }
idle "" 700 || { echo "idle GPUs are refused: $(cat "$folder/out")"; exit 1; }
! idle "" 5000 || { echo "memory in use is not noticed"; exit 1; }
grep -q "5000 MiB of GPU 1 are in use" "$folder/out" || { cat "$folder/out"; exit 1; }
! idle '17\n23\n' 4 || { echo "other processes are not noticed"; exit 1; }
grep -q "use the GPUs: 17 23" "$folder/out" || { cat "$folder/out"; exit 1; }
! NO_GPU=1 idle "" 4 || { echo "a machine without a GPU is not noticed"; exit 1; }
grep -q "there is no GPU" "$folder/out" || { cat "$folder/out"; exit 1; }

result() { # usage: result US SMS [PADDING]
    echo '{"op":"combine","hidden":2048,"top_k":10,"experts":512,"layout":"expert","type":"bf16","quantize":0,' \
        '"scales":0,"alignment":128,"padding":'"${3:-1}"',' \
        '"routing":"uniform","tokens":128,"sms":'"$2"',"ranks":2,"windows":0,"us":'"$1"',"p90_us":31.5,' \
        '"worst_us":40.0,"floor_us":20.0,"of_floor":1.25}'
}
result 20.0 64 >"$folder/last"
result 99.0 64 0 >>"$folder/last" # another case
{
    result 99.0 64 # replaced by a later result of the same case
    result 25.0 64
    result 26.0 132
    result 27.0 64 | sed 's/"op":"combine"/"op":"layer","note":"inner 768"/'
} >"$folder/now"
python3 bench/gpu/table.py "$folder/now" "$folder/last" >"$folder/table"
[ "$(wc -l <"$folder/table")" = 5 ] &&
    grep -Eq '^2048 10/512, inner 768 +layer +64 +128 +27.0 +31.5 +40.0 +1.25 *$' "$folder/table" &&
    grep -q '^2 of 3 rows are not in the earlier run (2 ranks)$' "$folder/table" ||
    { echo "the table of layers is wrong:"; cat "$folder/table"; exit 1; }
grep -Eq '^2048 10/512 +combine +64 +128 +25.0 +31.5 +40.0 +1.25 +1.25$' "$folder/table" &&
    grep -Eq '^2048 10/512 +combine +132 +128 +26.0 +31.5 +40.0 +1.25 *$' "$folder/table" ||
    { echo "the table is wrong:"; cat "$folder/table"; exit 1; }

# Checks with stub programs that bench/gpu/run.sh runs the cases below and prints the table, and that it
# runs nothing and fails if another process uses the GPUs.
mkdir -p "$folder/gpu"
cat >"$folder/gpu/gpu_bench" <<'END'
#!/bin/sh
echo "$(basename "$0") $*" >>"$(dirname "$0")/runs"
json=
for word; do case $word in json=*) json=${word#json=} ;; esac; done
[ -z "$json" ] || cat "$(dirname "$0")/../now" >>"$json"
END
chmod +x "$folder/gpu/gpu_bench"
for program in gpu_moe gpu_router; do cp "$folder/gpu/gpu_bench" "$folder/gpu/$program"; done
measure() { PIDS=$1 MIB=4 GPU_OUT="$folder/gpu" LAST="$folder/last" bench/gpu/run.sh >"$folder/out" 2>&1; }
! measure '17\n' || { echo "benchmarks run although another process uses the GPUs"; exit 1; }
[ ! -e "$folder/gpu/runs" ] || { cat "$folder/gpu/runs"; exit 1; }
measure "" || { cat "$folder/out"; exit 1; }
grep -q '/ last' "$folder/out" || { cat "$folder/out"; exit 1; }
for case in 2:2 3:2 7:4 8:8 9:8; do # GPUs:ranks
    rm "$folder/gpu/runs"
    GPUS=${case%:*} measure "" || { cat "$folder/out"; exit 1; }
    ! grep 'ranks=' "$folder/gpu/runs" | grep -v "ranks=${case#*:} " ||
        { echo "on ${case%:*} GPUs not all benchmarks have ${case#*:} ranks"; exit 1; }
done
needs() { # usage: needs PATTERN...: all in one line of the runs
    lines=$(cat "$folder/gpu/runs")
    for pattern; do lines=$(echo "$lines" | grep -e "$pattern") || { echo "no run has: $*"; exit 1; }; done
}
for tokens in 512 1024; do
    needs "[=,]$tokens[, ]*" model=deepseek-v3
    needs "[=,]$tokens[, ]*" model=qwen3-30b
done
needs model=llama4-maverick 'tokens=.*1024'
needs model=qwen3-235b 'tokens=.*128'
needs hidden=1536 experts=512 tokens=4096
needs model=qwen3-next 'tokens=1,.*1024' alignment=1
needs model=qwen3-next tokens=4096
needs experts=1024
needs type=e4m3 quantize=0 tokens=4096
needs type=e4m3 quantize=1 tokens=4096
needs gpu_moe first=3 experts=128 tokens=4096 whole
needs gpu_moe first=0 experts=64 tokens=4096 whole
for tokens in 1 8 32 128; do needs gpu_moe experts=128 "tokens=$tokens " decode; done
