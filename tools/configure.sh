#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Configures a build folder; says what CMake says only if it fails.
# usage: configure.sh BUILD [CMAKE ARGUMENT]...
set -eu
cd "$(dirname "$0")/.."
build=$1
shift
log=$build/configure.log
# An old log would be taken for what went wrong now.
if ! { mkdir -p "$build" && rm -f "$log"; }; then
    echo "$build cannot be written by $(id -un); if root made it: sudo rm -r $build" >&2
    exit 1
fi
flock "$build" cmake -S . -B "$build" "$@" >"$log" || { cat "$log"; exit 1; }
