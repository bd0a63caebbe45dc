# SPDX-License-Identifier: Apache-2.0
# Virtual environments for the tests of the Python packages, in the folder $build.
# shellcheck shell=sh disable=SC2154
missing= # packages that pip could not install
# The first process stores the bytecode of each module in $build/bytecode. Without it each process would
# compile all modules again, which takes 4 s for torch and 3 s for JAX.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$build/bytecode"

works() { "$1" -c "import sys, venv, ensurepip; assert '%d.%d' % sys.version_info[:2] == '$2'" 2>/dev/null; }

interpreter() { # usage: interpreter VERSION; prints the path of this Python, or nothing
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python python3; do
        if works "$candidate" "$1"; then
            echo "$candidate"
            return
        fi
    done
}

# Installs packages into a virtual environment. uv is several times faster than pip, but sees only
# packages of the environment itself.  If uv fails, or WITHOUT_UV is set, pip installs them, with
# EPIC_PIP_TRIES tries because networks fail.  If all tries fail, for example without a package index,
# it prints what is left out and returns 1.
# usage: install_packages ENVIRONMENT PIP-ARGUMENT...
install_packages() {
    environment=$1
    shift
    if install_with_uv "$@" >"$environment/pip.log" 2>&1; then return; fi
    for try in $(seq "${EPIC_PIP_TRIES:-3}"); do
        [ "$try" = 1 ] || sleep 10
        PIP_RETRIES=${PIP_RETRIES:-2} "$environment/bin/pip" install --quiet \
            --disable-pip-version-check "$@" >"$environment/pip.log" 2>&1 && return 0
    done
    missing="$missing $*"
    echo "left out: pip cannot install $* ($(tail -n 1 "$environment/pip.log"))"
    return 1
}

# uv does not read pip's configuration, so this passes the certificates and the index on. The cache of
# uv would only take space, because each environment needs other packages.
install_with_uv() {
    [ -z "${WITHOUT_UV-}" ] || return 1
    "$environment/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9 || return 1
    cert=${SSL_CERT_FILE:-$("$environment/bin/pip" config get global.cert 2>/dev/null || :)}
    index=${PIP_INDEX_URL:-$("$environment/bin/pip" config get global.index-url 2>/dev/null || :)}
    env ${cert:+SSL_CERT_FILE="$cert"} ${index:+UV_DEFAULT_INDEX="$index"} "$environment/bin/uv" \
        pip install --quiet --no-cache --python "$environment/bin/python" "$@"
}

# A user's machine may have no package index.  If the variable CI is set, that is an error.
check_missing() {
    [ -z "${CI-}" ] || [ -z "$missing" ] || {
        echo "CI is set, so what pip cannot install is an error:$missing"
        exit 1
    }
}
