#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the packages that building or testing needs, if the user is root and there is apt-get.
# Otherwise prints the command. If an optional package is missing, a part of EPIC is left out.
# usage: setup.sh build|test|demo
set -eu
cd "$(dirname "$0")/.."
purpose=${1:-test}

have() { command -v "$1" >/dev/null 2>&1; }
header() { printf '#include <%s>\n' "$1" | "${CC:-cc}" -E - >/dev/null 2>&1; }

fuzzer() { ls "$(clang -print-resource-dir 2>/dev/null)"/lib/*/libclang_rt.fuzzer* >/dev/null 2>&1; }

look() {
    required= optional=
    have "${CC:-cc}" || required="$required gcc"
    have cmake || required="$required cmake"
    header stdio.h || required="$required libc6-dev"
    [ "$purpose" != build ] || return 0
    /sbin/ldconfig -p | grep -q 'libopenblas\.so\.0' ||
        python3 -c 'import scipy_openblas32' 2>/dev/null ||
        optional="$optional libopenblas0-pthread"
    [ "$purpose" = test ] || return 0
    have g++ || optional="$optional g++"
    have clang-format-14 || optional="$optional clang-format-14"
    have clang || optional="$optional clang"
    fuzzer || optional="$optional libclang-rt-dev"
    have valgrind || optional="$optional valgrind libc6-dbg"
    python3 -c 'import ensurepip, venv' 2>/dev/null || optional="$optional python3-venv"
    { have mpicc && have mpiexec; } || optional="$optional libopenmpi-dev openmpi-bin"
    header ucp/api/ucp.h || optional="$optional libucx-dev"
    have ip || [ -x /sbin/ip ] || optional="$optional iproute2"
    have spin || optional="$optional spin"
}

apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" >>"$log" 2>&1 \
        </dev/null
}

install() {
    log=$(mktemp)
    echo "installing:$required$optional"
    apt update || echo "apt-get update failed (no network?); trying with the lists that there are"
    # If one package is not available, the others must still be installed.
    if ! apt install -y --no-install-recommends $required $optional; then
        for package in $required $optional; do
            apt install -y --no-install-recommends $package ||
                echo "$package cannot be had: $(grep . "$log" | tail -n 1)"
        done
    fi
    rm -f "$log"
}

how() { # how to get these packages
    if ! have apt-get; then
        echo "Debian calls them so; install what this system calls them"
    elif [ "$(id -u)" = 0 ]; then
        echo "when they can be had: apt-get install -y$*"
    else
        echo "root installs them: sudo apt-get install -y$*"
    fi
}

look
[ -n "$required$optional" ] || exit 0
# Remember packages that are not available, so that not every run tries again. `make clean` forgets
# them.
tried=build/setup-tried-$purpose
if [ "$(id -u)" = 0 ] && have apt-get && { [ -n "$required" ] || [ ! -e $tried ]; }; then
    install
    look
    [ -z "$optional" ] || { mkdir -p build && touch $tried; }
fi
if [ -n "$required" ]; then
    echo "cannot go on without these packages:$required; $(how "$required")" >&2
    exit 1
fi
if [ -n "$optional" ]; then
    case $purpose in
    demo) echo "goes on, but slowly, without:$optional; $(how "$optional")" ;;
    *) echo "goes on with parts left out, without:$optional; $(how "$optional")" ;;
    esac
fi
