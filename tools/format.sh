#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Formats every C file of the repository, or with --check checks that it is formatted. Versions of
# clang-format format differently, so only version 14 is used.
set -eu
cd "$(dirname "$0")/.."

program=
for name in clang-format-14 clang-format; do
    if command -v $name >/dev/null && $name --version | grep -q 'version 14\.'; then
        program=$name
        break
    fi
done
[ -n "$program" ] || { echo "left out: there is no clang-format 14"; exit 0; }

# Without git, for example in a tarball, use all files.
files=$(git ls-files '*.c' '*.h' '*.cc' '*.cu' '*.cuh' 2>/dev/null) ||
    files=$(find . -path ./build -prune -o -name '*.[ch]' -print -o -name '*.cc' -print -o -name '*.cu*' -print)
[ -n "$files" ] || exit 0
if [ "${1:-}" != --check ]; then
    echo "$files" | xargs $program -i
    exit 0
fi
if ! said=$(echo "$files" | xargs -n 16 -P "$(nproc)" $program --dry-run -Werror 2>&1); then
    echo "$said" | sed -n 's/^\([^: ]*\):[0-9].*/not formatted: \1/p' | sort -u
    echo "to format: make format"
    exit 1
fi
