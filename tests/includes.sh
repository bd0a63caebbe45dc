#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Includes point down only: every room may include itself and the rooms above it in this list, so
# there is no circle.  Rooms on one line are neighbours and do not know each other.
# usage: includes.sh ROOT
set -eu
export LC_ALL=C
cd "$1"
rooms='
include/epic
kernels/host
src/rules
kernels/cuda src/base
src/backend
src/backend/shared src/bootstrap
src/net
src/net/strands
src/backend/self src/backend/threads src/backend/shm src/backend/mpi src/backend/p2p src/net/ucx
src/backend/hosts
src/context
src/plan
src/exchange
src/steps
src/api
src/router src/experts
src/moe
src/dispatcher'
# kernels/kernels.h is the door of kernels/host.
find include src kernels -type f | grep -E '\.(c|h|cu|cuh)$' | sort | xargs grep -nE '^#include "' |
    awk -v rooms="$rooms" '
    BEGIN {
        count = split(rooms, lines, "\n")
        for (i = 1; i <= count; i++) {
            number = split(lines[i], names, " ")
            for (j = 1; j <= number; j++) level[names[j]] = i
        }
    }
    function room(path) {
        sub(/\/[^\/]*$/, "", path)
        return path == "kernels" ? "kernels/host" : path
    }
    {
        split($0, part, ":")
        from = room(part[1]); to = part[3]
        sub(/^#include "/, "", to); sub(/".*/, "", to)
        if (to ~ /^epic\//) to = "include/" to
        else if (to ~ /^(cuda|host)\//) to = "kernels/" to
        else if (to ~ /^kernels\//) ;
        else if (to ~ /\//) to = "src/" to
        else next # beside the file itself
        target = room(to); total++
        if (!(from in level)) { print part[1] ": its room " from " is not in the list"; wrong++ }
        else if (!(target in level)) { print part[1] ":" part[2] ": " to " is in no room of the list"; wrong++ }
        else if (from != target && level[target] >= level[from]) {
            print part[1] ":" part[2] ": " from " must not include " to; wrong++
        }
    }
    END {
        if (total < 100) { print "only " total + 0 " includes were found"; exit 1 }
        printf "%d includes, %d wrong\n", total, wrong
        exit wrong > 0
    }'
