#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests tools/configure.sh. If a build folder cannot be written, this error is printed and not the log of an earlier run.  If CMake
# fails, its log is printed.
set -eu
cd "$(dirname "$0")/.."
here=$(mktemp -d)
trap 'chmod -R u+w "$here"; rm -rf "$here"' EXIT
chmod 755 "$here"
cp -r Makefile tools "$here"
cd "$here"

fail() {
    echo "$*: $(cat out)"
    exit 1
}

mkdir bin
printf '#!/bin/sh\necho "the log of this run"\nexit 1\n' >bin/cmake
chmod +x bin/cmake
if PATH=$here/bin:$PATH make --no-print-directory test-gcc >out 2>&1; then fail "make went well"; fi
grep -q 'the log of this run' out || fail "no log is shown"

echo "the log of an earlier run" >build/configure.log
as_user=
if [ "$(id -u)" = 0 ]; then
    command -v setpriv >/dev/null || { echo "left out: root without setpriv"; exit 0; }
    as_user="setpriv --reuid 65534 --regid 65534 --clear-groups"
fi
chmod a-w build build/configure.log
if PATH=$here/bin:$PATH $as_user make --no-print-directory test-gcc >out 2>&1; then
    fail "make went well"
fi
if grep -q 'earlier run' out; then fail "the log of an earlier run is shown"; fi
grep -q 'build cannot be written' out || fail "no word of the folder"
