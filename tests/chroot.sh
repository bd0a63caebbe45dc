#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs README's commands on a bare system: makes a chroot of a Debian or Ubuntu release, copies a clean
# clone into it, runs `make demo`, `make test`, `make install` and a program that uses the library.
# Needs root, debootstrap, git, util-linux, a network, 6 GB of disk, and the time of `make test`.
# usage: chroot.sh [SUITE]          default: bookworm
#   MIRROR=URL                      package mirror; default: the first one that apt uses here
#   KEYRING=FILE                    keys of the mirror; default: debootstrap's own choice
#   MAKE_TARGETS="demo setup-test test-gcc"    runs these targets only
#   BARE=FOLDER                     copies this system instead of calling debootstrap
#   DEB=FILE                        only installs this package there, tests it and removes it
set -eu
cd "$(dirname "$0")/.."
suite=${1:-bookworm}
targets=${MAKE_TARGETS:-demo test}

fail() {
    echo "chroot.sh: $*" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || fail "chroots are made by root: sudo make test-chroot"
for program in git unshare mountpoint; do
    command -v $program >/dev/null || fail "$program is needed"
done
# Runs again in namespaces of its own, so that its mounts and processes end with it.
if [ -z "${EPIC_TEST_CHROOT-}" ]; then
    export EPIC_TEST_CHROOT=1
    exec unshare --mount --pid --fork --kill-child "tests/chroot.sh" "$@"
fi

apt_mirror() { # reads both formats of apt's source lists
    cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | awk '
        $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^https?:/) { print $i; exit } }
        $1 == "URIs:" { print $2; exit }'
}

here=$(mktemp -d)
root=$here/root
trap 'umount -R "$root/dev" "$root/proc" "$root/sys" 2>/dev/null; rm -rf --one-file-system "$here"' EXIT
trap 'exit 1' HUP INT TERM

if [ -n "${BARE-}" ]; then
    cp -a "$BARE" "$root"
else
    command -v debootstrap >/dev/null || fail "debootstrap is needed: apt-get install debootstrap"
    mirror=${MIRROR:-$(apt_mirror)}
    [ -n "$mirror" ] || fail "apt's lists name no mirror: MIRROR=URL"
    # An old debootstrap has no script for new Ubuntu releases.  One script works for all of them.
    script=
    [ -e "/usr/share/debootstrap/scripts/$suite" ] || script=gutsy
    echo "== a bare $suite from $mirror"
    debootstrap --variant=minbase ${KEYRING:+--keyring="$KEYRING"} "$suite" "$root" "$mirror" \
        $script >"$here/log" 2>&1 || fail "debootstrap: $(tail -n 5 "$here/log")"
fi
if grep -q '^ID=ubuntu' "$root/etc/os-release"; then
    sed -i 's/ main$/ main universe/' "$root/etc/apt/sources.list"
fi

# The chroot gets only these devices.
mount -t tmpfs dev "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs shm "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 pts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys" # UCX looks for networks in /sys

# Copies this machine's network settings, so that apt and pip in the chroot reach the network.
cp /etc/resolv.conf /etc/hosts "$root/etc/"
reach=
for name in http_proxy https_proxy no_proxy PIP_INDEX_URL; do
    value=$(printenv $name) && reach="$reach $name=$value"
done
if [ -n "${PIP_CERT-}" ]; then # under a name that no package overwrites
    cp -L "$PIP_CERT" "$root/root/pip-cert.pem"
    reach="$reach PIP_CERT=/root/pip-cert.pem"
fi
inside() {
    chroot "$root" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive $reach sh -ec "cd /root; $1"
}

# Tests the package in a system without the build tree: its own programs, then a user's program.
try_package() {
    cp "$DEB" "$root/root/epic.deb"
    cp examples/step.c "$root/root/"
    echo "== $suite: $(basename "$DEB")"
    inside 'apt-get -qq update
        apt-get -qq install -y --no-install-recommends ./epic.deb
        dpkg -s epic-moe | grep -q "^Status: install ok installed"
        ! dpkg -L epic-moe | grep -q /root
        epic-info | grep "^backends  *self, threads, shm"
        epic-sim --help >/dev/null && epic-place --help >/dev/null && epic-trace --help >/dev/null
        [ -s /usr/share/doc/epic-moe/copyright ]' >"$here/log" 2>&1 ||
        fail "the package: $(tail -n 5 "$here/log")"
    inside 'apt-get -qq install -y --no-install-recommends gcc libc6-dev pkg-config
        gcc step.c $(pkg-config --cflags --libs epic) -o step
        EPIC_TRACE=/root/run ./step | grep "returned as 19"
        epic-trace show run && epic-trace replay run --ranks 3 && epic-place run --ranks 2' \
        >"$here/log" 2>&1 || fail "a program with the package: $(tail -n 5 "$here/log")"
    inside 'apt-get -qq purge -y epic-moe; find / -xdev -name "*epic*" -path "/usr/*"' \
        >"$here/log" 2>&1 || fail "removing the package: $(tail -n 5 "$here/log")"
    if grep '^/usr' "$here/log"; then fail "the package left these"; fi
    echo "== $suite: good: the package installs, works and goes"
}
if [ -n "${DEB-}" ]; then
    try_package
    exit 0
fi

git clone -q . "$root/root/epic"
# Installs only the packages that README asks for.
inside 'apt-get -qq update && apt-get -qq install -y --no-install-recommends gcc make' \
    >"$here/log" 2>&1 || fail "gcc and make: $(tail -n 5 "$here/log")"

for target in $targets; do
    echo "== $suite: make $target"
    { status=0; inside "cd epic && make $target" 2>&1 || status=$?; echo $status >"$here/status"; } |
        tee "$here/$target.log"
    [ "$(cat "$here/status")" = 0 ] || fail "make $target failed on $suite"
done

said() { # usage: said LOG WORDS; the log must contain the words
    grep -q -e "$2" "$here/$1.log" || fail "make $1 did not say: $2"
}
for target in $targets; do
    case $target in
    demo) said demo 'steps are equal to the last bit; .* are too$' ;;
    test | test-gcc)
        said $target ' emulated\.conformance\.4 \.* *Passed'
        said $target ' conformance\.mpi\.4 \.* *Passed'
        if grep -E '^( |left out: ).*(C\+\+ compiler|no MPI|mpiexec|OpenBLAS)' "$here/$target.log"; then
            fail "make $target left out what the set-up installs"
        fi
        ;;
    esac
    if [ $target = test ]; then said test '^== make test: all parts passed$'; fi
done

echo "== $suite: make install"
inside 'cd epic && make install' >"$here/log" 2>&1 || fail "make install: $(tail "$here/log")"
inside 'cc epic/examples/step.c -lepic -o step && ./step' || fail "a program with -lepic"
inside 'cd epic && make uninstall' >"$here/log" 2>&1 || fail "make uninstall: $(tail "$here/log")"
left=$(find "$root/usr/local" -name '*epic*')
[ -z "$left" ] || fail "make uninstall left $left"
echo "== $suite: good: $targets, install, uninstall"
