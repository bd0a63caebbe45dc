#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A backend's library that lies beside libepic.so and cannot be loaded: the error says which file it
# is and what is wrong with it.
# usage: plugin.sh LIBRARY PROGRAM    the program opens the backend that EPIC_BACKEND says
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$1" "$folder/libepic.so.0"
echo "no library" >"$folder/libepic_cuda.so"
if said=$(LD_LIBRARY_PATH=$folder EPIC_BACKEND=p2p "$2" 2>&1); then
    echo "$2 ran: $said"
    exit 1
fi
echo "$said"
case $said in
*libepic_cuda.so*"$folder/libepic_cuda.so: "*) ;;
*) echo "the file is not named"; exit 1 ;;
esac
