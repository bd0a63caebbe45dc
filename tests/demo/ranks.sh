#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Ten training steps have losses with the same bits for every number of ranks.
set -eu
. "$(dirname "$0")/common.sh"

run --steps 10 --ranks 1 --log 1.log >1.out
[ "$(wc -l <1.log)" = 10 ] || fail "the log has not 10 lines"
for ranks in 2 4 8; do
    run --steps 10 --ranks $ranks --log $ranks.log >$ranks.out
    cmp 1.log $ranks.log || fail "$ranks ranks have other losses than 1"
done
run --steps 10 --ranks 4 --backend threads --log threads.log >threads.out
cmp 1.log threads.log || fail "4 threads have other losses than 1 rank"
grep -q 'backend threads' threads.out || fail "--backend threads is not what was used"

run --check --steps 5 --ranks 4 >check.out || fail "--check: $(cat check.out)"
grep -q '^5 of 5 steps are equal' check.out || fail "--check says: $(cat check.out)"

# The loss falls, and the progress lines show it.
"$program" --hidden 32 --inner 48 --tokens 256 --steps 60 --sample 30 --picture p.svg text >out
grep -q '^held-out text: .* less$' out || fail "no end: $(cat out)"
less=$(sed -n 's/^held-out text: .*: \([0-9]*\) % less$/\1/p' out)
[ "${less:-0}" -ge 40 ] || fail "bits per byte fell by ${less:-?} % only"
grep -q '^samples' out && grep -q '  layer 1 expert 7  ' out || fail "no samples or loads"
[ "$(grep -c '^for comparison: [0-9.]* bits per byte by a 6-gram ' out)" = 2 ] || fail "no n-gram"
grep -q '</svg>' p.svg || fail "no picture"

# No file is written without an option that asks for it.
mkdir empty
cd empty
"$program" --hidden 32 --inner 48 --tokens 256 --steps 2 --sample 0 ../text >../out
picture=$(sed -n 's/^the same as a picture, with the losses: //p' ../out)
[ -e "$picture" ] || fail "no picture: $(cat ../out)"
[ -z "$(ls -A)" ] || fail "wrote into the current directory: $(ls -A)"
