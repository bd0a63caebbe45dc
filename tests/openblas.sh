#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests the experts with each kind of OpenBLAS: the system's, those of pip packages with their own
# symbol names, with 32-bit and 64-bit integers, already loaded by the process or found by the loader.
# usage: openblas.sh PROGRAM [OPENBLAS]...
#   PROGRAM    tests the experts and prints which library it used
#   OPENBLAS   real libraries to test as well, for example those of numpy's and scipy's wheels
set -eu
stub=$(cd "$(dirname "$0")" && pwd)/openblas/stub.c
program=$1
shift
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT

fail() {
    echo "$*"
    exit 1
}

make_stub() { # usage: make_stub FILE NAMES TYPE CONFIGURATION
    ${CC:-cc} -shared -fPIC -O2 "-DNAME(x)=$2" "-Dinteger=$3" "-DCONFIG=\"$4\"" "$stub" -o "$1"
}

experts() { # usage: experts EXPECTED-OUTPUT VARIABLE...
    wanted=$1
    shift
    env LD_LIBRARY_PATH="$here/none" "$@" "$program" >"$here/out" 2>&1 ||
        fail "$*: $(cat "$here/out")"
    grep -q "^with $wanted" "$here/out" || fail "$*: $(grep '^with' "$here/out"): no $wanted"
}

# A file that is not a library hides the system's library.
mkdir "$here/none" "$here/pip" "$here/loaded"
echo none >"$here/none/libopenblas.so.0"
echo none >"$here/none/libscipy_openblas.so"
cp "$here/none/libopenblas.so.0" "$here/pip"
experts 'plain loops'

make_stub "$here/pip/libscipy_openblas.so" 'scipy_##x' int DYNAMIC_ARCH
experts 'OpenBLAS 9.9.9 Stub' LD_LIBRARY_PATH="$here/pip"
experts 'OpenBLAS 9.9.9 Stub' LD_PRELOAD="$here/pip/libscipy_openblas.so"
make_stub "$here/loaded/libscipy_openblas64_-1a2b.so" 'scipy_##x##64_' int64_t USE64BITINT
experts 'OpenBLAS 9.9.9 Stub' LD_PRELOAD="$here/loaded/libscipy_openblas64_-1a2b.so"
make_stub "$here/loaded/libopenblas64.so.0" x int64_t 'USE64BITINT DYNAMIC_ARCH'
experts 'OpenBLAS 9.9.9 Stub' LD_PRELOAD="$here/loaded/libopenblas64.so.0"

for library; do
    experts 'OpenBLAS [0-9][0-9.a-z]* [A-Za-z]' LD_PRELOAD="$library"
    echo "$(basename "$library"): $(grep '^with' "$here/out")"
done
