#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the parts of `make test`, then prints the time and the processor time of each part, what the parts
# left out, and why.
# Two parts run at the same time, because pip and the last long test of a part leave cores idle.  The
# output of a part is kept in build/parts and printed when the part has ended.  After a failure no
# further part starts.
# usage: parts.sh MAKE STAGE...    STAGE is "PART ..." and starts when the stage before it has passed;
#                                  PART is run by `make test-PART`
set -eu
logs=build/parts

run_part() { # runs a part and stores its exit status
    begin=$(date +%s)
    echo "-- $part has begun" >&3
    status=0
    MAKEFLAGS=$PARTS_FLAGS "$make" "test-$part" >"$logs/$part.log" 2>&1 3>&- || status=$?
    times >"$logs/$part.processor" # the second line: user and system time of the children, "1m2.3s 0m4.5s"
    echo $(($(date +%s) - begin)) "$(awk -F '[ms ]+' 'NR == 2 { printf "%d", 60 * ($1 + $3) + $2 + $4 }' \
        "$logs/$part.processor")" >"$logs/$part.seconds"
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
# Make runs two jobs at a time, prints the output of each in one piece, and ends cleanly at Ctrl-C.  Its
# own -j option is not passed to the parts.
export PARTS_FLAGS="${MAKEFLAGS-}"
unset MAKEFLAGS MFLAGS
exec 3>&1
passed=true
for stage; do
    printf '%s\n' "all: $stage" ".PHONY: all $stage" "$stage:; @'$0' '$make' --part \$@" |
        "$make" -s --no-print-directory -f - -j 2 --output-sync=target || { passed=false; break; }
done

for part in $*; do
    [ ! -e "$logs/$part.seconds" ] ||
        times="${times-}, $(awk -v part="$part" '{ print part, $1 " (" $2 ") s" }' "$logs/$part.seconds")"
done
echo "== times (processor time)${times-}; all $(($(date +%s) - begin)) s" | sed 's/), /): /'

# A line that several parts printed is shown once, with the names of the parts.
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
# The lines that explain a failure come last, because readers of a long log see its end first.
$passed || {
    for part in $*; do
        ! grep -qsvx 0 "$logs/$part.status" || {
            echo "== $part"
            grep -E '^(FAILED|ERROR) |\*\*\*(Failed|Timeout|Exception)|^Fatal Python|: error: ' \
                "$logs/$part.log" | head -n 20
            tail -n 12 "$logs/$part.log"
        } | cut -c 1-300
    done
    echo "== make test: failed:$(cd $logs && for part in $*; do
        grep -qsvx 0 "$part.status" && echo " $part"
    done | tr -d '\n')"
    exit 1
}
echo "== make test: all parts passed"
