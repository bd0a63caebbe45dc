#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests epic-sim: its bytes equal those computed by hand, its times follow from the constants, the model
# is close to measurements, and impossible arguments are refused.
# usage: sim.sh PROGRAM
set -eu
sim=$1
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT

# holds WHAT CONDITION    checks an awk condition on the table row whose first field is $ranks
row() { awk -v ranks="$ranks" '$1 == ranks && NF >= 11' "$here/out"; }
holds() {
    row | awk -v OFS= "function near(a, b, part) { d = a - b; return d * d <= part * part * b * b }
        { if ($2) right = 1 } END { exit !right }" && return 0
    echo "$1 of $ranks ranks: $(row)"
    exit 1
}

# A token touches a host of 8 ranks with probability 1 - C(256 - 256/H, 8) / C(256, 8).
"$sim" --ranks 16,32,64,128 --svg "$here/picture.svg" >"$here/out"
for line in "16 2 58.6" "32 4 159.2" "64 8 272.6" "128 16 359.9"; do
    set -- $line
    ranks=$1
    holds "bytes by net" "\$2 == $2 && near(\$3, $3, 0.02)"
    holds "time at 50 GB/s" "near(\$6, \$3 / 50 * 1e3, 0.06)"
done
grep -q '</svg>' "$here/picture.svg"
[ "$(grep -c polyline "$here/picture.svg")" = 4 ]

# A picture is drawn even if an operation takes no time.
timeout 60 "$sim" --ranks 1,2 --launch 0 --tokens 1 --svg "$here/picture.svg" >"$here/out"
grep -q "</svg>" "$here/picture.svg"

# In a plan each rank sends 8 bytes per choice to each rank of another host, and counts. With few tokens,
# the thread makes three puts for each of these ranks. With more than 32 ranks, relays send announcements and
# counts: in 8 hosts of 8, each rank those of 8 ranks to one host, and in 16 hosts to two. Records go in a list to
# each other host, with 16 bytes per choice, and a word per token and rank goes over NVLink (341 GB/s).
"$sim" --ranks 16,32,64,128 >"$here/out"
ranks=32
holds "time of a plan" 'near($5, 10 + 24 * 8 * (4 + 256 + 4096 * 8) / 50e3, 0.01)'
ranks=64
holds "time of a plan" \
    'near($5, 10 + 8 * (8 * 260 + 7 + 2 * 4096 * 8 * 56 / 64) / 50e3 + 56 * 4096 * 8 / 341e3, 0.02)'
# 64 ranks: 8 puts with announcements, 8 with counts, and 3 for each of the 7 lists. 32 ranks have no relays: 3 puts
# go to each of the 24 ranks of other hosts.
holds "puts of a plan" '$12 == 8 + 8 + 7 * 3 && $13 > 100'
ranks=32
holds "puts of a plan" '$12 == 24 * 3'
"$sim" --ranks 16,32,64,128 --tokens 1 >"$here/out"
holds "time of a plan's puts" 'near($5, 10 + 24 * 3 * 0.25, 0.02)'
ranks=128
holds "time of a plan's puts" 'near($5, 10 + (15 + 2 * 16) * 0.25, 0.02)'

# Another constant changes the times, not the bytes.
"$sim" --ranks 16 --nic 25 >"$here/out"
ranks=16
holds "time at 25 GB/s" 'near($3, 58.7, 0.01) && near($6, 2 * 58.7 / 50 * 1e3, 0.06)'
# A slow thread is the bottleneck.
"$sim" --ranks 16 --put 100 >"$here/out"
holds "limit" '$8 == "thread"'

# If all tokens choose the ranks of one host, half of the ranks send everything, and each relay receives
# as many bytes as a rank sends.
printf '0 1 2\n' >"$here/trace"
"$sim" --ranks 16 --hidden 1000 --tokens 100 --trace "$here/trace" >"$here/out"
holds "bytes of a trace" 'near($3, 100 * (2000 + 12) / 1e6, 0.5) && $4 == 2'

# If hosts have different numbers of ranks, no rank relays rows, and a row is sent once for each rank.
"$sim" --ranks 9,12,17 --host 8 --tokens 512 >"$here/out"
for ranks in 9 12 17; do
    holds "rows of uneven hosts" 'near($10, 1, 0.25) && $3 > 1'
done
# Hosts of more than 31 ranks have no relays either.
"$sim" --ranks 124 --host 31 --tokens 512 >"$here/out"
ranks=124
holds "rows of hosts of 31 ranks" '$10 > 2'
"$sim" --ranks 128 --host 32 --tokens 512 >"$here/out"
ranks=128
holds "rows of hosts of 32 ranks" 'near($10, 1, 0.1)'
# With a trace of fewer experts than ranks the table ends at that number of ranks.
"$sim" --tokens 16 --trace "$here/trace" >"$here/out"
[ "$(grep -c "^ *[0-9]* *[0-9]*  " "$here/out")" = 6 ] || { echo "a trace of 256 experts: $(cat "$here/out")"; exit 1; }
# Drawing the last expert, or the last one of a rarely chosen group, ends in reasonable time.
timeout 60 "$sim" --ranks 8 --tokens 512 --top-k 64 --experts 64 --skew 3 >"$here/out"
timeout 60 "$sim" --ranks 8 --tokens 512 --top-k 4 --groups 64 --limit 1 --skew 3 >"$here/out"

# The model's dispatch and combine take at least an eighth of the measured time, and at most 1.25 times. With
# 128 tokens and at least 128 ranks, the plan of the model takes longer, because each rank sends to every rank.
"$sim" --ranks 8 --published >"$here/out"
awk '/ us  / || / GB\/s  / {
    n++
    for (i = NF - 3; i < NF; i += 2) {
        speed = $(NF - 4) == "us" ? $i / $(i + 1) : $(i + 1) / $i
        least = $(NF - 7) >= 128 && $(NF - 6) == 128 ? 0.4 : 0.8
        if (speed < least || speed > 8) { print "far from what was measured: " $0; wrong = 1 }
    }
} END { exit wrong || n != 31 }' "$here/out"

refuses() {
    status=0
    "$sim" "$@" >"$here/out" 2>&1 || status=$?
    [ $status = 2 ] && grep -q -- "see epic-sim --help" "$here/out" && return 0
    echo "not refused: $*: $(cat "$here/out")"
    exit 1
}
printf '1 2\n3\n' >"$here/ragged"
refuses --ranks 0
refuses --ranks 16,8
refuses --ranks 4096
refuses --nic fast
refuses --nic
refuses --top-k 9 --experts 8
refuses --groups 8 --limit 9
refuses --trace "$here/ragged"
refuses --trace "$here/none"
refuses --svg "$here/none/x.svg" --ranks 8 --tokens 8
refuses --none 1
refuses --top-k 2.5
refuses --limit 2
refuses --trace "$here/trace" --skew 1
refuses --trace "$here/trace" --ranks 512
