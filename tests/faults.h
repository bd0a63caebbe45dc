/* SPDX-License-Identifier: Apache-2.0 */
/* Things that go wrong on purpose, one in a group: what the others are told, when, and that a new
 * group works afterwards. */
#ifndef FAULTS_H
#define FAULTS_H

#include <stdbool.h>

/* The main of a fault test, with ranks as processes (shm) or threads.  `faults` of them, scaled,
 * several at a time. */
int faults_main(bool processes, int faults, int width);

#endif
