/* SPDX-License-Identifier: Apache-2.0 */
/* The switch between backends p2p and hosts: two libraries, compiled from the same sources.
 *
 * In p2p all ranks are on one host, and HOSTS is 0. In hosts some ranks are on other hosts, and
 * HOSTS is 1. This file alone reads the macro EPIC_HOSTS, which the build sets. All other files
 * test HOSTS in an ordinary `if`. So both libraries check all code, and in p2p the compiler
 * drops the code for other hosts.
 *
 * If only hosts needs a member of a struct, the member is an array of HOSTS elements, mostly
 * `net[HOSTS]`. In hosts the array has one element. In p2p it is empty, so the struct does not
 * grow. Standard C and C++ do not allow empty arrays, therefore `__extension__`. Code may read
 * such a member only where HOSTS is known to be 1. common/addressing.cuh has functions that
 * read some of these members and are valid in both libraries. */
#ifndef EPIC_KERNEL_HOSTS_H
#define EPIC_KERNEL_HOSTS_H

#ifdef EPIC_HOSTS
#define HOSTS 1
#else
#define HOSTS 0
#endif

#endif
