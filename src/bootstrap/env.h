/* SPDX-License-Identifier: Apache-2.0 */
/* The host and port of rank 0 for the tasks of a Slurm step, from the variables that srun
 * sets. */
#ifndef EPIC_ENV_H
#define EPIC_ENV_H

#include "bootstrap/bootstrap.h"

#define ENV_HOST 256
#define ENV_FIRST_PORT \
    10000 /* up to 29999, below the ports that systems use for outgoing connections */
#define ENV_NUM_PORTS 20000

/* Finds the host of task 0; "" if all tasks run on this host.  Errors: EPIC_EINVAL. */
epic_result env_slurm_host(char host[ENV_HOST]);

/* Derives a port from the job and the step: equal for all tasks of a step, and different, most
 * times, for other steps.  Errors: EPIC_EINVAL. */
epic_result env_slurm_port(uint32_t *port);

#endif
