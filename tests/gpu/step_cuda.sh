#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that examples/step_cuda prints the expected lines and stays short: at most 45 lines of code
# with at most 10 names of EPIC.   usage: step_cuda.sh PROGRAM
set -eu
source=$(dirname "$0")/../../examples/step_cuda.c
"$1" | diff - /dev/fd/3 3<<END
token 0: 1 sent, 1.25 returned
token 1: 2 sent, 2.5 returned
token 2: 3 sent, 3.75 returned
token 3: 4 sent, 5 returned
END
lines=$(${CC:-cc} -fpreprocessed -dD -E -P "$source" | grep -c '[^ ]')
names=$(grep -oE '\b(epic|EPIC)_[A-Za-z0-9_]+' "$source" | sort -u | wc -l)
echo "examples/step_cuda.c: $lines lines of code, $names names"
[ "$lines" -le 45 ] && [ "$names" -le 10 ]
