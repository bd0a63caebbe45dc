#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that train_text --device cuda has the losses of the host within 1e-2, with one rank and with
# two, and that it continues from a checkpoint.
set -eu
. "$(dirname "$0")/../demo/common.sh"

train() { # usage: train NAME OPTIONS...
    name=$1
    shift
    run --hidden 16 --inner 16 --tokens 64 --rate 0.03 --steps 6 --every 6 --log "$name" "$@" \
        >"$name.out" || fail "$name: $(cat "$name.out")"
}

near() { # usage: near NAME; compares each loss of this run with that of the host
    awk -v name="$1" '
        NR == FNR { host[$1] = $2; next }
        {
            steps++
            off = $2 - host[$1]
            if (off <= 0.01 * host[$1] && -off <= 0.01 * host[$1]) next
            print name ", step " $1 ": " $2 ", on the host " host[$1]
            bad = 1
        }
        END { exit bad || !steps }' host "$1" || fail "$1 has other losses"
}

train host --ranks 1
awk 'NR == 1 { first = $2 } END { exit $2 > 0.8 * first }' host || fail "the host learns nothing"
train one --device cuda
train two --device cuda --ranks 2
train begun --device cuda --stop 3 --save half
train rest --device cuda --resume half
for name in one two begun rest; do near $name; done
grep -q 'backend p2p' one.out || fail "not on the GPU: $(cat one.out)"
grep -q 'tokens/s' one.out || fail "no speed: $(cat one.out)"
