#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests GPUs of several hosts if a library is missing: that of the backend, of its net, or UCX itself.
# The error must name the library and a remedy. Only the library of the net needs UCX; the backend
# loads without it.
# usage: without.sh NAMED LIBEPIC_UCX [LIBEPIC_HOSTS]...  NAMED is in the folder of emulated libraries
set -eu
export LC_ALL=C
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
emulated=$(cd "$(dirname "$1")" && pwd)
lib=$(cd "$(dirname "$2")" && pwd)
ucx=$2

fail() {
    echo "$*"
    exit 1
}

needs() { # usage: needs LIBRARY; prints the libraries that it is linked with
    readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'
}

# usage: spoil FILE. Copies a program with invalid build paths, so that it does not find the
# libraries there.
spoil() { # file
    sed -e "s|$emulated|$(echo "$emulated" | tr a-z b-za)|g" -e "s|$lib|$(echo "$lib" | tr a-z b-za)|g" \
        "$1" >"$here/$(basename "$1")"
}

# usage: refuses WORD...; two hosts must fail to open, with all these words in the error
refuses() {
    if said=$(LD_LIBRARY_PATH=$here EPIC_HOST=%r EPIC_NET=ucx "$here/$(basename "$named")" 2 hosts 2>&1); then
        fail "they opened: $said"
    fi
    echo "$said"
    for word; do
        case $said in
        *"$word"*) ;;
        *) fail "missing in the error: $word" ;;
        esac
    done
}

named=$1
shift 2
for hosts in "$emulated/libepic_hosts.so" "$@"; do
    [ -e "$hosts" ] || continue
    if needs "$hosts" | grep -E '^libuc[a-z]*\.'; then fail "$hosts needs UCX"; fi
done
needs "$ucx" | grep -q '^libucp\.' || fail "$ucx needs no UCX: the test is wrong"

spoil "$named"
chmod +x "$here/$(basename "$named")"
for library in libemulator.so libepic_cuda.so; do spoil "$emulated/$library"; done
refuses 'backend "hosts": libepic_hosts.so cannot be loaded' 'GPUs of several hosts' nvcc libucx-dev
spoil "$emulated/libepic_hosts.so"
refuses 'net "ucx": libepic_ucx.so cannot be loaded' libucx-dev 'build libepic again'
spoil "$ucx"
echo "no library" >"$here/libucp.so.0"
refuses 'net "ucx": libepic_ucx.so cannot be loaded' libucx0 'built for' libucp.so.0
