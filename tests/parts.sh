#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the parts of `make test`, and ends with how long each took and all that they left out, and
# why.  Two parts run side by side, as pip, or the last long test of a part, leaves cores idle; what a
# part says is shown when it has ended, and lies in build/parts until then.  No part begins once one
# has failed.
# usage: parts.sh MAKE STAGE...    STAGE is "PART ...", begun when the stage before it has passed;
#                                  PART is what `make test-PART` runs
set -eu
logs=build/parts

run_part() { # its status is also kept
    begin=$(date +%s)
    echo "-- $part has begun" >&3
    status=0
    MAKEFLAGS=$PARTS_FLAGS "$make" "test-$part" >"$logs/$part.log" 2>&1 3>&- || status=$?
    echo $(($(date +%s) - begin)) >"$logs/$part.seconds"
    echo $status >"$logs/$part.status"
    cat "$logs/$part.log"
    exit $status
}

make=$1
shift
if [ "$1" = --part ]; then
    part=$2
    run_part
fi

rm -rf $logs
mkdir -p $logs
begin=$(date +%s)
# Make keeps two jobs going, shows what each says in one piece, and ends well at Ctrl-C.  Its own -j
# is not for the parts.
export PARTS_FLAGS="${MAKEFLAGS-}"
unset MAKEFLAGS MFLAGS
exec 3>&1
passed=true
for stage; do
    printf '%s\n' "all: $stage" ".PHONY: all $stage" "$stage:; @'$0' '$make' --part \$@" |
        "$make" -s --no-print-directory -f - -j 2 --output-sync=target || { passed=false; break; }
done

for part in $*; do
    [ ! -e "$logs/$part.seconds" ] || times="${times-}, $part $(cat "$logs/$part.seconds") s"
done
echo "== times${times-}; all $(($(date +%s) - begin)) s" | sed 's/times, /times: /'

# A line that several parts have is shown once, with their names.
left=$(cd $logs && for part in $*; do
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
$passed || {
    echo "== make test: failed:$(cd $logs && for part in $*; do
        grep -qsvx 0 "$part.status" && echo " $part"
    done | tr -d '\n')"
    exit 1
}
echo "== make test: all parts passed"
