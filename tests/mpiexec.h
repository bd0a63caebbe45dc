/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that start mpiexec themselves. */
#ifndef MPIEXEC_H
#define MPIEXEC_H

#include <stdbool.h>

/* EPIC_MPIEXEC, or mpiexec. */
const char *mpiexec_name(void);

/* Does it have --enable-recovery, which keeps a job alive without one of its ranks? */
bool mpiexec_recovers(void);

/* Sets what lets any Open MPI start more ranks than cores, as root too. */
void mpiexec_permit(void);

#endif
