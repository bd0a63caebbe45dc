#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A run resumed from a checkpoint has the same losses, with any number of ranks.  Damaged checkpoints are
# refused.
set -eu
. "$(dirname "$0")/common.sh"

run --steps 10 --ranks 1 --save whole --log whole.log >out
tail -n 6 whole.log >tail.log
for before in 1 4; do
    run --steps 10 --stop 4 --ranks $before --save part >out
    for after in 1 2 4; do
        run --ranks $after --resume part --save end --log end.log >out
        cmp tail.log end.log || fail "$before ranks, then $after: other losses"
        cmp whole end || fail "$before ranks, then $after: another checkpoint"
    done
done
run --steps 10 --save-every 4 --save part >out
[ "$(grep -c '^step .* saved to part' out)" = 3 ] || fail "--save-every: $(cat out)"
[ ! -e part.new ] || fail "part.new was left"

refuse() {
    words=$1
    shift
    if run "$@" >out 2>err; then fail "not refused: $*"; fi
    grep -q "$words" err || fail "$*: $(cat err)"
}

run --steps 10 --stop 4 --save part >out
size=$(wc -c <part)
head -c $((size - 100)) part >short
refuse 'is damaged' --resume short
for place in 20 60 150 $((size / 2)) $((size - 1)); do
    cp part bad
    byte=$(od -An -tu1 -j $place -N 1 part)
    printf "\\$(printf %o $((byte ^ 4)))" | dd of=bad bs=1 seek=$place conv=notrunc 2>/dev/null
    if cmp -s part bad; then fail "the test is wrong"; fi
    refuse 'bad' --resume bad
done
refuse 'not a checkpoint' --resume text
refuse 'No such file' --resume nowhere
refuse 'seed' --resume part --seed 5
refuse 'has done 4 steps' --resume part --stop 4
refuse 'No such file' --steps 5 --save nowhere/part
