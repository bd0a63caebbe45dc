#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# If a rank is killed, the run ends soon with a message that names it, and no process is left.
set -eu
. "$(dirname "$0")/common.sh"
need_children

for victim in 0 2; do
    start --steps 1000000 --every 5 --ranks 4 >out 2>err
    await_progress out
    set -- $(children)
    [ $# = 4 ] || fail "there are $# children"
    shift $victim
    kill -9 $1
    begin=$(date +%s)
    status=0
    wait $parent || status=$?
    took=$(($(date +%s) - begin))
    [ $status = 1 ] || fail "rank $victim killed: exit status $status"
    [ $took -le 8 ] || fail "rank $victim killed: the run took $took s to end"
    grep -q "rank $victim (process $1) was killed by signal 9" err || fail "$(cat err)"
    grep -q "EPIC_EPEER: .*rank $victim" err || fail "$(cat err)"
done

# A rank whose parent process ended also ends.
start --steps 1000000 --every 5 --ranks 2 >out2 2>err
await_progress out2
set -- $(children)
kill -9 $parent
wait $parent || true
tries=0
while [ -e /proc/$1/fd/0 ] || [ -e /proc/$2/fd/0 ]; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] || fail "ranks live on without their parent"
    sleep 0.1
done
