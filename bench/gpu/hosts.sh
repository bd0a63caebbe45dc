#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Times backend hosts on two GPUs that act as two hosts, or on one GPU that two ranks share, over each
# net: GPU memory copied by a kernel that acts as a NIC of 50 GB/s, GPU memory copied by copy engines,
# host memory copied by threads, and UCX over TCP. For comparison also times the nets without EPIC's
# kernels, and p2p.
OUT=${HOSTS_OUT:-build/gpu/hosts}
export LD_LIBRARY_PATH=$OUT:$PWD/build/lib:$LD_LIBRARY_PATH
export UCX_LOG_LEVEL=error UCX_ERROR_SIGNALS=
run() {
    echo "== $*"
    timeout 60 env "$@" || { echo "   ended with $?"; failed=1; }
}
failed=0
# Every thread that copies host memory polls, so all ranks together must leave some cores free.
ranks=$(nvidia-smi -L | grep -c "^GPU")
[ "$ranks" -ge 2 ] || ranks=2
copiers=$(($(nproc) / ranks - 4))
[ $copiers -le 14 ] || copiers=14
[ $copiers -ge 1 ] || copiers=1
run "$OUT/gpu_net"
# No module may be loaded while the kernel that acts as a NIC runs.
export CUDA_MODULE_LOADING=EAGER
run EPIC_LOCAL_NIC=16 "$OUT/gpu_net"
run EPIC_NET=local EPIC_NET_MEMORY=gpu EPIC_LOCAL_NIC=16 "$OUT/gpu_hosts" ranks=2 threads=1 sms=32 tokens=1,8,128,4096 idle=0
run EPIC_NET=local EPIC_NET_MEMORY=gpu "$OUT/gpu_hosts" tokens=1,8,128,4096
run EPIC_NET=local EPIC_NET_MEMORY=host EPIC_LOCAL_THREADS=$copiers "$OUT/gpu_hosts" threads=1 tokens=1,8,128,4096 idle=0
run EPIC_NET=ucx EPIC_NET_MEMORY=host "$OUT/gpu_hosts" tokens=1,8,128,4096
run EPIC_NET=ucx EPIC_NET_MEMORY=host "$OUT/gpu_hosts" local=2 tokens=1,8,128,4096 idle=0
run "$OUT/gpu_hosts" backend=p2p tokens=1,8,128,4096 idle=0
exit $failed
