#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Configures a build folder. Prints CMake's output only if it fails.
# usage: configure.sh BUILD [CMAKE ARGUMENT]...
set -eu
cd "$(dirname "$0")/.."
build=$1
shift
log=$build/configure.log
# Remove an old log: otherwise it would look like the cause of a new error.
if ! { mkdir -p "$build" && rm -f "$log"; }; then
    echo "$build cannot be written by $(id -un); if root made it: sudo rm -r $build" >&2
    exit 1
fi
flock "$build" cmake -S . -B "$build" "$@" >"$log" || { cat "$log"; exit 1; }
