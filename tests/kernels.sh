#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that every kernel calls wait_for_previous_kernel(), because a kernel may start before the
# stores of the previous kernel of its stream are visible (kernels/cuda/common/launch.cuh).
# usage: kernels.sh ROOT
cd "$1" || exit 1
find kernels/cuda -name '*.cu' -o -name '*.cuh' | sort | xargs awk '
    FNR == 1 { state = "" }
    /^[^*]*__global__/ && !/^\/\*/ { state = "head"; num++ }
    state == "head" && /;$/ { state = ""; num-- }
    state == "head" && /^{$/ { state = "body"; line = FNR }
    state == "body" && /^    wait_for_previous_kernel\(\);$/ { state = "" }
    state == "body" && /^}$/ {
        print FILENAME ":" line ": the kernel does not call wait_for_previous_kernel()"
        state = ""; wrong = 1
    }
    END { if (num < 40) { print "only " num + 0 " kernels found"; wrong = 1 } exit wrong }'
