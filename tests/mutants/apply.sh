#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that every patch of tests/mutants applies exactly.  A patch that does not apply tests nothing,
# or damages another place.  usage: apply.sh
cd "$(dirname "$0")/../.."
command -v patch >/dev/null || { echo "left out: there is no patch"; exit 77; }
tried=0 failed=0
for file in tests/mutants/*.patch; do
    tried=$((tried + 1))
    said=$(patch -p1 -s -f -F 0 --dry-run <"$file" 2>&1) && continue
    echo "$file: $said"
    failed=$((failed + 1))
done
echo "$tried patches, $failed do not apply"
[ $tried -gt 0 ] && [ $failed = 0 ]
