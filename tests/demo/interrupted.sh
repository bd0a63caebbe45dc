#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Ctrl-C, and a signal to one process, end all ranks after the same training step and write a
# checkpoint.  A run resumed from it has the same losses.
set -eu
. "$(dirname "$0")/common.sh"
need_children

go() {
    start --steps 100000 --every 5 --ranks 4 --save saved >out 2>err
    await_progress out
    "$@"
    status=0
    wait $parent || status=$?
    [ $status = 130 ] || fail "$*: exit status $status: $(cat err)"
    [ ! -s err ] || fail "$*: $(cat err)"
    grep -q 'ended by a signal after' out || fail "$*: $(cat out)"
    step=$(sed -n 's/^step \([0-9]*\) saved to saved$/\1/p' out)
    [ "${step:-0}" -gt 0 ] || fail "$*: nothing was saved: $(cat out)"
}

all() {
    kill -INT $parent $(children)
}

one_rank() {
    set -- $(children)
    kill -INT $3
}

parent_only() {
    kill -TERM $parent
}

go all
more=$((step + 3))
run --steps 100000 --stop $more --ranks 2 --resume saved --log resumed.log >out
run --steps 100000 --stop $more --every 100000 --ranks 1 --log whole.log >out
tail -n 3 whole.log | cmp - resumed.log || fail "other losses after Ctrl-C"

go one_rank
go parent_only
