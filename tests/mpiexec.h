/* SPDX-License-Identifier: Apache-2.0 */
/* Functions for tests that start mpiexec themselves. */
#ifndef MPIEXEC_H
#define MPIEXEC_H

#include <stdbool.h>

/* Returns the variable EPIC_MPIEXEC, or "mpiexec". */
const char *mpiexec_name(void);

/* Returns whether mpiexec has --enable-recovery, which keeps a job alive when one rank ends. */
bool mpiexec_recovers(void);

/* Sets the variables that allow Open MPI to start more ranks than cores, and to run as root. */
void mpiexec_permit(void);

#endif
