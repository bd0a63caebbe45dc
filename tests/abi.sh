#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compares the ABI with the committed list: the size of every public struct, the offset and size of
# every field, the number of every enum constant.  docs/reference/abi.md says when the list may change.
# usage: abi.sh CC INCLUDE LIST [--write]
set -eu
export LC_ALL=C
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT

{
    printf '#include <stddef.h>\n#include <stdio.h>\n#include "epic/epic.h"\n'
    printf '#define STRUCT(s) printf("%%s %%zu\\n", #s, sizeof(s));\n'
    printf '#define FIELD(s, f) printf("%%s.%%s %%zu %%zu\\n", #s, #f, offsetof(s, f), sizeof(((s *)0)->f));\n'
    printf '#define NUMBER(n) printf("%%s %%lld\\n", #n, (long long)(n));\nint main(void)\n{\n'
    "$1" -E -P -I"$2" "$2/epic/epic.h" | tr '\n' ' ' | sed 's/[;{}]/&\n/g' | awk '
        /struct epic_[a-z_]+ \{$/ {
            name = $0; sub(/.*struct /, "", name); sub(/ .*/, "", name)
            kind = "struct"; print "STRUCT(" name ")"; next
        }
        /enum epic_[a-z_]+ \{$/ { kind = "enum"; next }
        kind == "enum" {
            count = split($0, constants, ",")
            for (i = 1; i <= count; i++)
                if (match(constants[i], /EPIC_[A-Z0-9_]+/))
                    print "NUMBER(" substr(constants[i], RSTART, RLENGTH) ")"
            kind = ""; next
        }
        /\}$/ { kind = ""; next }
        kind == "struct" {
            field = $0; sub(/;$/, "", field)
            if (match(field, /\(\*[a-z_]+\)/)) field = substr(field, RSTART + 2, RLENGTH - 3)
            else { sub(/\[[^]]*\]$/, "", field); sub(/.*[ *]/, "", field) }
            print "FIELD(" name ", " field ")"
        }'
    printf '    return 0;\n}\n'
} >"$here/abi.c"
"$1" -std=c11 -I"$2" "$here/abi.c" -o "$here/abi"
"$here/abi" >"$here/list"
[ "$(wc -l <"$here/list")" -gt 300 ] || { echo "only $(wc -l <"$here/list") lines were found"; exit 1; }
if [ "${4:-}" = --write ]; then
    cp "$here/list" "$3"
    exit 0
fi
# The list becomes static asserts.  The second check finds what the header has and the list lacks.
{
    printf '#include <stddef.h>\n#include "epic/epic.h"\n'
    sed -E -e 's/^(epic_[a-z_0-9]+)\.([a-z_0-9]+) ([0-9]+) ([0-9]+)$/_Static_assert(offsetof(\1, \2) == \3 \&\& sizeof(((\1 *)0)->\2) == \4, "\1.\2");/' \
        -e 's/^(epic_[a-z_0-9]+) ([0-9]+)$/_Static_assert(sizeof(\1) == \2, "\1");/' \
        -e 's/^(EPIC_[A-Z_0-9]+) (-?[0-9]+)$/_Static_assert(\1 == \2, "\1");/' "$3"
} >"$here/asserts.c"
"$1" -std=c11 -I"$2" -fsyntax-only "$here/asserts.c" || { echo "the ABI is not what $3 lists"; exit 1; }
diff -u "$3" "$here/list" || { echo "the ABI is not what $3 lists"; exit 1; }

# The header checks the width of every enum: a program compiled with -fshort-enums fails to compile.
enums=$(sed -n 's/^typedef enum \(epic_[a-z_]*\) {$/\1/p' "$2/epic/epic.h")
printf '#include "epic/epic.h"\n' >"$here/short.c"
"$1" -std=c11 -I"$2" -fshort-enums -fsyntax-only "$here/short.c" 2>"$here/said" &&
    { echo "the header compiles with enums of one byte"; exit 1; }
for enum in $enums; do
    grep -q "$enum has no 32 bits" "$here/said" || { echo "the width of $enum is not checked"; exit 1; }
done
