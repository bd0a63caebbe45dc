#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Lets Spin search all states of the models of four protocols: of backend hosts (hosts.pml), of relays for
# announcements and counts (relays.pml), of windows (windows.pml) and of the decision on a generation's
# members (members.pml). Then breaks a model, one rule after the other, and checks that Spin finds each
# error.
# usage: run.sh [NAME...]   NAME: right, fault0 to fault4, windows, members, members-cut,
#                           members-deaths, members-stopped, members-authority, announcements,
#                           counts, a mutant's name, mutants (all mutants of hosts.pml),
#                           windows-mutants, members-mutants or relays-mutants
#   MODEL_OUT  folder where the searches are built
#   MODEL_CC   compiler for them
tests=$(cd "$(dirname "$0")" && pwd)
out=${MODEL_OUT:-$tests/../../build/model}
failed=0
command -v spin >/dev/null || { echo "left out: there is no spin"; exit 77; }
command -v "${MODEL_CC:=cc}" >/dev/null || { echo "left out: there is no C compiler"; exit 77; }

# usage: search OPTIMIZATION NAME FLAG...; stores the output of the search in $out/NAME/result.
search() {
    optimization=$1 name=$2
    shift 2
    rm -rf "${out:?}/$name" && mkdir -p "$out/$name" && cd "$out/$name" || exit 1
    spin -a "$@" "$tests/${model:-hosts}.pml" >spin 2>&1 || { cat spin; exit 1; }
    "$MODEL_CC" "$optimization" -w -DSAFETY -DCOLLAPSE -DMEMLIM=1800 -o pan pan.c || exit 1
    ./pan $pan -m100000 -w22 >result 2>&1
    states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' result)
    seconds=$(sed -n 's/^pan: elapsed time \([0-9.]*\) seconds/\1/p' result)
}

# The search must be complete and without errors, and must reach every line of the model.
holds() {
    search -O2 "$@"
    verdict="holds"
    unreached=$(grep 'state [0-9]*, "' result | grep -v '"-end-"')
    grep -q 'errors: 0$' result || verdict="FAILS: $(grep -m 1 '^pan:1' result)"
    grep -q 'Search not completed\|max search depth too small' result && verdict="FAILS: not searched to the end"
    case $1 in fault* | members*) unreached= ;; esac
    [ -n "$unreached" ] && verdict="FAILS: never reached: $unreached"
    print_verdict
}

caught() {
    name=$1
    shift
    mutant=${name#*-} # a mutant of relays.pml has the name of its run in front
    case $name in
    EARLY_ANNOUNCE | ORDER_OF_ARRIVAL | HALF_HEARD) optimization=-O2 ;;
    *) optimization=-O0 ;; # Spin finds these soon, so compiling takes longest
    esac
    search $optimization "$name" "-DMUTANT_$mutant" "$@"
    verdict="caught: $(sed -n 's/^pan:1: \([a-z ]*\).*/\1/p' result)"
    grep -q '^pan:1: \(assertion violated\|invalid end state\)' result || verdict="NOT CAUGHT"
    print_verdict
}

print_verdict() {
    printf '%-30s %9s states %6s s  %s\n' "$name" "$states" "$seconds" "$verdict"
    case $verdict in FAILS* | NOT*) failed=$((failed + 1)) ;; esac
}

mutants="OUTBOX_UNASKED FREED_EARLY EARLY_ANNOUNCE EARLY_ROW STALE_IDS ORDER_OF_ARRIVAL HALF_WORDS
    HALF_STAMPED HALF_HEARD ONE_PARITY NOT_AWAITED POISON_KEPT DEAD_UNSEEN BROKEN_UNSENT"
windows_mutants="STORE_UNASKED COUNT_UNFENCED COUNT_EARLY COUNT_UNSTAMPED END_NOT_AWAITED
    CLOSE_UNORDERED CLOSE_UNASKED"
relays_mutants="announcements-OUTBOX_UNASKED announcements-WHOLE_HOST
    announcements-STALE_DISTRIBUTED counts-OUTBOX_UNASKED counts-STALE_COLLECTED
    counts-STALE_DISTRIBUTED counts-POSTED_EARLY counts-READ_FIRST"
members_mutants="LIVING SILENT FORGETS HASTY EARLIER_ENTERED"
[ $# -gt 0 ] || set -- members members-cut members-deaths members-stopped members-authority \
    members-mutants right fault0 fault1 fault2 fault3 fault4 mutants windows windows-mutants \
    announcements counts relays-mutants
# shellcheck disable=SC2046 # words
set -- $(for what in "$@"; do
    case $what in
    mutants) echo $mutants ;;
    windows-mutants) echo $windows_mutants ;;
    members-mutants) echo $members_mutants ;;
    relays-mutants) echo $relays_mutants ;;
    *) echo "$what" ;;
    esac
done)
for what in "$@"; do
    model=hosts
    pan=
    case " windows $(echo $windows_mutants) " in *" $what "*) model=windows ;; esac
    case $what in announcements* | counts*) model=relays ;; esac
    # In members.pml a leader may wait for ever for a seat that is cut off, so such an end is no
    # error. The model checks itself that all living seats have entered.
    case " members $(echo $members_mutants) " in *" ${what%%-*} "*) model=members pan=-E ;; esac
    case $what in
    windows) holds windows ;;
    announcements) holds announcements ;;
    counts) holds counts -DCOUNTS ;;
    counts-*) caught "$what" -DCOUNTS ;;
    members) holds members -DN=3 -DDEATHS=1 ;;
    members-cut) holds members-cut -DN=5 -DFOCUS -DDEATHS=2 ;;
    members-deaths) holds members-deaths -DN=3 -DDEATHS=2 ;;
    members-stopped) holds members-stopped -DN=3 -DDEATHS=0 -DSLOW=2 -DROUNDS=1 ;;
    members-authority) holds members-authority -DN=3 -DDEATHS=0 -DROUNDS=1 -DAUTHORITY=6 ;;
    LIVING) caught LIVING -DN=5 -DFOCUS ;;
    SILENT | FORGETS | HASTY) caught "$what" -DN=3 -DDEATHS=1 ;;
    EARLIER_ENTERED) caught "$what" -DN=3 -DDEATHS=0 -DROUNDS=1 -DAUTHORITY=6 ;;
    right) holds right ;;
    fault*) holds "$what" "-DFAULTS=${what#fault}" ;;
    DEAD_UNSEEN | BROKEN_UNSENT) caught "$what" -DFAULTS=4 ;;
    *) caught "$what" ;;
    esac
done
echo "$# searches, $failed failed"
[ $failed = 0 ]
