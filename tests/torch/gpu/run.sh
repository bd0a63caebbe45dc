#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests epic.torch on the GPUs of this machine: ranks that are threads or processes with a GPU each,
# processes that share the GPUs, of which one is killed in the end, and the example.  Ends with a
# line for each run, whatever went wrong before.  usage: run.sh [cases]
#   EPIC_GPU_RUNS="threads:1 shared:2"  these alone
#   EPIC_GPU_LIMIT, EPIC_GPU_TOTAL      seconds for one run (90), and for all of them (230)
set -u
cd "$(dirname "$0")/../../.." || exit 1
PYTHON=${GPU_PYTHON:-python3}
LIMIT=${EPIC_GPU_LIMIT:-90}
END=$(($(date +%s) + ${EPIC_GPU_TOTAL:-230}))
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")
[ "$GPUS" -gt 0 ] || { echo "there is no GPU"; exit 1; }
export EPIC_LIBRARY_PATH="${EPIC_LIBRARY_PATH:-$PWD/build/lib}" PYTHONPATH="$PWD/bindings/python"
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0
summary=

# Prints the end of a program's output; each failure is a whole line of this output.
run() { # what, last line, command
    what=$1 last=$2
    shift 2
    left=$((END - $(date +%s)))
    [ "$left" -gt 10 ] || { failed=1 summary="$summary
$what: not run, the time was up"; return; }
    [ "$left" -lt "$LIMIT" ] || left=$LIMIT
    echo "== $what"
    timeout -k 10 "$left" "$@" >"$log" 2>&1
    code=$?
    if [ $code = 0 ] && tail -n 1 "$log" | grep -q "$last"; then
        verdict=right
    else
        failed=1 verdict="WRONG (exit $code$([ $code != 124 ] || echo ", $left s were up"))"
    fi
    if [ "$verdict" = right ]; then grep -v -i warning "$log" | tail -n 40; else tail -n 60 "$log"; fi |
        cut -c 1-1200
    summary="$summary
$what: $verdict"
}

run "torch and EPIC here" '^right$' "$PYTHON" -c "
import torch, epic.torch
print('torch', torch.__version__, 'CUDA', torch.version.cuda, torch.cuda.device_count(), 'x',
      torch.cuda.get_device_name(), torch.cuda.get_device_capability())
with epic.torch.Group(num_ranks=1, max_tokens=8, max_row_bytes=64, device='cuda') as group:
    print(group, group.backend)
print('right')"
most=$((GPUS >= 8 ? 8 : GPUS >= 4 ? 4 : GPUS >= 2 ? 2 : 1))
share=$((2 * most > 4 ? 4 : 2 * most))
runs="processes:$most threads:$most shared:$share deaths:$share"
[ "$most" -le 4 ] || runs="$runs processes:4" # some cases need four ranks
for what in ${EPIC_GPU_RUNS:-$runs}; do
    how=${what%:*} count=${what#*:}
    run "$what of $GPUS GPUs" '^right$' "$PYTHON" tests/torch/gpu/check.py "$how" "$count" "$@"
done
if [ $# = 0 ] && [ -z "${EPIC_GPU_RUNS-}" ]; then
    # torch's allocators that make their memory by cuMemCreate and by cudaMallocAsync
    for config in expandable_segments:True backend:cudaMallocAsync; do
        run "windows with $config" '^right$' env PYTORCH_CUDA_ALLOC_CONF="$config" \
            "$PYTHON" tests/torch/gpu/check.py processes "$most" windows
    done
    run "example, $most of $GPUS GPUs" ': right$' "$PYTHON" examples/torch/ep_moe.py --check \
        --device cuda --processes "$most" --ep "$most"
fi
echo "== all"
echo "${summary#?}"
exit $failed
