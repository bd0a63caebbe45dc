#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests the experts with a stub of oneDNN, on any processor: results are correct with its products and
# correct if it refuses a shape, and a oneDNN that cannot be limited to one thread is not used.
# usage: onednn.sh PROGRAM    PROGRAM tests the experts and prints which oneDNN it uses
set -eu
stub=$(cd "$(dirname "$0")" && pwd)/onednn/stub.c
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT

make_stub() { # usage: make_stub NAME DEFINITION...
    file=$here/$1.so
    shift
    ${CC:-cc} -shared -fPIC -O2 "$@" "$stub" -o "$file"
}

make_stub openmp -DRUNTIME=2
make_stub refuses -DRUNTIME=2 -DREFUSES
make_stub tbb -DRUNTIME=4
for name in openmp refuses; do
    "$1" "$here/$name.so" >"$here/out" 2>&1 || { cat "$here/out"; exit 1; }
    grep -q '^with .*, oneDNN 9.9.9 for bfloat16' "$here/out" || { cat "$here/out"; exit 1; }
done
if "$1" "$here/tbb.so" >"$here/out" 2>&1 || ! grep -q 'is not taken' "$here/out"; then
    cat "$here/out"
    exit 1
fi
