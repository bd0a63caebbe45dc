/* SPDX-License-Identifier: Apache-2.0 */
/* Creates a bootstrap from the environment variables of launchers: torchrun, mpirun, srun and
 * others.
 *
 * A *claim* is the rank and the number of ranks that one launcher has set for this process.
 * read_claim() reads a claim, choose_claim() selects the launcher whose claim is used, and
 * find_endpoint() finds the address and port of rank 0. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bootstrap/env.h"

/* How much a launcher's variables are trusted if they contradict the variables of another
 * launcher. */
typedef enum trust {
    BY_HAND,  /* set by the user or torchrun, perhaps inside another launcher's job */
    LAUNCHER, /* set by a launcher of ranks; all launchers of this kind must agree */
    /* set by srun, or inherited from a batch script (is_slurm_task() finds out which) */
    SLURM,
    HINT /* may describe something other than the ranks of a group, so it is used last */
} trust;

typedef struct launcher {
    const char *rank;
    /* names of variables that may contain the number of ranks, or NULL; the first variable that
     * is set is used */
    const char *num_ranks[2];
    trust trust;
} launcher;

/* The known launchers. The first launcher whose variables are set is used. */
static const launcher launchers[] = {
    {"RANK", {"WORLD_SIZE"}, BY_HAND},
    {"OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_SIZE"}, LAUNCHER},
    {"PMI_RANK", {"PMI_SIZE"}, LAUNCHER}, /* MPICH, Intel MPI, Cray, srun --mpi=pmi2 */
    {"MV2_COMM_WORLD_RANK", {"MV2_COMM_WORLD_SIZE"}, LAUNCHER},
    {"MVP_COMM_WORLD_RANK", {"MVP_COMM_WORLD_SIZE"}, LAUNCHER},
    {"JSM_NAMESPACE_RANK", {"JSM_NAMESPACE_SIZE"}, LAUNCHER},
    {"FLUX_TASK_RANK", {"FLUX_JOB_SIZE"}, LAUNCHER},
    {"SLURM_PROCID", {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}, SLURM},
    {"PMIX_RANK", {NULL}, LAUNCHER}, /* prterun; srun --mpi=pmix sets it next to SLURM_PROCID */
    {"PALS_RANKID", {NULL}, LAUNCHER},
    {"ALPS_APP_PE", {NULL}, LAUNCHER},
    {"JOB_COMPLETION_INDEX", {NULL}, HINT}, /* Kubernetes */
};
#define NUM_LAUNCHERS (sizeof launchers / sizeof *launchers)

typedef struct claim {
    const launcher *by; /* the launcher; NULL: the launcher has set no variables */
    /* variable that contains num_ranks; NULL: num_ranks is unknown and has the value 0 */
    const char *size_name;
    int64_t rank, num_ranks;
} claim;

/* Reads a variable that must be a decimal integer from `least` to `most`. Does not change *out
 * if the variable is not set. */
static epic_result parse_integer(const char *name, int64_t least, int64_t most, int64_t *out)
{
    const char *text = getenv(name);
    int64_t value = 0;
    if (text == NULL) return EPIC_OK;
    bool good = text[0] != '\0';
    for (const char *at = text; *at != '\0' && good; at++) {
        good = *at >= '0' && *at <= '9';
        if (good) value = value * 10 + (*at - '0');
        good = good && value <= most;
    }
    if (!good || value < least)
        return epic_fail(EPIC_EINVAL, "%s is \"%.64s\": must be an integer from %lld to %lld",
                         name, text, (long long)least, (long long)most);
    *out = value;
    return EPIC_OK;
}

static const char *size_name_of(const launcher *l)
{
    for (int i = 0; i < 2; i++)
        if (l->num_ranks[i] != NULL && getenv(l->num_ranks[i]) != NULL) return l->num_ranks[i];
    return NULL;
}

static epic_result fail_half_set(const char *set, const char *missing)
{
    return epic_fail(EPIC_EINVAL, "%s is set and %s is not: set both", set, missing);
}

/* Returns true if srun started this process as a task. In a batch script Slurm also sets
 * SLURM_PROCID=0 and, with -n, SLURM_NTASKS. But only a task has a step id or a rank other than
 * 0. check_batch() handles a process in a batch script. */
static bool is_slurm_task(void)
{
    const char *rank = getenv("SLURM_PROCID");
    return getenv("SLURM_STEP_ID") != NULL || getenv("SLURM_STEPID") != NULL ||
           getenv("SLURM_STEP_NUM_TASKS") != NULL || (rank != NULL && strcmp(rank, "0") != 0);
}

/* Reads and checks the variables of launcher `l`. out->by stays NULL if none of these variables
 * is set. */
