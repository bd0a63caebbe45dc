#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the contents of a build folder, so that programs find EPIC at once, or prints what you must
# set for that. With --remove removes what the last installation from this folder wrote.
# usage: install.sh BUILD [PREFIX]
#        install.sh --remove BUILD
set -eu
to=${DESTDIR-}

refresh() { # updates the list of libraries of the dynamic loader
    if [ "$(id -u)" = 0 ] && [ -z "$to" ]; then /sbin/ldconfig; fi
}

if [ "$1" = --remove ]; then
    list=$2/installed
    [ -e "$list" ] || { echo "nothing was installed from $2: there is no $list" >&2; exit 1; }
    while read -r path; do
        rm -f "$to$path"
        echo "removed $to$path"
        folder=$(dirname "$to$path")
        case $folder in */epic | */epic-moe) rmdir "$folder" 2>/dev/null || true ;; esac
    done <"$list"
    rm "$list"
    refresh
    exit 0
fi

build=$1
prefix=${2:-$(sed -n 's/^CMAKE_INSTALL_PREFIX:PATH=//p' "$build/CMakeCache.txt")}
case $prefix in
/*) ;;
'~/'*) prefix=$HOME/${prefix#??} ;; # the shell does not expand ~ inside of prefix=...
*) prefix=$PWD/$prefix ;;
esac
above=$to$prefix
while [ ! -e "$above" ]; do above=$(dirname "$above"); done
if [ ! -w "$above" ]; then
    echo "$above cannot be written by $(id -un): sudo make install, or make install" \
        "prefix=$HOME/.local" >&2
    exit 1
fi
DESTDIR=$to cmake --install "$build" --prefix "$prefix"
{ cat "$build/install_manifest.txt"; echo; } | grep . >"$build/installed"
refresh

libdir=$(sed -n 's,/libepic\.so$,,p' "$build/installed")
echo "to build with it: cc program.c \$(pkg-config --cflags --libs epic)"
if [ -z "$to" ] && ! /sbin/ldconfig -p | grep -qF "$libdir/libepic.so.0"; then
    echo "the loader does not look into $libdir by itself:"
    echo "    export PKG_CONFIG_PATH=$libdir/pkgconfig LD_LIBRARY_PATH=$libdir"
fi
