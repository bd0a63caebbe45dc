#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `make test` ends with the times of its parts, and what they and their tests left out, or says that
# nothing was.
set -eu
tests=$(cd "$(dirname "$0")" && pwd)
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cd "$here"

fail() {
    echo "$*"
    exit 1
}

cat >make <<'MAKE'
#!/bin/sh
case $1 in
test-one) echo "left out: a & b"; echo "left out: c" ;;
test-two) echo "left out: c"; echo "left out: c"; echo "SKIPPED [2] t.py:3: no d" ;;
test-bad) echo "left out: e"; exit 2 ;;
esac
MAKE
chmod +x make
"$tests/parts.sh" ./make one good two >out || fail "$(cat out)"
cat >wanted <<'WANTED'
== left out
  a & b [one]
  c [one, two]
  t.py:3: no d [two]
== make test: all parts passed
WANTED
tail -n 5 out | diff wanted - || fail "another list"
grep -Eq '^== times: one [0-9]+ s, good [0-9]+ s, two [0-9]+ s$' out || fail "no times: $(cat out)"
"$tests/parts.sh" ./make good >out || fail "$(cat out)"
grep -q '^== nothing was left out$' out || fail "$(cat out)"
if "$tests/parts.sh" ./make bad one >out; then fail "the part failed: $(cat out)"; fi
grep -q '^  e \[bad\]$' out || fail "$(cat out)"
grep -q '"bad" failed' out || fail "$(cat out)"
if grep -q 'a & b' out; then fail "went on after a part that failed"; fi

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
