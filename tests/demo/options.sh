#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A bad option is refused with an error that names it, and --help lists every option.
set -eu
. "$(dirname "$0")/common.sh"

refuse() {
    wanted=$1
    words=$2
    shift 2
    status=0
    "$program" "$@" >out 2>err || status=$?
    [ $status = $wanted ] || fail "$*: exit status $status, not $wanted: $(cat err)"
    grep -q -e "$words" err || fail "$*: $(cat err)"
    [ "$(wc -l <err)" = 1 ] || fail "$*: not one line: $(cat err)"
}

refuse 2 '--wrong' --wrong
refuse 2 '--steps needs a value' --steps
refuse 2 '--steps is "0"' --steps 0
refuse 2 '--steps is "ten"' --steps ten
refuse 2 '--steps is ""' --steps ''
refuse 2 '--ranks is 3' --ranks 3
refuse 2 '--ranks is "16"' --ranks 16
refuse 2 '--tokens is 100' --tokens 100
refuse 2 '--hidden is 20' --hidden 20
refuse 2 '--inner is 20' --inner 20
refuse 2 '--rate is "x"' --rate x
refuse 2 '--rate is "-1"' --rate -1
refuse 2 '--save-every needs --save' --save-every 3
refuse 2 '--check' --check --save x
refuse 2 '--resume' --check --resume x
refuse 1 'nowhere: No such file' nowhere
head -c 20000 text >short
refuse 1 'the text has 20000 bytes' short
refuse 1 'backend' --ranks 1 --backend nosuch text

# A file that may never end, such as a pipe, is refused.
mkfifo pipe
refuse 1 'pipe is a pipe' pipe
refuse 1 '/dev/zero is a device' /dev/zero
refuse 2 'pipe is a pipe' --resume pipe text

"$program" --help >out || fail "--help fails"
for option in ranks steps stop tokens hidden inner rate seed data backend check save save-every \
    resume every sample picture log help; do
    grep -q -e "^  --$option " out || fail "--help does not list --$option"
done
# Nothing is written into the current folder; the picture goes into the build folder.
grep -q '^ *\(/[^/]*\)*/train_text\.svg)$' out || fail "no place for the picture: $(cat out)"
run --steps 3 --data text --ranks 2 >out || fail "a second PATH"
