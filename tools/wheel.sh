#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds a source distribution, and a wheel from it. If the environment has auditwheel and patchelf, it
# also builds the wheel with the manylinux tag of this machine's libc.
# usage: wheel.sh PYTHON FOLDER [pip arguments], where PYTHON has pyproject.toml's build requirements
#   --config-settings=cmake.define.EPIC_CUDA=OFF          without CUDA, in two minutes
#   --config-settings=cmake.define.EPIC_CUDA_ARCHITECTURES=all-major
set -eu
cd "$(dirname "$0")/.."
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
mkdir -p "$2"
out=$(cd "$2" && pwd)
shift 2
PATH=$(dirname "$python"):$PATH # finds the patchelf that pip installed

"$python" -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' "$out"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    --wheel-dir "$out" "$@" "$out"/epic_moe-*.tar.gz
if "$python" -c 'import auditwheel' 2>/dev/null; then
    # These libraries come from the user's machine: MPI and the GPU driver.
    "$python" -m auditwheel repair --exclude 'libmpi*' --exclude 'libcuda*' --wheel-dir "$out" \
        "$out"/epic_moe-*-py3-none-linux_*.whl
    rm "$out"/epic_moe-*-py3-none-linux_*.whl
else
    echo "left out: the manylinux tag (pip install auditwheel patchelf)"
fi
ls "$out"
