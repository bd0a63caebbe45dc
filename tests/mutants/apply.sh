#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Does every patch of tests/mutants still fit the tree, to the letter?  One that does not is damage
# that nobody tries any more, or that lands elsewhere.  usage: apply.sh
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
