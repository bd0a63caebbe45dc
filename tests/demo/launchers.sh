#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Ranks started by a launcher have the same losses as ranks that the program starts itself.
set -eu
. "$(dirname "$0")/common.sh"

run --steps 10 --ranks 4 --log forked.log >out

# The variables that torchrun sets.
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000)) WORLD_SIZE=2
RANK=1 run --steps 10 >out1 2>err1 &
RANK=0 run --steps 10 --log launched.log >out0 2>err0 || fail "rank 0: $(cat err0)"
wait $! || fail "rank 1: $(cat err1)"
cmp forked.log launched.log || fail "2 launched ranks have other losses"
[ ! -s out1 ] || fail "rank 1 says: $(cat out1)"

# Options that differ between ranks are an error.
MASTER_PORT=$((MASTER_PORT + 1))
RANK=1 run --steps 10 --rate 0.1 >out1 2>err1 &
if RANK=0 run --steps 10 >out0 2>err0; then fail "different options were not noticed"; fi
if wait $!; then fail "different options were not noticed by rank 1"; fi
grep -q 'rank 1 has other options' err0 || fail "$(cat err0)"
if RANK=0 run --ranks 4 >out0 2>err0; then fail "--ranks 4 of 2"; fi &
RANK=1 run --ranks 4 >out1 2>err1 || [ $? = 2 ] || fail "--ranks 4 of 2: $(cat err1)"
wait
unset MASTER_ADDR MASTER_PORT WORLD_SIZE

# The variables that srun sets on one node.
export SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NNODES=1
SLURM_PROCID=1 run --steps 10 >out1 2>err1 &
SLURM_PROCID=0 run --steps 10 --log tasks.log >out0 2>err0 || fail "task 0: $(cat err0)"
wait $! || fail "task 1: $(cat err1)"
cmp forked.log tasks.log || fail "2 tasks have other losses"
[ ! -s out1 ] || fail "task 1 says: $(cat out1)"
unset SLURM_JOB_ID SLURM_STEP_ID SLURM_STEP_NUM_TASKS SLURM_NNODES

command -v mpirun >/dev/null || { echo "left out: there is no mpirun"; exit 0; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
mpirun -n 4 "$program" --hidden 32 --inner 48 --tokens 256 --sample 0 --picture none --steps 10 \
    --log mpirun.log text >out 2>&1 || fail "mpirun: $(cat out)"
cmp forked.log mpirun.log || fail "mpirun has other losses"
mpirun -n 2 "$program" --hidden 32 --inner 48 --tokens 256 --sample 0 --picture none --steps 10 \
    --backend mpi --log mpi.log text >out 2>&1 || {
    grep -q 'libepic_mpi' out && { echo "left out: backend mpi was not built"; exit 0; }
    fail "mpirun, backend mpi: $(cat out)"
}
cmp forked.log mpi.log || fail "backend mpi has other losses"
grep -q 'backend mpi' out || fail "--backend mpi is not what was used"