static epic_result read_claim(claim *out, const launcher *l)
{
    const char *size_name = size_name_of(l);
    *out = (claim){0};
    if (l->trust == SLURM && (getenv(l->rank) == NULL || !is_slurm_task())) return EPIC_OK;
    if (getenv(l->rank) == NULL && size_name == NULL) return EPIC_OK;
    if (getenv(l->rank) == NULL) return fail_half_set(size_name, l->rank);
    if (size_name == NULL && l->num_ranks[0] != NULL)
        return fail_half_set(l->rank, l->num_ranks[0]);
    *out = (claim){.by = l, .size_name = size_name};
    if (size_name != NULL)
        TRY(parse_integer(size_name, 1, BOOTSTRAP_MAX_RANKS, &out->num_ranks));
    const int64_t most = size_name != NULL ? out->num_ranks : BOOTSTRAP_MAX_RANKS;
    return parse_integer(l->rank, 0, most - 1, &out->rank);
}

static void describe_claim(char *out, size_t size, const claim *c)
{
    const int used = snprintf(out, size, "%s is %lld", c->by->rank, (long long)c->rank);
    if (c->size_name != NULL)
        snprintf(out + used, size - (size_t)used, " and %s is %lld", c->size_name,
                 (long long)c->num_ranks);
}

/* Returns true if the variables of two launchers contradict each other. `followed` is the claim
 * that the bootstrap would use. A launcher may start another launcher, so in general the ranks
 * and numbers of ranks may differ. They contradict each other only if `followed` has a single
 * rank and the other launcher has started several ranks. */
static bool is_contradiction(const claim *followed, const claim *other)
{
    const trust a = followed->by->trust, b = other->by->trust;
    if (b == HINT) return false;
    if (followed->num_ranks == 1 && (other->num_ranks > 1 || other->rank > 0)) return true;
    if (a == BY_HAND || b == SLURM || other->num_ranks == 1) return false;
    return followed->rank != other->rank ||
           (other->num_ranks != 0 && followed->num_ranks != other->num_ranks);
}

static epic_result refuse_contradiction(const claim *followed, const claim *other)
{
    char first[128], second[128];
    describe_claim(first, sizeof first, followed);
    describe_claim(second, sizeof second, other);
    return epic_fail(EPIC_EINVAL,
                     "%s, but %s: must agree; unset the variables that do not describe this "
                     "group, or use epic_bootstrap_tcp",
                     first, second);
}

/* Returns the error that a launcher has set a rank, but no launcher has set the number of
 * ranks. */
static epic_result refuse_unknown(const claim *c)
{
    return epic_fail(EPIC_EINVAL,
                     "%s is %lld, and no variable has the number of ranks: set RANK and "
                     "WORLD_SIZE, MASTER_ADDR and MASTER_PORT (RANK=0 WORLD_SIZE=1 for a group "
                     "of one), or use epic_bootstrap_mpi",
                     c->by->rank, (long long)c->rank);
}

/* Chooses the first launcher that has set the number of ranks, and checks that no other
 * launcher contradicts it. out->by is NULL if no launcher has set any variable. */
static epic_result choose_claim(claim *out, const claim *claims)
{
    const claim *first = NULL;
    *out = (claim){0};
    for (size_t i = 0; i < NUM_LAUNCHERS; i++) {
        if (claims[i].by == NULL) continue;
        if (first == NULL) first = &claims[i];
        if (out->by == NULL && claims[i].num_ranks > 0) *out = claims[i];
    }
    if (first == NULL) return EPIC_OK;
    if (out->by == NULL) return refuse_unknown(first);
    for (size_t i = 0; i < NUM_LAUNCHERS; i++)
        if (claims[i].by != NULL && claims[i].by != out->by &&
            is_contradiction(out, &claims[i]))
            return refuse_contradiction(out, &claims[i]);
    return EPIC_OK;
}

static epic_result check_is_set(const claim *c, const char *name)
{
    if (getenv(name) != NULL) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "%s is %lld and %s is not set: set MASTER_ADDR to the host of rank 0 and "
                     "MASTER_PORT to a port that is free there",
                     c->size_name, (long long)c->num_ranks, name);
}

/* Returns the port of the bootstrap for a given MASTER_PORT. The result is equal on all ranks.
 *
 * The port is MASTER_PORT, except under torchrun with TORCHELASTIC_USE_AGENT_STORE "True". In
 * that case the store of torchrun's agent listens at MASTER_PORT, so another port is computed
 * from MASTER_PORT. The computed port is below 30000, because systems do not use ports below
 * 30000 for outgoing connections. FACTOR and ENV_NUM_PORTS have no common divisor, so
 * neighboring MASTER_PORTs lead to distant ports. */
