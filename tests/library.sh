#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that the core library is small, has its soname, and needs only libc (one library, or four on
# older systems).
# usage: library.sh LIBRARY CORE
set -eu
export LC_ALL=C
# The limit includes 34 KB of the layer's products, to which the table of host kernels refers, and
# 20 KB for vacant seats and the next generation of a group.
limit=384000
stripped=$(mktemp)
trap 'rm -f "$stripped"' EXIT
strip -o "$stripped" "$2"
size=$(wc -c <"$stripped")
dynamic=$(readelf -d "$1")
needed=$(echo "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
soname=$(echo "$dynamic" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')

failed=0
echo "$1: soname $soname, needs" $needed
echo "the core: $size bytes stripped"
[ "$size" -lt $limit ] || { echo "$size bytes: the limit is $limit"; failed=1; }
[ "$soname" = libepic.so.0 ] || { echo "soname $soname: libepic.so.0 expected"; failed=1; }
for library in $needed; do
    case $library in
    libc.so.* | libm.so.* | libdl.so.* | libpthread.so.* | ld-linux*) ;;
    *) echo "needs $library: only libc, libm, libdl and libpthread may be"; failed=1 ;;
    esac
done
exit $failed
