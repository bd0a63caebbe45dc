#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compares EPIC with pipelines written with MPI (bench/mpi). Then measures how EPIC's times grow with
# tokens, ranks and experts.
# usage: run.sh FOLDER    FOLDER contains the program mpi and gets results.json and results.svg
#   RANKS="2 4" TOKENS=8,256,4096 HIDDEN=2048,7168 ROUNDS=21 INNER=64    sizes of the comparison
#   BACKENDS="shm mpi"    backends; each is compared with the forms on MPI
#   GROWTH=0              skips the second part
set -eu
out=$1
cores=$(nproc)
ranks=${RANKS:-2 4 $([ "$cores" -lt 8 ] || echo 8) $([ "$cores" -lt 16 ] || echo 16)}
json=$out/results.json
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
[ -x "$out/mpi" ] || { echo "left out: there is no MPI (Debian: libopenmpi-dev openmpi-bin)"; exit 0; }
rm -f "$json"

bench() { # usage: bench RANKS OPTION...
    number=$1
    shift
    timeout -k 5 3600 mpiexec -n "$number" "$out/mpi" --json "$json" "$@"
}

# Run one backend at a time, because a context of backend mpi has a thread that uses CPU time.
for number in $ranks; do
    for backend in ${BACKENDS:-shm mpi}; do
        bench "$number" --tokens "${TOKENS:-8,256,4096}" --hidden "${HIDDEN:-2048,7168}" \
            --rounds "${ROUNDS:-21}" --inner "${INNER:-64}" --backends "$backend"
    done
done
if [ "${GROWTH:-1}" = 1 ]; then
    alone="--forms none --backends shm --inner 0 --hidden 2048 --rounds ${ROUNDS:-21}"
    bench 4 $alone --tokens 1,4,16,64,256,1024,4096
    for number in 1 2 4 8 16 32 64; do bench $number $alone --tokens 64; done
    for experts in 64 256 1024 4096 16384 65536; do bench 4 $alone --tokens 256 --experts $experts; done
fi
if command -v python3 >/dev/null; then
    python3 bench/draw.py "$json" "$out/results.svg"
    echo "results: $json, $out/results.svg"
else
    echo "results: $json; left out: no python3 to draw them"
fi
