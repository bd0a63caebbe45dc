#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests what tools/setup.sh does and prints for root, for other users, without a network, without apt.
set -eu
cd "$(dirname "$0")/.."
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
mkdir "$here/tools" "$here/bin"
cp tools/setup.sh "$here/tools"
for program in dirname mktemp rm tail grep mkdir touch cat chmod; do
    ln -s "$(command -v $program)" "$here/bin"
done
cd "$here"

fail() {
    echo "$*: $(cat out)"
    exit 1
}

program() { # usage: program NAME BODY; creates a program in the test's PATH
    printf '#!/bin/sh\n%s\n' "$2" >"bin/$1"
    chmod +x "bin/$1"
}

setup() { # usage: setup USER EXPECTED-STATUS PURPOSE
    program id "echo $1"
    status=0
    PATH=$here/bin CC=cc /bin/sh tools/setup.sh $3 >out 2>&1 || status=$?
    [ $status = $2 ] || fail "user $1, $3: exit status $status"
}

says() {
    grep -q -e "$1" out || fail "does not say: $1"
}

# A bare machine has neither a compiler nor CMake.
setup 1000 1 demo
says '^cannot go on without these packages: gcc cmake libc6-dev; Debian calls them so'
program apt-get 'echo "E: no network" >&2; exit 100'
setup 1000 1 demo
says '^cannot go on .*; root installs them: sudo apt-get install -y gcc cmake libc6-dev$'
setup 0 1 demo
says '^apt-get update failed (no network?)'
says '^gcc cannot be had: E: no network$'
says '^cannot go on .*; when they can be had: apt-get install -y gcc cmake libc6-dev$'

# With only a compiler and CMake the build continues.
program cc 'exit 0'
program cmake 'exit 0'
setup 1000 0 test
says '^goes on with parts left out, without:.* g++ .*; root installs them: sudo apt-get install'
setup 0 0 test
says '^g++ cannot be had: E: no network$'
setup 0 0 test
if grep -q 'installing' out; then fail "asks for it again"; fi

# A working apt.
rm -r build
program apt-get 'case "$*" in *install*) for p; do case $p in g++) : >bin/g++; chmod +x bin/g++ ;;
    esac; done ;; esac'
setup 0 0 test
says '^installing:.* g++ '
if grep -q 'without:.* g++ ' out; then fail "g++ is there now"; fi
