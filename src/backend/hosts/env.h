/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the environment variables of backend hosts (docs/reference/environment.md). */
#ifndef EPIC_HOSTS_ENV_H
#define EPIC_HOSTS_ENV_H

#include "net/net.h"

/* Where inbox and outbox are to lie.  What nobody asks for is where all can have it. */
typedef enum hosts_memory {
    HOSTS_MEMORY_ANY,
    HOSTS_MEMORY_GPU,
    HOSTS_MEMORY_HOST
} hosts_memory;

typedef struct hosts_env {
    const net_engine *engine;
    hosts_memory memory;
    bool relays;     /* this rank's process may go by them */
    net_rdma rdma;   /* how rows travel, where the engine has a choice */
    int32_t window;  /* tokens that are sent before one is received */
    int32_t threads; /* of the net, beside its own; -1: as many as there are cores for */
} hosts_env;

/* A variable that says what it may not is EPIC_EINVAL, with its name. */
epic_result hosts_read_env(hosts_env *out);

/* Threads that the net of one of so many ranks on this host may have. */
int32_t hosts_env_threads(const hosts_env *env, int ranks);

/* EPIC_NET's engine; NULL, and the reason (NET_WHY_BYTES bytes): it is not there. */
const net_engine *hosts_env_engine(char *why);

/* What is no kind of memory asks for any. */
hosts_memory hosts_env_memory(void);

#endif
