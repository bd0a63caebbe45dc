/* SPDX-License-Identifier: Apache-2.0 */
/* Environment variables of the backend `hosts` (docs/reference/environment.md). */
#ifndef EPIC_HOSTS_ENV_H
#define EPIC_HOSTS_ENV_H

#include "net/net.h"

/* Memory of the inbox and outbox (net/net.h). HOSTS_MEMORY_ANY: GPU memory if all ranks can use
 * it, host memory if not. */
typedef enum hosts_memory {
    HOSTS_MEMORY_ANY,
    HOSTS_MEMORY_GPU,
    HOSTS_MEMORY_HOST
} hosts_memory;

typedef struct hosts_env {
    const net_engine *engine;
    hosts_memory memory;
    /* value of EPIC_NET_RELAY. true: if several ranks of a host need a row, the row is sent
     * over the net once, to one rank of that host (the relay). The relay forwards the row to
     * the other ranks */
    bool relays;
    net_rdma rdma; /* value of EPIC_NET_RDMA: how puts are sent (net.h) */
    /* EPIC_NET_WINDOW: number of tokens that a kernel sends before it receives a token */
    int32_t window;
    /* EPIC_NET_THREADS: number of threads that the net may start in addition to the proxy
     * thread. -1: the variable is not set, and hosts_env_threads() chooses the number */
    int32_t threads;
} hosts_env;

/* Reads all environment variables and loads the network engine. Errors: EPIC_EINVAL if a
 * variable has an invalid value (the error text names the variable); EPIC_ENOTSUP if the
 * engine cannot be loaded. */
epic_result hosts_read_env(hosts_env *out);

/* Returns how many threads the net of a rank may start in addition to the proxy thread. `ranks`
 * is the number of ranks on this host. */
int32_t hosts_env_threads(const hosts_env *env, int ranks);

/* Returns the network engine that EPIC_NET names (default "ucx"). If the engine cannot be
 * loaded, returns NULL and writes the reason to `why`, which has NET_WHY_BYTES bytes. */
const net_engine *hosts_env_engine(char *why);

/* Returns the value of EPIC_NET_MEMORY, or HOSTS_MEMORY_ANY if it is unset or invalid. */
hosts_memory hosts_env_memory(void);

#endif
