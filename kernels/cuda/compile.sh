#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a compiler, and writes its output to the file OBJECT.log, next to the object.
# usage: compile.sh COMPILER [ARGUMENT]...    with -o OBJECT among the arguments
#        compile.sh --check OBJECT...         fails if ptxas warned that it serializes wgmma (C75xx)
set -eu
if [ "$1" = --check ]; then
    shift
    for object; do
        if [ -e "$object.log" ] && grep C75 "$object.log"; then
            echo "$object: ptxas serializes the products on tensor cores"
            exit 1
        fi
    done
    exit 0
fi
log=/dev/null
before=
for word; do
    [ "$before" != -o ] || log=$word.log
    before=$word
done
status=0
"$@" >"$log" 2>&1 || status=$?
cat "$log"
exit $status
