#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks in the machine code of libraries that every kernel for Hopper and later GPUs waits for the
# previous kernel (the instruction ACQBULK) before it accesses global memory, branches or exits.
# tests/kernels.sh checks the source. This test is needed because the compiler may move loads of
# constant data before the wait.
# usage: early.sh LIBRARY...
command -v cuobjdump >/dev/null || { echo "early.sh: left out, there is no cuobjdump"; exit 0; }
[ $# -gt 0 ] || { echo "early.sh: no library to check"; exit 1; }
for library in "$@"; do
    cuobjdump -sass "$library" | awk -v library="$(basename "$library")" '
        /^arch = sm_/ { old = substr($3, 4) + 0 < 90 }
        /Function : / { if (!old && name) missing(); name = $3; num += !old }
        old || !name { next }
        /ACQBULK/ { name = "" }
        / (@!?U?P[0-9T]+ )?(LDG|STG|LD|ST|ATOM|ATOMG|RED|REDG|MEMBAR|BRA|EXIT|CALL|UBLKCP|UTMALDG)[. ]/ {
            print name ": before the wait: " $0; name = ""; wrong = 1
        }
        function missing() { print name ": no wait"; wrong = 1 }
        END {
            if (!old && name) missing()
            if (!num) { print "no kernels found"; wrong = 1 }
            print library ": " num + 0 " kernels, " (wrong ? "WRONG" : "every one waits first")
            exit wrong
        }' || exit 1
done
