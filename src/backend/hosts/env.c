/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/hosts/env.h"

#include <stdlib.h>
#include <string.h>

#include "base/cores.h"
#include "base/error.h"

#define MAX_THREADS 7         /* maximum value of EPIC_NET_THREADS */
#define DEFAULT_MAX_THREADS 6 /* maximum default of EPIC_NET_THREADS */
/* If the default of EPIC_NET_THREADS is not 0, it is at least this. It is never 1, because a
 * single net thread would only do the work of the proxy thread and would not be faster. */
#define DEFAULT_MIN_THREADS 2
/* by default a rank starts one net thread per this many of its cores (docs/lab/hosts.md) */
#define CORES_PER_THREAD 2

const net_engine *hosts_env_engine(char *why)
{
    const char *name = getenv("EPIC_NET");
    return net_find_engine(name && *name ? name : "ucx", why);
}

enum { SWITCH_OFF, SWITCH_ON, SWITCH_UNSET };

/* Reads a variable whose value is 0 or 1. The error text ends with `without`, which describes
 * what happens if the variable is unset. */
static epic_result read_switch(const char *name, const char *without, int *value)
{
    const char *text = getenv(name);
    *value = !text || !*text ? SWITCH_UNSET : *text == '0' ? SWITCH_OFF : SWITCH_ON;
    if (*value == SWITCH_UNSET || !strcmp(text, "0") || !strcmp(text, "1")) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "%s=%.32s: must be 0 or 1; without it %s", name, text,
                     without);
}

static epic_result read_rdma(net_rdma *rdma)
{
    int value;
    TRY(read_switch("EPIC_NET_RDMA", "remote writes are taken where they keep words whole",
                    &value));
    *rdma = value == SWITCH_UNSET ? NET_RDMA_IF_WHOLE
            : value == SWITCH_OFF ? NET_RDMA_NEVER
                                  : NET_RDMA_ALWAYS;
    return EPIC_OK;
}

/* Reads EPIC_NET_RELAY: whether rows may go through relays (hosts_env). Default: yes. */
static epic_result read_relays(bool *relays)
{
    int value;
    TRY(read_switch("EPIC_NET_RELAY", "rows go once to each host", &value));
    *relays = value != SWITCH_OFF;
    return EPIC_OK;
}

/* Reads a variable whose value is an integer from 0 to `most`. Sets *out to -1 if the variable
 * is not set. The error text contains `what` (the thing that the integer counts) and `without`
 * (what happens if the variable is not set). */
static epic_result read_number(const char *name, const char *what, const char *without,
                               int32_t most, int32_t *out)
{
    const char *text = getenv(name);
    char *end;
    *out = -1;
    if (!text || !*text) return EPIC_OK;
    const long number = strtol(text, &end, 10);
    if (end == text || *end || number < 0 || number > most)
        return epic_fail(EPIC_EINVAL,
                         "%s=%.32s: must be the number of %s, 0 to %d; without it %s", name,
                         text, what, most, without);
    *out = (int32_t)number;
    return EPIC_OK;
}

/* Reads EPIC_NET_WINDOW. The default is large, so that in most operations a rank sends all rows
 * before it receives the first row. This order keeps the net busy. */
static epic_result read_window(int32_t *window)
{
    TRY(read_number("EPIC_NET_WINDOW", "tokens that are sent before one is received", "8192",
                    INT32_MAX, window));
    if (*window < 0) *window = 8192;
    return EPIC_OK;
}

static epic_result read_threads(int32_t *threads)
{
    return read_number("EPIC_NET_THREADS", "threads of a rank's net in addition to its own",
                       "as many as there are cores for", MAX_THREADS, threads);
}

int32_t hosts_env_threads(const hosts_env *env, int ranks)
{
    const core_set cores = cores_of_thread();
    const int32_t some = cores_count(&cores) / ranks / CORES_PER_THREAD;
    if (env->threads >= 0) return env->threads;
    if (some < DEFAULT_MIN_THREADS) return 0;
    return some < DEFAULT_MAX_THREADS ? some : DEFAULT_MAX_THREADS;
}

hosts_memory hosts_env_memory(void)
{
    const char *text = getenv("EPIC_NET_MEMORY");
    if (!text) return HOSTS_MEMORY_ANY;
    return !strcmp(text, "gpu")    ? HOSTS_MEMORY_GPU
           : !strcmp(text, "host") ? HOSTS_MEMORY_HOST
                                   : HOSTS_MEMORY_ANY;
}

static epic_result read_memory(hosts_memory *memory)
{
    const char *text = getenv("EPIC_NET_MEMORY");
    *memory = hosts_env_memory();
    if (!text || !*text || *memory != HOSTS_MEMORY_ANY) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "EPIC_NET_MEMORY=%.32s: must be gpu or host; without it memory lies on "
                     "the GPU where all ranks can have it there",
                     text);
}

epic_result hosts_read_env(hosts_env *out)
{
    char why[NET_WHY_BYTES];
    TRY(read_relays(&out->relays));
    TRY(read_rdma(&out->rdma));
    TRY(read_window(&out->window));
    TRY(read_threads(&out->threads));
    TRY(read_memory(&out->memory));
    out->engine = hosts_env_engine(why);
    return out->engine ? EPIC_OK : epic_fail(EPIC_ENOTSUP, "%s", why);
}
