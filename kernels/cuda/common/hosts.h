/* SPDX-License-Identifier: Apache-2.0 */
/* The switch between backends p2p and hosts: two libraries, compiled from the same sources.
 *
 * In p2p all ranks are on one host, and HOSTS is 0. In hosts some ranks are on other hosts, and
 * HOSTS is 1. This file alone reads the macro EPIC_HOSTS, which the build sets. All other files
 * test HOSTS in an ordinary `if`. So both libraries check all code, and in p2p the compiler
 * drops the code for other hosts.
 *
 * Members of structs that only hosts needs are arrays of HOSTS elements, mostly `net[HOSTS]`:
 * of one element in hosts, and of none in p2p, where the struct then does not grow. C and C++
 * allow empty arrays only as an extension, therefore `__extension__`. Read such a member only
 * where HOSTS is known to be 1. common/addressing.cuh has functions that are valid in both
 * libraries. */
#ifndef EPIC_KERNEL_HOSTS_H
#define EPIC_KERNEL_HOSTS_H

#ifdef EPIC_HOSTS
#define HOSTS 1
#else
#define HOSTS 0
#endif

#endif