static int64_t derive_port(int64_t master_port)
{
    enum { FACTOR = 7919 };
    const char *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (master_port == 0 || agent == NULL || strcmp(agent, "True") != 0) return master_port;
    const int64_t port = ENV_FIRST_PORT + master_port * FACTOR % ENV_NUM_PORTS;
    return port != master_port ? port : port + 1;
}

/* Finds the address and port of rank 0.
 * - With RANK and WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.
 * - With an MPI launcher, only MASTER_PORT must be set, and MASTER_ADDR defaults to this host.
 * - With Slurm neither MASTER_ADDR nor MASTER_PORT needs to be set, because srun's variables
 *   contain hosts and ports. */
static epic_result find_endpoint(epic_tcp *tcp, char host[ENV_HOST], const claim *c)
{
    int64_t port = 0;
    TRY(parse_integer("MASTER_PORT", 1, 65535, &port));
    port = derive_port(port);
    tcp->address = getenv("MASTER_ADDR");
    tcp->port = (uint32_t)port;
    if (c->num_ranks == 1) return EPIC_OK;
    if (c->by->trust == SLURM) {
        if (tcp->address == NULL) TRY(env_slurm_host(host));
        if (tcp->address == NULL && host[0] != '\0') tcp->address = host;
        return port == 0 ? env_slurm_port(&tcp->port) : EPIC_OK;
    }
    TRY(check_is_set(c, "MASTER_PORT"));
    return c->by->trust == BY_HAND ? check_is_set(c, "MASTER_ADDR") : EPIC_OK;
}

/* Fills in *tcp from the claim `c` of the chosen launcher, and from the variables for address,
 * port, timeout and secret. */
static epic_result follow_claim(epic_tcp *tcp, char host[ENV_HOST], const claim *c)
{
    int64_t timeout_ms = 0;
    const char *patience =
        getenv("EPIC_TIMEOUT_MS"); /* an empty value counts as unset, as in epic_open() */
    if (patience != NULL && patience[0] != '\0')
        TRY(parse_integer("EPIC_TIMEOUT_MS", 1, UINT32_MAX, &timeout_ms));
    TRY(find_endpoint(tcp, host, c));
    tcp->rank = (int32_t)c->rank;
    tcp->num_ranks = (int32_t)c->num_ranks;
    tcp->timeout_ms = (uint32_t)timeout_ms;
    tcp->secret = getenv("EPIC_SECRET");
    return EPIC_OK;
}

/* Called for a process that no launcher has started. Returns an error if the process is in a
 * batch script or salloc shell of a job with several tasks. Without this error, the process
 * would silently form a group of one rank. */
static epic_result check_batch(void)
{
    int64_t num_tasks = 1;
    TRY(parse_integer("SLURM_NTASKS", 1, INT32_MAX, &num_tasks));
    if (num_tasks == 1) return EPIC_OK;
    return epic_fail(
        EPIC_EINVAL,
        "SLURM_NTASKS is %lld and this process is not a task of srun (SLURM_STEP_ID is not "
        "set): start the ranks with srun or mpirun, or set RANK=0 WORLD_SIZE=1 for "
        "a group of one",
        (long long)num_tasks);
}

/* Checks the environment of a process that no launcher started. Returns an error if MASTER_ADDR
 * or MASTER_PORT is set without a rank. */
static epic_result check_alone(void)
{
    static const char *const names[] = {"MASTER_ADDR", "MASTER_PORT"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i]) != NULL)
            return epic_fail(
                EPIC_EINVAL,
                "%s is set, and RANK and WORLD_SIZE are not: set them, or unset it "
                "for a bootstrap of one rank",
                names[i]);
    return check_batch();
}

epic_result epic_bootstrap_env(epic_bootstrap *out)
{
    epic_tcp tcp = {0};
    claim claims[NUM_LAUNCHERS], followed;
    char host[ENV_HOST];
    if (out == NULL)
        return epic_fail(EPIC_EINVAL, "out is NULL: pass an epic_bootstrap to fill in");
    /* makes *out valid for epic_bootstrap_close(), even if this function returns an error */
    *out = (epic_bootstrap){0};
    for (size_t i = 0; i < NUM_LAUNCHERS; i++) TRY(read_claim(&claims[i], &launchers[i]));
    TRY(choose_claim(&followed, claims));
    TRY(followed.by != NULL ? follow_claim(&tcp, host, &followed) : check_alone());
    if (tcp.num_ranks > 1) return epic_bootstrap_tcp(out, &tcp);
    epic_bootstrap_of_one(out);
    return EPIC_OK;
}
