#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# EPIC beside pipelines on MPI (bench/mpi), then how EPIC grows with tokens, ranks and experts.
# usage: run.sh FOLDER, where build/bench/mpi lies; results.json and results.svg go there too
#   RANKS="2 4" TOKENS=8,256,4096 HIDDEN=2048,7168 ROUNDS=21 INNER=64    of the comparison;
#   BACKENDS="shm mpi"                                                   each beside the forms on MPI
#   GROWTH=0                                                             leaves the growth out
set -eu
out=$1
cores=$(nproc)
ranks=${RANKS:-2 4 $([ "$cores" -lt 8 ] || echo 8) $([ "$cores" -lt 16 ] || echo 16)}
json=$out/results.json
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
[ -x "$out/mpi" ] || { echo "left out: there is no MPI (Debian: libopenmpi-dev openmpi-bin)"; exit 0; }
rm -f "$json"

bench() { # ranks, options
    number=$1
    shift
    timeout -k 5 3600 mpiexec -n "$number" "$out/mpi" --json "$json" "$@"
}

# One backend a run: a context of backend mpi has a thread of its own, which takes time from others.
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
