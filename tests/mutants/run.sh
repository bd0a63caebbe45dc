#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that the tests notice bugs. Each tests/mutants/NAME.patch breaks one place in a copy of the
# tree. One of the tests that the patch names must then fail with an error, not with a timeout.
#   MUTANTS="NAME ..."  selects patches; MUTANTS_OUT  the build folder; JOBS; LIMIT  seconds per test
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${MUTANTS_OUT:-$root/build/mutants}
tree=$out/tree build=$out/build log=$out/log
jobs=${JOBS:-$(nproc)}
limit=${LIMIT:-300} # seconds per test, enough for a busy machine
passed=0 failed=0

patch_of() { echo "$root/tests/mutants/$1.patch"; }
tests_of() { sed -n 's/^Tests: //p' "$(patch_of "$1")"; }
files_of() { sed -n 's,^+++ b/,,p' "$(patch_of "$1")"; }
names=${MUTANTS:-$(cd "$root/tests/mutants" && ls -- *.patch | sed 's/\.patch$//')}

# Copies the tree with the times of its files, so that little is built again.  The files that patches
# damage get a new time, because an earlier run may have left objects of a damaged file.
copy_tree() {
    rm -rf "$tree" && mkdir -p "$tree" "$log"
    (cd "$root" && git ls-files -z --cached --others --exclude-standard | tar -c --null -T - \
        --ignore-failed-read 2>/dev/null) | tar -x -C "$tree"
    (cd "$tree" && touch $(sed -n 's,^+++ b/,,p' "$root"/tests/mutants/*.patch | sort -u))
    launcher=$(command -v ccache)
    cmake -S "$tree" -B "$build" -DCMAKE_BUILD_TYPE=Release -DEPIC_CUDA=OFF -DEPIC_MPI=OFF \
        -DEPIC_PATIENCE=4 \
        -DCMAKE_C_COMPILER_LAUNCHER="$launcher" -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" \
        >"$log/configure" 2>&1 || { cat "$log/configure"; exit 1; }
}

# Programs are built by the names of the folders where they lie.
target_of() {
    # add_test([=[NAME]=] "PROGRAM" or, since CMake 4, add_test("NAME" "PROGRAM"
    program=$(find "$build/tests" -name CTestTestfile.cmake -exec \
        sed -n "s/^add_test([^a-z]*$1[^a-z0-9._]* \"\([^\"]*\)\".*/\1/p" {} +)
    case $program in
    */emulated/*) basename "$program" ;;
    *) echo "$(basename "$(dirname "$program")")_$(basename "$program")" ;;
    esac
}

targets_of() { for test in "$@"; do target_of "$test"; done | sort -u; }

make_targets() { cmake --build "$build" -j "$jobs" --target "$@"; }

# Returns 0 if the test passed, 1 if it failed, 2 if it took too long or does not exist.
run_test() {
    timeout -k 5 "$limit" ctest --test-dir "$build" -R "^$1\$" --no-tests=error \
        --output-on-failure >"$log/test" 2>&1
    case $? in
    0) return 0 ;;
    124 | 137) return 2 ;;
    esac
    grep -q '\*\*\*Timeout\|No tests were found\|Not Run' "$log/test" && return 2
    return 1
}

# Tries one patch and sets `verdict`. Returns 0 if a test has found the bug.
try() {
    verdict="does not apply"
    patch -p1 -s -f --no-backup-if-mismatch -d "$tree" <"$(patch_of "$1")" >"$log/$1" 2>&1 || return 1
    verdict="does not compile"
    make_targets $(targets_of $(tests_of "$1")) >>"$log/$1" 2>&1 || return 1
    verdict="not caught"
    for test in $(tests_of "$1"); do
        run_test "$test"
        case $? in
        1)
            verdict="caught by $test"
            return 0 ;;
        2) verdict="$test took more than $limit s" ;;
        esac
        cat "$log/test" >>"$log/$1"
    done
    return 1
}

restore() {
    for file in $(files_of "$1"); do
        cp "$root/$file" "$tree/$file"
        rm -f "$tree/$file.rej"
    done
}

begun=$(date +%s)
copy_tree
all_tests=$(for name in $names; do tests_of "$name" | tr ' ' '\n'; done | sort -u)
make_targets $(targets_of $all_tests) >"$log/build" 2>&1 || { tail -n 30 "$log/build"; exit 1; }
sound=true
for test in $all_tests; do
    run_test "$test" && continue
    echo "$test fails without damage:"
    tail -n 20 "$log/test"
    sound=false
done
$sound || exit 1
echo "$(echo "$all_tests" | wc -l) tests pass without damage, after $(($(date +%s) - begun)) s"
for name in $names; do
    began=$(date +%s)
    if try "$name"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    restore "$name"
    printf '%-28s %4d s  %s\n' "$name" $(($(date +%s) - began)) "$verdict"
done
echo "$passed passed, $failed failed, in $(($(date +%s) - begun)) s; what they said: $log"
[ $failed = 0 ]
