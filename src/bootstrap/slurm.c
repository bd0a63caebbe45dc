/* SPDX-License-Identifier: Apache-2.0 */
/* Reads Slurm's variables for a step: the list of its hosts, which begins with the host of task
 * 0, and the list of the ports reserved for the step. SLURM_LAUNCH_NODE_IPADDR is not used,
 * because it is the address of the host that runs srun. This host may be a login node. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "bootstrap/env.h"

static const char *get_first_set(const char *const *names, int count)
{
    for (int i = 0; i < count; i++) {
        const char *value = getenv(names[i]);
        if (value != NULL && value[0] != '\0') return value;
    }
    return NULL;
}

static bool append_bytes(char host[ENV_HOST], size_t *used, const char *text, size_t length)
{
    if (*used + length >= ENV_HOST) return false;
    memcpy(host + *used, text, length);
    *used += length;
    host[*used] = '\0';
    return true;
}

/* Copies the first host of a Slurm host list. For example, copies n1 from "n1,n2", n01 from
 * "n[01-04,07]", and a1b3-ib from "a[1-2]b[3-4]-ib". The first number in a bracket ends at "-",
 * "," or "]". Returns false if the list does not have this format. */
static bool copy_first_host(char host[ENV_HOST], const char *list)
{
    size_t used = 0;
    host[0] = '\0';
    for (const char *at = list; *at != '\0' && *at != ',';) {
        if (*at != '[') {
            if (!(isalnum((unsigned char)*at) || strchr("-._", *at) != NULL)) return false;
            if (!append_bytes(host, &used, at++, 1)) return false;
            continue;
        }
        const size_t digits = strspn(at + 1, "0123456789");
        const char *end = strchr(at, ']');
        if (digits == 0 || end == NULL || strchr("-,]", at[1 + digits]) == NULL) return false;
        if (!append_bytes(host, &used, at + 1, digits)) return false;
        at = end + 1;
    }
    return used > 0;
}

static bool is_one_node(void)
{
    static const char *const names[] = {"SLURM_STEP_NUM_NODES", "SLURM_NNODES",
                                        "SLURM_JOB_NUM_NODES"};
    const char *nodes = get_first_set(names, 3);
    return nodes != NULL && strcmp(nodes, "1") == 0;
}

epic_result env_slurm_host(char host[ENV_HOST])
{
    static const char *const names[] = {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST",
                                        "SLURM_NODELIST"};
    host[0] = '\0';
    if (is_one_node()) return EPIC_OK;
    const char *list = get_first_set(names, 3);
    if (list == NULL)
        return epic_fail(EPIC_EINVAL,
                         "SLURM_PROCID is set, and neither SLURM_STEP_NODELIST nor "
                         "MASTER_ADDR: set MASTER_ADDR to the host of task 0");
    if (copy_first_host(host, list)) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "SLURM_STEP_NODELIST is \"%.100s\", not a list of hosts as Slurm writes "
                     "it: set MASTER_ADDR to the host of task 0",
                     list);
}

epic_result env_slurm_port(uint32_t *port)
{
    static const char *const jobs[] = {"SLURM_JOB_ID", "SLURM_JOBID"};
    static const char *const steps[] = {"SLURM_STEP_ID", "SLURM_STEPID"};
    const char *reserved = getenv("SLURM_STEP_RESV_PORTS"); /* "12000-12003" */
    const long first = reserved != NULL ? strtol(reserved, NULL, 10) : 0;
    if (first > 0 && first <= 65535) {
        *port = (uint32_t)first;
        return EPIC_OK;
    }
    const char *job = get_first_set(jobs, 2), *step = get_first_set(steps, 2);
    if (job == NULL)
        return epic_fail(EPIC_EINVAL, "SLURM_PROCID is set, and neither SLURM_JOB_ID nor "
                                      "MASTER_PORT: set MASTER_PORT, a port free on the host "
                                      "of task 0");
    const uint64_t both = hash_join(hash_bytes(job, strlen(job)),
                                    step != NULL ? hash_bytes(step, strlen(step)) : 0);
    *port = ENV_FIRST_PORT + (uint32_t)(both % ENV_NUM_PORTS);
    return EPIC_OK;
}
