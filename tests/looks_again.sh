#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A build folder that was configured on a bare machine, as `make demo` does, gets all its parts once
# their compilers are installed, as the set-up of `make test` does.
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

configure() { # usage: configure ON|OFF PATH; ON: CMake searches the system's folders
    PATH=$2 cmake -S . -B "$here/build" -G "Unix Makefiles" -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=$1 >"$here/log" 2>&1 || { cat "$here/log"; exit 1; }
    { ctest --test-dir "$here/build" -N; cmake --build "$here/build" --target help; } >"$here/parts"
}

failed=0
configure OFF "$here/bin"
for part in 'emulated\.' 'conformance\.mpi\.' epic_cuda epic_hosts; do
    if grep -q "$part" "$here/parts"; then echo "the bare machine has $part"; failed=1; fi
done
for words in 'C++ compiler' MPI nvcc UCX OpenBLAS; do
    grep -q "^-- left out: .*$words" "$here/log" || { echo "not printed: $words"; failed=1; }
done

configure ON "$PATH"
num_installed=0
# Prints the targets that a target of the build folder depends on, from the generated makefile.
targets_of() {
    awk -v target="$1" '
        /^[^#\t: ]+: [^ ]+$/ { from = substr($1, 1, length($1) - 1); needs[from] = needs[from] " " $2 }
        END {
            for (node in needs)
                if (node == target || node ~ "/" target "[.]dir/all$") queue[++num] = node
            for (i = 1; i <= num; i++) {
                count = split(needs[queue[i]], next_ones, " ")
                for (j = 1; j <= count; j++)
                    if (!seen[next_ones[j]]++) queue[++num] = next_ones[j]
            }
            for (node in seen) print node
        }' "$here/build/CMakeFiles/Makefile2" | sed -n 's,.*/\([^/]*\)\.dir/all$,\1,p' | sort -u
}
# `make` builds the libraries and tools; each other target builds what it runs.
targets_of all >"$here/all"
for target in epic epic_torch epic-info epic-place; do
    grep -qx "$target" "$here/all" || { echo "make would not build $target"; failed=1; }
done
if grep -E '^(unit|fault|net|demo|bench|example|emulat|gpu|api|cuda)_|^conformance|^epic_testing$' "$here/all"; then
    echo "make would build tests, benchmarks or examples"
    failed=1
fi
wants() { # usage: wants TARGET TARGET; the first must build the second
    targets_of "$1" | grep -qx "$2" || { echo "$1 would not build $2"; failed=1; }
}
wants examples example_step
wants benchmarks bench_host
if grep -q '\.\.\. epic_mpi$' "$here/parts"; then
    for program in bench_mpi bench_sum fault_mpi example_train_text; do wants $program epic_mpi; done
fi
check() { # usage: check PART PROGRAM...; the part must build these programs
    part=$1
    shift
    for program; do
        command -v "$program" >/dev/null || { echo "left out: no $program is here"; return 0; }
    done
    num_installed=$((num_installed + 1))
    grep -q "$part" "$here/parts" || { echo "$part is missing although these exist: $*"; failed=1; }
}
check 'emulated\.' g++
check 'conformance\.mpi\.' mpicc mpiexec
check epic_cuda nvcc
# With UCX's headers the libraries for GPUs of several hosts are built and installed.  `make test` does
# not build their machine code.
if command -v nvcc >/dev/null && ! grep -q '^-- left out: .*UCX' "$here/log"; then
    installs=$here/build/kernels/cuda/cmake_install.cmake
    for library in cuda cuda_regroup hosts ucx; do
        grep -q "epic_$library" "$here/parts" || { echo "epic_$library is missing"; failed=1; }
        grep -q "libepic_$library.so" "$installs" || { echo "libepic_$library.so: not installed"; failed=1; }
    done
    targets_of tested >"$here/tested"
    if grep -E '^(epic_(cuda|cuda_(alone|checked|regroup|many)|hosts|hosts_many)|cuda_.*)$' "$here/tested"; then
        echo "make test would build machine code"
        failed=1
    fi
    grep -qx epic_ucx "$here/tested" || { echo "the target tested is empty"; failed=1; }
    wants gpu_tests cuda_gpu_check
    wants gpu_tests example_step_cuda
    wants gpu_tests epic_cuda
    wants gpu_tests epic_cuda_regroup
    wants gpu_tests cuda_gpu_check_regroup
    wants gpu_benchmarks cuda_gpu_bench
    wants gpu_hosts cuda_epic_local
    wants gpu_hosts epic_ucx
else
    echo "left out: no nvcc, or no UCX: GPUs of several hosts"
fi
if ldconfig -p 2>/dev/null | grep -q 'libopenblas\.so\.0' && grep -q OpenBLAS "$here/log"; then
    echo "OpenBLAS is missing although libopenblas.so.0 exists"
    failed=1
fi
echo "$num_installed of 3 appeared"
exit $failed
