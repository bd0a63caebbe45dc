#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of a build, then prints which tests left something out, and why.
# usage: ctest.sh BUILD [CTEST ARGUMENT]...
set -eu
build=$(cd "$1" && pwd)
shift
status=0
ctest --output-on-failure -j $(($(nproc) + 1)) --test-dir "$build" --output-junit "$build/tests.xml" "$@" ||
    status=$?
awk '/<testcase / { sub(/.*<testcase name="/, ""); sub(/".*/, ""); test = $0; reason = "" }
     /<skipped / { reason = "skipped without a reason" }
     { sub(/.*<system-out>/, "") }
     /^(left out|skipped): / { sub(/^[a-z ]*: /, ""); sub(/<\/system-out>.*/, ""); reason = $0 }
     /<\/testcase>/ && reason { print "left out: " test ": " reason }
' "$build/tests.xml" | sed 's/&quot;/"/g; s/&apos;/'"'"'/g; s/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g'
exit $status
