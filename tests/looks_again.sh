#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A build folder that was configured on a bare machine, as `make demo` does, has all parts once their
# compilers are there, as after the set-up of `make test`.
set -eu
cd "$(dirname "$0")/.."
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
unset CC CXX CUDACXX CUDAHOSTCXX
mkdir "$here/bin"
for program in cc gcc as ld ar ranlib nm objcopy objdump strip readelf cmake make gmake ninja \
    ccache sh uname; do
    path=$(command -v $program) && ln -s "$path" "$here/bin"
done

configure() { # the system's folders: ON or OFF; PATH
    PATH=$2 cmake -S . -B "$here/build" -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=$1 >"$here/log" 2>&1 || { cat "$here/log"; exit 1; }
    { ctest --test-dir "$here/build" -N; cmake --build "$here/build" --target help; } >"$here/parts"
}

failed=0
configure OFF "$here/bin"
for part in 'emulated\.' 'conformance\.mpi\.' epic_cuda epic_hosts; do
    if grep -q "$part" "$here/parts"; then echo "the bare machine has $part"; failed=1; fi
done
for words in 'C++ compiler' MPI nvcc UCX OpenBLAS; do
    grep -q "^-- left out: .*$words" "$here/log" || { echo "no word of $words"; failed=1; }
done

configure ON "$PATH"
num_installed=0
check() { # part, programs that it takes
    part=$1
    shift
    for program; do
        command -v "$program" >/dev/null || { echo "left out: no $program is here"; return 0; }
    done
    num_installed=$((num_installed + 1))
    grep -q "$part" "$here/parts" || { echo "$part: not there in spite of $*"; failed=1; }
}
check 'emulated\.' g++
check 'conformance\.mpi\.' mpicc mpiexec
check epic_cuda nvcc
# With UCX's headers GPUs of several hosts have their libraries, which are installed; `make test` leaves
# out machine code.
if command -v nvcc >/dev/null && ! grep -q '^-- left out: .*UCX' "$here/log"; then
    installs=$here/build/kernels/cuda/cmake_install.cmake
    for library in cuda hosts ucx; do
        grep -q "epic_$library" "$here/parts" || { echo "epic_$library: not there"; failed=1; }
        grep -q "libepic_$library.so" "$installs" || { echo "libepic_$library.so: not installed"; failed=1; }
    done
    cmake --build "$here/build" --target tested -- -n -k >"$here/tested" 2>/dev/null || true
    if grep -E 'epic_(cuda|cuda_alone|hosts)\.dir' "$here/tested"; then
        echo "make test would build machine code"
        failed=1
    fi
    grep -q 'epic_ucx\.dir' "$here/tested" || { echo "the target tested is empty"; failed=1; }
else
    echo "left out: no nvcc, or no UCX: GPUs of several hosts"
fi
if ldconfig -p 2>/dev/null | grep -q 'libopenblas\.so\.0' && grep -q OpenBLAS "$here/log"; then
    echo "OpenBLAS: not there in spite of libopenblas.so.0"
    failed=1
fi
echo "$num_installed of 3 appeared"
exit $failed
