# SPDX-License-Identifier: Apache-2.0
# Runs a test in a temporary folder that is removed at its end; sourced by left_out.sh, no_index.sh,
# compare_builds.sh and gpu_all.sh.
# shellcheck shell=sh
tests=$(cd "$(dirname "$0")" && pwd)
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cd "$here"

fail() {
    echo "$*"
    exit 1
}
