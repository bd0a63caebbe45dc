# SPDX-License-Identifier: Apache-2.0
# A test in a folder of its own, which goes with it: read by left_out.sh, no_index.sh and turns.sh.
# shellcheck shell=sh
tests=$(cd "$(dirname "$0")" && pwd)
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cd "$here"

fail() {
    echo "$*"
    exit 1
}
