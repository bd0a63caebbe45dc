#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs includes.py if there is a python3. It checks that each folder includes and calls only folders
# below it, that the files of a folder do not call each other in a circle, and that the modules of the
# Python package do not import each other in a circle.
# usage: includes.sh ROOT
command -v python3 >/dev/null || { echo "left out: there is no python3"; exit 77; }
exec python3 "$(dirname "$0")/includes.py" "$1"
