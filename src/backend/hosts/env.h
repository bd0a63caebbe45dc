/* SPDX-License-Identifier: Apache-2.0 */
/* Environment variables of the backend hosts (docs/reference/environment.md). */
#ifndef EPIC_HOSTS_ENV_H
#define EPIC_HOSTS_ENV_H

#include "net/net.h"

/* The memory of inbox and outbox. ANY: on the GPU if all ranks can, else in host memory. */
typedef enum hosts_memory {
    HOSTS_MEMORY_ANY,
    HOSTS_MEMORY_GPU,
    HOSTS_MEMORY_HOST
} hosts_memory;

/* The values of all variables. */
typedef struct hosts_env {
    const net_engine *engine;
    hosts_memory memory;
    bool relays;    /* EPIC_NET_RELAY: rows may cross once per host */
    net_rdma rdma;  /* EPIC_NET_RDMA: how rows travel */
    int32_t window; /* EPIC_NET_WINDOW: tokens to send before the first one is received */
    /* EPIC_NET_THREADS: threads in addition to the proxy thread; -1: choose by the number of
     * cores */
    int32_t threads;
} hosts_env;

/* Reads all variables. Errors: EPIC_EINVAL names a variable with an invalid value;
 * EPIC_ENOTSUP: the engine cannot be loaded. */
epic_result hosts_read_env(hosts_env *out);

/* Returns how many threads the net of a rank may start, with `ranks` ranks on this host. */
int32_t hosts_env_threads(const hosts_env *env, int ranks);

/* Returns the engine that EPIC_NET names, or NULL with the reason in `why` (NET_WHY_BYTES
 * bytes). */
const net_engine *hosts_env_engine(char *why);

/* Returns EPIC_NET_MEMORY; HOSTS_MEMORY_ANY if it is unset or invalid. */
hosts_memory hosts_env_memory(void);

#endif
