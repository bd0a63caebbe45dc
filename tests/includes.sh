#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs includes.py, which checks that includes and calls point down only, where there is a python3.
# usage: includes.sh ROOT
command -v python3 >/dev/null || { echo "left out: there is no python3"; exit 77; }
exec python3 "$(dirname "$0")/includes.py" "$1"
