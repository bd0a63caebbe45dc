#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that epic_ENUM_name() returns a name for each constant of the header's enums and for no other number, and
# each result has a sentence.  Flags are bits and have no names.
# usage: names.sh CC INCLUDE LIBRARY
set -eu
export LC_ALL=C
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT

"$1" -E -P -I"$2" "$2/epic/epic.h" | tr '\n' ' ' | sed 's/[;{}]/&\n/g' | awk '
    /enum epic_[a-z_]+ \{$/ { name = $0; sub(/.*enum epic_/, "", name); sub(/ .*/, "", name); next }
    name != "" {
        count = split($0, constants, ",")
        for (i = 1; i <= count && name != "flag"; i++)
            if (match(constants[i], /EPIC_[A-Z0-9_]+/))
                printf "CHECK(%s, %s)\n", name, substr(constants[i], RSTART, RLENGTH)
        if (name != "flag") printf "NONE(%s, %d)\n", name, count
        name = ""
    }' >"$here/checks"
{
    printf '#include <stdio.h>\n#include <string.h>\n#include "epic/epic.h"\nint main(void)\n{\n    int bad = 0, count = 0;\n'
    printf '#define CHECK(e, c) count++; if (strcmp(epic_##e##_name(c), #c)) { puts(#c); bad = 1; }\n'
    printf '#define NONE(e, n) if (strcmp(epic_##e##_name(n), "unknown epic_" #e)) { puts(#e); bad = 1; }\n'
    cat "$here/checks"
    printf '    for (int r = EPIC_OK; r <= EPIC_EEVICTED; r++)\n'
    printf '        for (int q = EPIC_OK; q <= r; q++)\n'
    printf '            if (!strcmp(epic_result_string((epic_result)q), epic_result_string((epic_result)(r + 1)))) bad = 1;\n'
    printf '    char version[32];\n'
    printf '    snprintf(version, sizeof version, "%%d.%%d.%%d", EPIC_VERSION_MAJOR, EPIC_VERSION_MINOR, EPIC_VERSION_PATCH);\n'
    printf '    if (strcmp(version, EPIC_VERSION_STRING) || EPIC_VERSION != EPIC_VERSION_MAJOR * 10000 + EPIC_VERSION_MINOR * 100 + EPIC_VERSION_PATCH) { puts(version); bad = 1; }\n'
    printf '    if (!EPIC_VERSION_AT_LEAST(EPIC_VERSION_MAJOR, EPIC_VERSION_MINOR, EPIC_VERSION_PATCH)) bad = 1;\n'
    printf '    if (EPIC_VERSION_AT_LEAST(EPIC_VERSION_MAJOR, EPIC_VERSION_MINOR, EPIC_VERSION_PATCH + 1)) bad = 1;\n'
    printf '    printf("%%d constants, %%s\\n", count, bad ? "WRONG" : "good");\n    return bad || count < 60;\n}\n'
} >"$here/names.c"
"$1" -std=c11 -I"$2" "$here/names.c" "$3" -Wl,-rpath,"$(dirname "$3")" -o "$here/names"
"$here/names"
