#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs tests/pages/check.py if there is a python3.
# usage: docs.sh [--library LIBEPIC] CC [FLAG...]
cd "$(dirname "$0")"
command -v python3 >/dev/null || { echo "left out: there is no python3"; exit 77; }
exec python3 pages/check.py "$@"
