#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `make` ends with a list of what it left out.  `make test` ends with the times of its parts and with
# what the parts and their tests left out, or with a line that nothing was left out.
set -eu
. "$(dirname "$0")/scratch.sh"

mkdir front front/bin
cp -r "$tests/../Makefile" "$tests/../tools" front
printf '#!/bin/sh\necho "-- left out: OpenBLAS: slow"\n' >front/bin/cmake
chmod +x front/bin/cmake
PATH=$here/front/bin:$PATH make -C front --no-print-directory >out || fail "$(cat out)"
[ "$(tail -n 1 out)" = "left out: OpenBLAS: slow" ] || fail "make does not end with it: $(cat out)"

cat >Makefile <<'MAKE'
test-one:; @echo "left out: a & b"; echo "left out: c"; touch one
test-two:; @echo "left out: c"; echo "left out: c"; echo "SKIPPED [2] t.py:3: no d"
test-good:; @echo fine
test-bad:; @echo "left out: e"; exit 2
# Starts before the part "second" and prints after it.
test-first:; @until [ -e second ]; do sleep 0.1; done; echo first 1; sleep 0.2; echo first 2
test-second:; @echo second 1; touch second; sleep 0.1; echo second 2
MAKE
"$tests/parts.sh" make one "good two" >out || fail "$(cat out)"
cat >wanted <<'WANTED'
== left out
  a & b [one]
  c [one, two]
  t.py:3: no d [two]
== make test: all parts passed
WANTED
tail -n 5 out | diff wanted - || fail "another list"
time='[0-9]+ \([0-9]+\) s'
grep -Eq "^== times \(processor time\): one $time, good $time, two $time; all [0-9]+ s\$" out ||
    fail "no times: $(cat out)"
"$tests/parts.sh" make good >out || fail "$(cat out)"
grep -q '^== nothing was left out$' out || fail "$(cat out)"

# Two parts run at the same time, and the output of each is printed in one piece.
"$tests/parts.sh" make "first second" >out || fail "$(cat out)"
grep -A 1 'first 1' out | grep -q 'first 2' || fail "in pieces: $(cat out)"
grep -A 1 'second 1' out | grep -q 'second 2' || fail "in pieces: $(cat out)"

rm one
if "$tests/parts.sh" make "good bad" one >out 2>&1; then fail "the part failed: $(cat out)"; fi
grep -q '^  e \[bad\]$' out || fail "$(cat out)"
grep -q '^== make test: failed: bad$' out || fail "$(cat out)"
if [ -e one ]; then fail "went on after a part that failed"; fi
if grep -q 'all parts passed' out; then fail "$(cat out)"; fi

cat >CMakeLists.txt <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(parts NONE)
enable_testing()
add_test(NAME whole COMMAND sh -c "echo fine")
add_test(NAME reason COMMAND sh -c "echo 'skipped: \"d\" & <e>'; exit 77")
add_test(NAME silent COMMAND sh -c "exit 77")
add_test(NAME partly COMMAND sh -c "echo 'left out: f'")
set_tests_properties(reason silent PROPERTIES SKIP_RETURN_CODE 77)
CMAKE
cmake -S . -B build >out || fail "$(cat out)"
"$tests/ctest.sh" build >out || fail "$(cat out)"
cat >wanted <<'WANTED'
left out: partly: f
left out: reason: "d" & <e>
left out: silent: skipped without a reason
WANTED
grep '^left out' out | sort | diff wanted - || fail "other reasons"
