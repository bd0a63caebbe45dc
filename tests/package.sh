#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Uses EPIC in another project: as a part of its CMake build, then installed, moved and removed.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT EPIC_BACKEND DESTDIR CFLAGS LD_LIBRARY_PATH

fail() {
    echo "$*"
    exit 1
}

quietly() {
    "$@" >"$here/log" 2>&1 || fail "$*: $(cat "$here/log")"
}

stranger() { # usage: stranger BUILD-FOLDER EPIC_FROM CMAKE-ARGUMENT...
    build=$here/$1
    from=$2
    shift 2
    quietly cmake -S tests/package -B "$build" -DEPIC_FROM=$from -DEPIC_STATIC=ON "$@"
}

runs() { # usage: runs PROGRAM FOLDER, where the folder contains libepic.so
    LD_LIBRARY_PATH=${2-} "$1" >"$here/out" 2>&1 || fail "$1: $(cat "$here/out")"
    grep -q 'token 3 left as 4 and returned as 19' "$here/out" || fail "$1: $(cat "$here/out")"
}

# The library of the option EPIC_OPENBLAS is loaded if the system has no OpenBLAS.
mkdir "$here/none"
echo none >"$here/none/libopenblas.so.0"
echo none >"$here/none/libscipy_openblas.so"
quietly ${CC:-cc} -shared -fPIC '-DNAME(x)=scipy_##x' -Dinteger=int '-DCONFIG=""' \
    tests/openblas/stub.c -o "$here/libtold.so"

# If EPIC is a part of another build, only the library is built. The warning flags of that build
# must not be errors in EPIC's files.
stranger fetched fetched
stranger source source -DEPIC_INSTALL=ON -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE=-O0 \
    -DCMAKE_C_FLAGS=-Wc++-compat -DCMAKE_INSTALL_PREFIX="$here/nowhere" \
    -DEPIC_OPENBLAS="$here/libtold.so"
quietly cmake --build "$here/source" -j 2
grep -q 'warning: ' "$here/log" || fail "no warning: the test is wrong"
runs "$here/source/with_epic"
runs "$here/source/with_epic_static"
LD_LIBRARY_PATH=$here/none "$here/source/clash" >"$here/out"
grep -q ' 42$' "$here/out" || fail "names clash: $(cat "$here/out")"
grep -q '^OpenBLAS 9.9.9 Stub' "$here/out" || fail "EPIC_OPENBLAS: $(cat "$here/out")"
ctest --test-dir "$here/source" -N | grep -q 'Total Tests: 0' || fail "tests of ours"
if cmake --build "$here/source" --target help |
    grep -E 'unit_|conformance|fault_|bench_|example_|demo_|emulat|epic-info|header_'; then
    fail "targets of ours"
fi

# Install with DESTDIR.
DESTDIR=$here/package quietly "$root/tools/install.sh" "$here/source" "$here/opt"
[ -e "$here/package$here/opt/include/epic/epic.h" ] || fail "nothing in DESTDIR"
[ ! -e "$here/opt" ] || fail "DESTDIR was ignored"
DESTDIR=$here/package quietly "$root/tools/install.sh" --remove "$here/source"
[ -z "$(find "$here/package" ! -type d)" ] || fail "left: $(find "$here/package" ! -type d)"

# Install into another prefix than the configured one, then move the folder.
quietly "$root/tools/install.sh" "$here/source" "$here/first"
grep -q 'LD_LIBRARY_PATH=' "$here/log" || fail "no word of LD_LIBRARY_PATH: $(cat "$here/log")"
[ ! -e "$here/nowhere" ] || fail "the prefix was ignored"
mv "$here/first" "$here/moved"
libdir=$(dirname "$(find "$here/moved" -name libepic.so)")
stranger installed installed -DCMAKE_PREFIX_PATH="$here/moved"
quietly cmake --build "$here/installed" -j 2
runs "$here/installed/with_epic" "$libdir"
runs "$here/installed/with_epic_static"

if command -v pkg-config >/dev/null; then
    export PKG_CONFIG_PATH="$libdir/pkgconfig"
    quietly ${CC:-cc} examples/step.c $(pkg-config --cflags --libs epic) -o "$here/shared"
    runs "$here/shared" "$libdir"
    pkg-config --libs epic | grep -q "$here/moved" || fail "epic.pc: $(pkg-config --libs epic)"
    quietly ${CC:-cc} examples/step.c $(pkg-config --cflags epic) "$libdir/libepic.a" \
        $(pkg-config --static --libs-only-l epic | sed 's/-lepic//') -o "$here/static"
    runs "$here/static"
else
    echo "left out: there is no pkg-config"
fi
mv "$here/moved" "$here/first"
quietly "$root/tools/install.sh" --remove "$here/source"
[ -z "$(find "$here/first" ! -type d)" ] || fail "left: $(find "$here/first" ! -type d)"
if "$root/tools/install.sh" --remove "$here/source" 2>"$here/log"; then fail "removed twice"; fi
grep -q 'nothing was installed' "$here/log" || fail "$(cat "$here/log")"
