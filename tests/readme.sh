#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The README's C example is examples/step.c, which is built and run; and the paths it names exist.
set -eu
cd "$(dirname "$0")/.."
shown=$(mktemp)
trap 'rm -f "$shown"' EXIT
awk '/^```c$/ { on = 1; next } /^```$/ { on = 0 } on' README.md >"$shown"
diff -u examples/step.c "$shown" || { echo "README.md does not show examples/step.c"; exit 1; }
for path in $(grep -oE '`(include|src|kernels|tests|bench|examples|docs|tools|bindings)/[A-Za-z0-9_./-]*`' README.md | tr -d '`'); do
    [ -e "$path" ] || { echo "README.md names $path, which is not there"; exit 1; }
done
