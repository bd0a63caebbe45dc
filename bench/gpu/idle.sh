#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Ends with status 1 if this machine has no GPU, or if another process uses one, because times would then be wrong: a
# process that was left over made one in ten repetitions take ten times as long. In a container nvidia-smi
# does not list the processes of others, so memory in use is a sign, too.
set -eu
nvidia-smi -L >/dev/null 2>&1 || { echo "there is no GPU (nvidia-smi -L lists none)" >&2; exit 1; }
pids=$(nvidia-smi --query-compute-apps=pid --format=csv,noheader | tr '\n' ' ')
if [ -n "$pids" ]; then
    echo "other processes use the GPUs: $pids: end them first" >&2
    exit 1
fi
nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits | while IFS=', ' read -r gpu mib; do
    case $mib in *[!0-9]*) continue ;; esac # "[N/A]": the GPU does not report it
    [ "$mib" -le 1024 ] || { echo "$mib MiB of GPU $gpu are in use: end the process that uses them" >&2; exit 1; }
done
