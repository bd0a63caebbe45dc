/* SPDX-License-Identifier: Apache-2.0 */
/* Environment variables of the backend hosts (docs/reference/environment.md). */
#ifndef EPIC_HOSTS_ENV_H
#define EPIC_HOSTS_ENV_H

#include "net/net.h"

/* Where inbox and outbox (net/net.h) are. ANY: in GPU memory if all ranks can use it, otherwise
 * in host memory. */
typedef enum hosts_memory {
    HOSTS_MEMORY_ANY,
    HOSTS_MEMORY_GPU,
    HOSTS_MEMORY_HOST
} hosts_memory;

/* The values of all variables. */
typedef struct hosts_env {
    const net_engine *engine;
    hosts_memory memory;
    bool relays;   /* EPIC_NET_RELAY: send a row once to each host, and forward it there */
    net_rdma rdma; /* EPIC_NET_RDMA: how rows are sent */
    /* EPIC_NET_WINDOW: number of tokens that sending may be ahead of receiving */
    int32_t window;
    /* EPIC_NET_THREADS: threads of the net in addition to the proxy thread; -1: choose by the
     * number of cores */
    int32_t threads;
} hosts_env;

/* Reads all variables and loads the engine. Errors: EPIC_EINVAL names a variable with an
 * invalid value; EPIC_ENOTSUP: the engine cannot be loaded. */
epic_result hosts_read_env(hosts_env *out);

/* Returns how many additional threads the net of a rank may start if this host has `ranks`
 * ranks. */
int32_t hosts_env_threads(const hosts_env *env, int ranks);

/* Returns the engine that EPIC_NET names (default "ucx"). Returns NULL if it cannot be loaded,
 * and writes the reason to `why`, which has NET_WHY_BYTES bytes. */
const net_engine *hosts_env_engine(char *why);

/* Returns the value of EPIC_NET_MEMORY, or HOSTS_MEMORY_ANY if it is unset or invalid. */
hosts_memory hosts_env_memory(void);

#endif
