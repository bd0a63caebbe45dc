#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that every kernel calls wait_for_previous_kernel() before it does anything else. This is
# necessary because a kernel may start before the stores of the previous kernel of its stream are visible
# (kernels/cuda/common/launch.cuh). Before the call a kernel may only declare variables, and prefetch its
# parameters.
# usage: kernels.sh ROOT
cd "$1" || exit 1
find kernels/cuda -name '*.cu' -o -name '*.cuh' | sort | xargs awk '
    FNR == 1 { state = "" }
    /^[^*]*__global__/ && !/^\/\*/ { state = "head"; num++ }
    state == "head" && /;$/ { state = ""; num-- }
    state == "head" && /^{$/ { state = "body"; line = FNR }
    state == "body" && FNR > line && /^    wait_for_previous_kernel\(\);$/ { state = "" }
    state == "body" && FNR > line &&
    !/^    (__shared__ |prefetch_params\(|\/\*| \*|const p2p_self &self = |const CtaRange |uint8_t \*const memory = )/ {
        print FILENAME ":" FNR ": this kernel must first call wait_for_previous_kernel()"
        state = ""; wrong = 1
    }
    END { if (num < 40) { print "only " num + 0 " kernels found"; wrong = 1 } exit wrong }'
