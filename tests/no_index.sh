#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Without a package index a user's machine leaves out the tests of the Python packages and prints that.
# If the variable CI is set they fail.  The Pythons made here create environments whose pip finds no
# index.
set -eu
. "$(dirname "$0")/scratch.sh"

mkdir bin build tests tests/jax tests/torch
cp "$tests/environments.sh" tests
cp "$tests/jax/run.sh" "$tests/jax/requirements.txt" tests/jax
cp "$tests/torch/run.sh" "$tests/torch/environments.sh" "$tests/torch/requirements.txt" tests/torch
for version in 3.11 3.12 3.13; do
    cat >bin/python$version <<'PYTHON'
#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p "$4/bin"
printf '#!/bin/sh\necho "ERROR: no index" >&2\nexit 1\n' >"$4/bin/pip"
chmod +x "$4/bin/pip"
PYTHON
done
chmod +x bin/python*
printf '#!/bin/sh\nprintf "Free\\n0 0 0 99999999\\n"\n' >bin/df
chmod +x bin/df

run() { # suite
    PATH=$here/bin:$PATH EPIC_PIP_TRIES=1 "tests/$1/run.sh" build >out 2>&1
}
unset CI EPIC_JAX_PYTHONS
for suite in jax torch; do
    run $suite || fail "$suite failed: $(cat out)"
    [ "$(grep -c '^left out: pip cannot install .*(ERROR: no index)$' out)" = 2 ] ||
        fail "$suite does not say it for both environments: $(cat out)"
    if CI=true run $suite; then fail "$suite passed with CI set: $(cat out)"; fi
    grep -q '^CI is set, so what pip cannot install is an error: ' out || fail "$suite: $(cat out)"
done
