/* SPDX-License-Identifier: Apache-2.0 */
/* Where the tasks of a Slurm step meet, from what srun tells them. */
#ifndef EPIC_ENV_H
#define EPIC_ENV_H

#include "bootstrap/bootstrap.h"

#define ENV_HOST 256
#define ENV_FIRST_PORT 10000 /* up to 29999: below the ports that systems hand out */
#define ENV_NUM_PORTS 20000

/* The host of task 0; "": they are all on this one. */
epic_result env_slurm_host(char host[ENV_HOST]);

/* A port that the tasks of this step share, and other steps hardly do. */
epic_result env_slurm_port(uint32_t *port);

#endif
