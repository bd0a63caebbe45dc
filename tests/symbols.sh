#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The same names three times: exported by the library, listed in epic.map, declared EPIC_API.
# usage: symbols.sh LIBRARY MAP HEADER
set -eu
export LC_ALL=C
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT

nm -D --defined-only "$1" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort >"$here/library"
sed -n 's/^ *\(epic_[a-z0-9_]*\);.*/\1/p' "$2" | sort >"$here/map"
# A declaration may span lines: join them, cut at each EPIC_API, keep the name before the "(".
grep -v '^#' "$3" | tr '\n' ' ' | sed 's/EPIC_API /\n&/g' |
    sed -n 's/^EPIC_API [^(]*[ *]\(epic_[a-z0-9_]*\)(.*/\1/p' | sort >"$here/header"

failed=0
[ -s "$here/header" ] || { echo "no EPIC_API declaration found in $3"; failed=1; }
diff "$here/header" "$here/map" || { echo "epic.h (<) and epic.map (>) differ"; failed=1; }
diff "$here/map" "$here/library" || { echo "epic.map (<) and $1 (>) differ"; failed=1; }
if grep -v '^epic_' "$here/library"; then
    echo "exported without the prefix epic_"
    failed=1
fi
exit $failed
