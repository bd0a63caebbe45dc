#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that the library exports the names that epic.map lists and that the headers declare EPIC_API.
# usage: symbols.sh LIBRARY MAP HEADER...
set -eu
export LC_ALL=C
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT

library=$1 map=$2
shift 2
nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort >"$here/library"
sed -n 's/^ *\(epic_[a-z0-9_]*\);.*/\1/p' "$map" | sort >"$here/map"
# A declaration may span lines: joins the lines, cuts at each EPIC_API and keeps the name before "(".
cat "$@" | grep -v '^#' | tr '\n' ' ' | sed 's/EPIC_API /\n&/g' |
    sed -n 's/^EPIC_API [^(]*[ *]\(epic_[a-z0-9_]*\)(.*/\1/p' | sort >"$here/header"

failed=0
[ -s "$here/header" ] || { echo "no EPIC_API declaration found in $*"; failed=1; }
diff "$here/header" "$here/map" || { echo "the headers (<) and epic.map (>) differ"; failed=1; }
diff "$here/map" "$here/library" || { echo "epic.map (<) and $library (>) differ"; failed=1; }
if grep -v '^epic_' "$here/library"; then
    echo "exported without the prefix epic_"
    failed=1
fi
exit $failed
