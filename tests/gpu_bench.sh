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
-L) [ -z "${NO_GPU-}" ] ;;
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
result 25.0 64 >"$folder/now"
result 26.0 132 >>"$folder/now"
result 20.0 64 >"$folder/last"
result 99.0 64 0 >>"$folder/last" # another case
python3 bench/gpu/table.py "$folder/now" "$folder/last" >"$folder/table"
grep -Eq '^2048 10/512 +combine +64 +128 +25.0 +31.5 +40.0 +1.25 +1.25$' "$folder/table" &&
    grep -Eq '^2048 10/512 +combine +132 +128 +26.0 +31.5 +40.0 +1.25 *$' "$folder/table" ||
    { echo "the table is wrong:"; cat "$folder/table"; exit 1; }
