/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the host and port of rank 0 of a Slurm step, from the variables that srun sets. */
#ifndef EPIC_ENV_H
#define EPIC_ENV_H

#include "bootstrap/bootstrap.h"

#define ENV_HOST 256
#define ENV_FIRST_PORT \
    10000 /* ports 10000 to 29999: systems do not use them for outgoing connections */
#define ENV_NUM_PORTS 20000

/* Sets `host` to the host of task 0, or to "" if all tasks run on this host. Errors:
 * EPIC_EINVAL. */
epic_result env_slurm_host(char host[ENV_HOST]);

/* Stores in *port the first port that Slurm reserved for the step. If Slurm reserved no port,
 * computes a port from a hash of job and step. The port is equal for all tasks of the step, and
 * usually differs from the ports of other steps. Errors: EPIC_EINVAL. */
epic_result env_slurm_port(uint32_t *port);

#endif
