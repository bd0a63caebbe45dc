#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that the C program of the quick start is equal to examples/step.c, which other tests build and
# run, and that the paths in README.md exist.
set -eu
cd "$(dirname "$0")/.."
shown=$(mktemp)
trap 'rm -f "$shown"' EXIT
page=docs/guide/quickstart.md
awk '/^```c$/ { on = 1; next } /^```$/ { on = 0 } on' $page >"$shown"
diff -u examples/step.c "$shown" || { echo "$page does not show examples/step.c"; exit 1; }
for path in $(grep -oE '`(include|src|kernels|tests|bench|examples|docs|tools|bindings)/[A-Za-z0-9_./-]*`' README.md | tr -d '`'); do
    [ -e "$path" ] || { echo "README.md names $path, which is not there"; exit 1; }
done
