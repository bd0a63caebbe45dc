#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs parts of `make test` one after the other, up to the first that fails, and ends with how
# long each took and all that they left out, and why.
# usage: parts.sh MAKE PART...    PART is what `make test-PART` runs
set -eu
make=$1
shift
logs=build/parts
rm -rf $logs
mkdir -p $logs

failed=
times=
for part; do
    begin=$(date +%s)
    { status=0; "$make" "test-$part" 2>&1 || status=$?; echo $status >$logs/status; } |
        tee "$logs/$part.log"
    times="$times, $part $(($(date +%s) - begin)) s"
    [ "$(cat $logs/status)" = 0 ] || { failed=$part; break; }
done

echo "== times: ${times#, }"

# A line that several parts have is shown once, with their names.
left=$(cd $logs && for part; do
    [ ! -e "$part.log" ] ||
        sed -En "s/^(left out: |SKIPPED \\[[0-9]*\\] )(.*)/\\2\t$part/p" "$part.log" | sort -u
done | awk -F '\t' '
    !($1 in parts) { order[++num] = $1 }
    { parts[$1] = parts[$1] ? parts[$1] ", " $2 : $2 }
    END { for (i = 1; i <= num; i++) print "  " order[i] " [" parts[order[i]] "]" }
')
if [ -n "$left" ]; then
    printf '== left out\n%s\n' "$left"
else
    echo "== nothing was left out"
fi
if [ -n "$failed" ]; then
    echo "== make test: the part \"$failed\" failed"
    exit 1
fi
echo "== make test: all parts passed"
