#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks whether this tree can be released. Checks what no test does: the version is the same everywhere,
# the ABI has not changed since the last tag, and the packages work where they are unpacked. Then prints
# what a person must still do.
# usage: release.sh BUILD        BUILD has been built
#   PARTS="version abi deb python"    runs only these parts
set -eu
cd "$(dirname "$0")/.."
build=$(cd "$1" && pwd)
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
failed=0

bad() {
    echo "not so: $*"
    failed=1
}

number() { # returns a number of epic.h
    sed -n "s/^#define EPIC_VERSION_$1 \([0-9]*\)$/\1/p" include/epic/epic.h
}

check_version() {
    version=$(number MAJOR).$(number MINOR).$(number PATCH)
    echo "== version $version, as epic.h says"
    grep -q "^project(epic VERSION $version " CMakeLists.txt || bad "CMakeLists.txt has another version"
    grep -q "^version = \"$version\"$" pyproject.toml || bad "pyproject.toml has another version"
    grep -q "^__version__ = \"$version\"$" bindings/python/epic/__init__.py ||
        bad "epic/__init__.py has another version"
    grep -q "^## $version" CHANGELOG.md || bad "CHANGELOG.md has no chapter $version"
    whole=$(($(number MAJOR) * 10000 + $(number MINOR) * 100 + $(number PATCH)))
    grep -q "^#define EPIC_VERSION $whole " include/epic/epic.h || bad "EPIC_VERSION is not $whole"
    grep -q "^#define EPIC_VERSION_STRING \"$version\"" include/epic/epic.h ||
        bad "EPIC_VERSION_STRING is not $version"
    "$build/bin/epic-info" | grep -q "^epic  *$version$" || bad "epic-info says another version"
    if [ -n "$(git status --porcelain 2>/dev/null)" ]; then bad "git status is not empty"; fi
}

# The ABI list may only grow: published lines stay.
check_abi() {
    tag=$(git describe --tags --abbrev=0 2>/dev/null) || {
        echo "== ABI: no tag yet; tests/abi.list is the first promise"
        return 0
    }
    echo "== ABI since $tag"
    git show "$tag:tests/abi.list" | sort >"$here/old"
    sort tests/abi.list >"$here/new"
    comm -23 "$here/old" "$here/new" >"$here/gone"
    [ ! -s "$here/gone" ] || bad "promised in $tag and gone: $(cat "$here/gone")"
}

check_deb() {
    echo "== .deb"
    command -v dpkg-deb >/dev/null || { echo "left out: there is no dpkg-deb"; return 0; }
    rm -f "$build"/packages/*.deb
    (cd "$build" && cpack -G DEB) >"$here/log" 2>&1 || { cat "$here/log"; bad "cpack -G DEB"; return 0; }
    set -- "$build"/packages/*.deb
    dpkg-deb -x "$1" "$here/root"
    for file in include/epic/epic.h include/epic/epic_abi.h include/epic/placement.h bin/epic-info bin/epic-trace bin/epic-place; do
        [ -e "$here/root/usr/$file" ] || bad "$1 lacks usr/$file"
    done
    lib=$(dirname "$(find "$here/root" -name libepic.so)")
    plugins="mpi cuda hosts cuda_regroup cuda_many hosts_many"
    if [ -e "$build/lib/libepic_hosts.so" ]; then plugins="$plugins ucx"; fi
    for plugin in $plugins; do
        [ ! -e "$build/lib/libepic_$plugin.so" ] || [ -e "$lib/libepic_$plugin.so" ] ||
            bad "$1 lacks libepic_$plugin.so"
    done
    ${CC:-cc} examples/step.c -I"$here/root/usr/include" -L"$lib" -lepic -o "$here/step"
    LD_LIBRARY_PATH=$lib "$here/step" | grep -q 'token 3 left as 4 and returned as 19' ||
        bad "a program with the package's library"
    LD_LIBRARY_PATH=$lib "$here/root/usr/bin/epic-info" | grep -q '^epic ' || bad "the package's epic-info"
    LD_LIBRARY_PATH=$lib "$here/root/usr/bin/epic-trace" --help >/dev/null || bad "the package's epic-trace"
    echo "$1: $(dpkg-deb -f "$1" Package Version Architecture Depends | tr '\n' ' ')"
}

# The wheel is built from the sdist alone.
check_python() {
    echo "== sdist and wheel"
    python3 -c 'import venv, ensurepip' 2>/dev/null || { echo "left out: no python3-venv"; return 0; }
    python3 -m venv "$here/venv"
    "$here/venv/bin/pip" install -q --disable-pip-version-check build==1.3.0 >"$here/log" 2>&1 || {
        echo "left out: pip cannot install build: $(tail -n 1 "$here/log")"
        return 0
    }
    "$here/venv/bin/python" -m build -o "$build/packages" --config-setting=cmake.define.EPIC_CUDA=OFF . \
        >"$here/log" 2>&1 || { tail -n 20 "$here/log"; bad "python -m build"; return 0; }
    wheel=$(ls -t "$build"/packages/*.whl | head -n 1)
    "$here/venv/bin/pip" install -q --disable-pip-version-check "$wheel"
    (cd "$here" && venv/bin/python -c 'import epic; epic.Layer(num_experts=8, top_k=2)') ||
        bad "$wheel cannot be imported"
    ls "$build"/packages/*.tar.gz "$wheel"
    if command -v auditwheel >/dev/null; then
        auditwheel repair -w "$build/packages" "$wheel" || bad "auditwheel"
    else
        echo "left out: no auditwheel, so no manylinux wheel; it wants an old glibc too"
    fi
}

for part in ${PARTS:-version abi deb python}; do check_$part; done
cat <<'END'
== by hand, on the commit of the tag
make test                  and nothing left out that matters
make soak MINUTES=60       no failure
make mutants               all caught
make test-deb              the package in a bare system
make test-chroot           and SUITE=noble with a mirror of Ubuntu
make docs                  links and code
make gpu-test gpu-test-jax gpu-test-torch    on two GPUs or more
make bench gpu-bench       figures in docs/guide/benchmarks.md and README.md with their date
git tag -s vVERSION        then the packages of build/packages
END
exit $failed
