#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: docs.sh [--library LIBEPIC] CC [FLAG...]: runs tests/pages/check.py where there is a Python.
cd "$(dirname "$0")"
command -v python3 >/dev/null || { echo "left out: there is no python3"; exit 77; }
exec python3 pages/check.py "$@"
