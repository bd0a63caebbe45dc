/* SPDX-License-Identifier: Apache-2.0 */
/* Defines HOSTS, which selects the backend that is compiled: 0 for p2p, 1 for hosts. Each
 * backend is a library of its own, compiled from the same sources.
 *
 * In the backend `p2p` all ranks are on one host. In the backend `hosts` some ranks are on
 * other hosts. For `hosts`, the build defines EPIC_HOSTS. Only this file reads EPIC_HOSTS. All
 * other files test HOSTS in an ordinary `if`. So the compiler checks all code in both builds,
 * and in `p2p` it removes the code for other hosts.
 *
 * A member of a struct that only the backend `hosts` needs is an array of HOSTS elements,
 * mostly `net[HOSTS]`. In `p2p` the array is empty, so the struct does not grow.
 * `__extension__` is necessary because standard C and C++ do not allow empty arrays. Only two
 * kinds of code may read such a member: code for HOSTS, and the functions of
 * common/addressing.cuh, which are valid in both libraries. */
#ifndef EPIC_KERNEL_HOSTS_H
#define EPIC_KERNEL_HOSTS_H

#ifdef EPIC_HOSTS
#define HOSTS 1
#else
#define HOSTS 0
#endif

#endif
