#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A backend's library may be missing, may be a file that is not a library, or may itself need a missing
# library.  In each case the error names the file, the cause and a remedy.
# usage: plugin.sh LIBRARY PROGRAM    PROGRAM opens the backend of the variable EPIC_BACKEND
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# The copy must not search the folder where it was built, so this path is overwritten.
built=$(cd "$(dirname "$1")" && pwd)
sed "s|$built|$(echo "$built" | tr a-z b-za)|g" "$1" >"$folder/libepic.so.0"

# usage: refuses BACKEND WORD...; the program must fail with an error that contains all words
refuses() {
    if said=$(LD_LIBRARY_PATH=$folder EPIC_BACKEND=$1 "$program" 2>&1); then
        echo "$program ran: $said"
        exit 1
    fi
    echo "$said"
    shift
    for word; do
        case $said in
        *"$word"*) ;;
        *) echo "the error does not contain: $word"; exit 1 ;;
        esac
    done
}

program=$2
refuses mpi libepic_mpi.so "not next to libepic.so" "finds an MPI" openmpi-bin "build again"
refuses p2p libepic_cuda.so "not next to libepic.so" nvcc "build again"
refuses gpu libepic_cuda.so "not next to libepic.so" nvcc "build again"
refuses hosts libepic_hosts.so "GPUs of several hosts" nvcc libucx-dev
refuses none '"none"' "self, threads, shm, mpi, p2p and hosts, and gpu"
echo "no library" >"$folder/libepic_cuda.so"
refuses p2p libepic_cuda.so "$folder/libepic_cuda.so: " "CUDA runtime"

# Overwrites the name of the MPI library, as if that MPI were not installed.
mpi=$built/libepic_mpi.so
[ -e "$mpi" ] || exit 0
sed 's/libmpi/libmpj/g' "$mpi" >"$folder/libepic_mpi.so"
refuses mpi "libepic_mpi.so cannot be loaded" openmpi-bin "built for" libmpj
