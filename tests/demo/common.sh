# SPDX-License-Identifier: Apache-2.0
# Functions that the tests of train_text share.  Sourced, with the program as $1.
program=$1
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cd "$here"
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT EPIC_BACKEND EPIC_TIMEOUT_MS
unset SLURM_PROCID SLURM_NTASKS SLURM_STEP_NUM_TASKS SLURM_STEP_ID SLURM_STEPID

# Writes a text that is long enough to learn from. It is the same each time.
i=0
while [ $i -lt 3000 ]; do
    echo "$i bottles, $((i * i % 97)) boxes and $((i * 7 % 13)) bags."
    i=$((i + 1))
done >text

fail() {
    echo "$0: $*" >&2
    exit 1
}

# Trains a small model on this text.
run() {
    "$program" --hidden 32 --inner 48 --tokens 256 --sample 0 --picture none "$@" text
}

# Like run(), but in the background, as process $parent.
start() {
    "$program" --hidden 32 --inner 48 --tokens 256 --sample 0 --picture none "$@" text &
    parent=$!
}

# Prints the processes that $parent started.
children() {
    cat "/proc/$parent/task/$parent/children"
}

need_children() {
    [ -e "/proc/$$/task/$$/children" ] || { echo "skipped: /proc does not list children"; exit 77; }
}

# Waits until a file has a progress line, which begins with a number.
await_progress() {
    tries=0
    until grep -Eq '^ *[0-9]+  ' "$1"; do
        tries=$((tries + 1))
        [ $tries -lt 600 ] || fail "no progress: $(cat "$1")"
        sleep 0.1
    done
}
