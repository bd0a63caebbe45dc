/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/mpi/group.h"
#include "base/deadline.h"
#include "base/error.h"

#define SENTENCE 256
#define CREATE_TAGS 32768 /* number of tags that MPI guarantees: 0 to 32767 */
#define CANCEL_NS 20000000
#define SETTLE_NS 100000000
#define FLUSH_NAP_NS 100000

/* Returns the number of ranks that mpirun started, or 0 if it did not start this process. */
static int launched_ranks(void)
{
    const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value) return atoi(value);
    }
    return 0;
}

static MPI_Comm parent_of(const epic_config *config)
{
    return config->native ? *(const MPI_Comm *)config->native : MPI_COMM_WORLD;
}

/* Returns whether two of the ranks are threads of one process, which backend mpi does not
 * support. If so, writes the two ranks and the reason to `why`. */
static bool find_threads(const epic_peer *peers, int num_ranks, char *why)
{
    for (int a = 0; a < num_ranks; a++)
        for (int b = a + 1; b < num_ranks; b++) {
            if (memcmp(peers[a].process, peers[b].process, sizeof peers[a].process) != 0)
                continue;
            snprintf(why, SENTENCE,
                     "ranks %d and %d are threads of one process; MPI joins "
                     "processes",
                     a, b);
            return true;
        }
    return false;
}

/* Returns whether the communicator is valid and has at least num_ranks ranks. If not, writes
 * the reason to `why`. */
static bool fits_started(const epic_config *config, int num_ranks, char *why)
{
    const MPI_Comm parent = parent_of(config);
    int size = 0;
    if (!bootstrap_can_use(parent, "config.native", why, SENTENCE)) return false;
    MPI_Comm_size(parent, &size);
    if (num_ranks <= size) return true;
    snprintf(why, SENTENCE, "%s has %d ranks, the bootstrap %d",
             config->native ? "the communicator of config.native" : "MPI_COMM_WORLD", size,
             num_ranks);
    return false;
}

/* Implements epic_backend.can_join. MPI must be initialized, or mpirun must have started
 * exactly these ranks. No two ranks may be in one process. */
bool mpi_can_join(const epic_peer *peers, int num_ranks, const epic_config *config, char *why)
{
    int initialized = 0, finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (finalized) {
        snprintf(why, SENTENCE, "MPI_Finalize was called");
        return false;
    }
    if (find_threads(peers, num_ranks, why)) return false;
    if (initialized) return fits_started(config, num_ranks, why);
    if (config->native) {
        snprintf(why, SENTENCE,
                 "config.native is set but MPI is not initialized; call "
                 "MPI_Init_thread first");
        return false;
    }
    const int launched = launched_ranks();
    /* MPI is not initialized yet, but each of these ranks will initialize it when it joins. */
    if (launched == num_ranks) return true;
    if (launched)
        snprintf(why, SENTENCE,
                 "mpirun started %d ranks, the bootstrap has %d, and MPI is not "
                 "initialized",
                 launched, num_ranks);
    else
        snprintf(why, SENTENCE, "not started by mpirun, and MPI is not initialized");
    return false;
}

/* The data that a rank sends through the bootstrap before the first collective MPI call. */
typedef struct join_info {
    int32_t result;
    int32_t parent_rank, parent_size;
    int32_t native;
    uint64_t job;
    core_set cores;
} join_info;

/* Returns a hash (FNV-1a) of the name of the MPI job, so that check_infos() can detect ranks of
 * different jobs. */
static uint64_t job_id(void)
{
    const char *name = getenv("PMIX_NAMESPACE");
    uint64_t hash = 14695981039346656037u;
    for (; name && *name; name++) hash = (hash ^ (unsigned char)*name) * 1099511628211u;
    return hash;
}

/* Performs the part of joining that needs no other rank: starts MPI, checks the communicator,
 * allocates the group. Fills in *mine for the gather. */
static epic_result prepare_rank(const epic_join *join, epic_group **group, join_info *mine)
{
    *mine = (join_info){
        .native = join->config->native != NULL, .job = job_id(), .cores = cores_of_thread()};
    TRY(lifecycle_start());
    char why[SENTENCE];
    if (!fits_started(join->config, join->bootstrap->num_ranks, why))
        return epic_fail(EPIC_EINVAL, "backend mpi: %s", why);
    const MPI_Comm parent = parent_of(join->config);
    MPI_Comm_rank(parent, &mine->parent_rank);
    MPI_Comm_size(parent, &mine->parent_size);
    TRY(tables_make(group, join->config, join->bootstrap->rank, join->bootstrap->num_ranks));
    return drain_start(*group);
}

/* Checks the infos of all ranks: every rank must have succeeded so far, and the ranks must be
 * different ranks of one communicator. */
static epic_result check_infos(const join_info *infos, int num_ranks)
{
    uint32_t taken[(1 << 20) / 32] = {0};
    for (int r = 0; r < num_ranks; r++) {
        const join_info *o = &infos[r];
        if (o->result != EPIC_OK)
            return epic_fail((epic_result)o->result, "backend mpi: rank %d could not join (%s)",
                             r, epic_result_name((epic_result)o->result));
        if (o->native != infos->native)
            return epic_fail(EPIC_EINVAL, "config.native is set on rank %d and not on rank %d",
                             o->native ? r : 0, o->native ? 0 : r);
        if (o->job != infos->job || o->parent_size != infos->parent_size)
            return epic_fail(EPIC_EINVAL, "ranks 0 and %d are not of one MPI communicator", r);
        if (o->parent_rank < 0 || o->parent_rank >= 1 << 20)
            return epic_fail(EPIC_ENOTSUP,
                             "rank %d is number %d of its communicator; backend "
                             "mpi reaches %d",
                             r, o->parent_rank, (1 << 20) - 1);
        const uint32_t bit = 1u << (o->parent_rank % 32);
        if (taken[o->parent_rank / 32] & bit)
            return epic_fail(EPIC_EINVAL,
                             "two ranks of the bootstrap, one of them %d, are number "
                             "%d of the MPI communicator",
                             r, o->parent_rank);
        taken[o->parent_rank / 32] |= bit;
    }
    return EPIC_OK;
}

/* Returns whether this host has at least one core for each of its ranks. Counts only the cores
 * on which any of these ranks may run. If there are fewer cores, ranks share cores, so a
 * waiting rank must yield its core. */
static bool find_core_per_rank(const epic_join *join, const join_info *infos)
{
    const epic_peer *mine = &join->peers[join->bootstrap->rank];
    core_set any = {{0}};
    int ranks = 0;
    for (int r = 0; r < join->bootstrap->num_ranks; r++) {
        if (memcmp(join->peers[r].host, mine->host, sizeof mine->host) != 0) continue;
        ranks++;
        for (int w = 0; w < CORE_WORDS; w++) any.words[w] |= infos[r].cores.words[w];
    }
    return cores_count(&any) >= ranks;
}

/* Creates a communicator of the group's ranks, in the bootstrap's order. The other ranks of the
 * MPI job do not take part. */
static epic_result make_connections(epic_group *group, const epic_join *join,
                                    const join_info *infos)
{
    const MPI_Comm parent = parent_of(join->config);
    int ranks[EPIC_MAX_RANKS];
    for (int r = 0; r < group->num_ranks; r++) ranks[r] = infos[r].parent_rank;
    MPI_Group all = MPI_GROUP_NULL, ours = MPI_GROUP_NULL;
    int code = MPI_Comm_group(parent, &all);
    if (code == MPI_SUCCESS) code = MPI_Group_incl(all, group->num_ranks, ranks, &ours);
    if (all != MPI_GROUP_NULL) MPI_Group_free(&all);
    if (code != MPI_SUCCESS) return runtime_fail(code, "MPI_Group_incl");
    group->has_core_per_rank = find_core_per_rank(join, infos);
    liveness_watch(group, join->peers);
    const epic_result result =
        create_comm(group, parent, ours, (int)(join->group_id % (CREATE_TAGS - 1)));
    /* if MPI_Comm_create_group has not returned (create.c), MPI may still read `ours`, so do
     * not free it */
    if (group->comm == MPI_COMM_NULL) return result;
    MPI_Group_free(&ours);
    MPI_Comm_set_errhandler(group->comm, MPI_ERRORS_RETURN);
    return result == EPIC_OK ? control_start(group) : result;
}

static void discard_group(epic_group *group)
{
    if (!group) return;
    drain_stop(group);
    liveness_unwatch(group);
    tables_free(group);
}

/* Locks the mutex and calls make_connections(). The mutex may be held during the collective MPI
 * call, because all peers make this call at about the same time, so the call does not take
 * long. */
static epic_result connect_locked(epic_group *group, const epic_join *join,
                                  const join_info *infos)
{
    pthread_mutex_lock(group->mutex);
    const epic_result result = make_connections(group, join, infos);
    pthread_mutex_unlock(group->mutex);
    return result;
}

/* Joins the group. Collective. A rank that failed still takes part in the gather, so that all
 * ranks return an error. */
epic_result mpi_join(epic_group **out, const epic_join *join)
{
    const int num_ranks = join->bootstrap->num_ranks;
    join_info mine, infos[EPIC_MAX_RANKS];
    epic_group *group = NULL;
    char sentence[SENTENCE];
    epic_result result = prepare_rank(join, &group, &mine);
    mine.result = (int32_t)result;
    snprintf(sentence, sizeof sentence, "%s", epic_error(NULL));
    const epic_result met =
        join->bootstrap->gather(join->bootstrap->self, &mine, infos, sizeof mine);
    if (result != EPIC_OK) epic_fail(result, "%s", sentence);
    if (result == EPIC_OK) result = met;
    if (result == EPIC_OK) result = check_infos(infos, num_ranks);
    if (result != EPIC_OK) {
        discard_group(group);
        return result;
    }
    result = connect_locked(group, join, infos);
    if (group->comm == MPI_COMM_NULL) {
        discard_group(group);
        return result;
    }
    lifecycle_add_open();
    if (result != EPIC_OK)
        mpi_leave(group);
    else
        *out = group;
    return result;
}

/* Returns whether a peer's process exited at least SETTLE_NS ago without a close message. The
 * time is needed because the close message may arrive after the exit of the process. *since is
 * the time at which the first dead peer was found, or 0. */
static bool has_dead_peer(epic_group *group, int64_t *since)
{
    const int64_t now = clock_ns();
    liveness_check(group, now);
    for (int r = 0; r < group->num_ranks; r++)
        if (!group->peers[r].closed && liveness_is_gone(group, r)) {
            if (!*since) *since = now;
            return now - *since >= SETTLE_NS;
        }
    return false;
}

/* Polls until MPI has sent all messages of this rank. Returns false if the group is broken, if
 * a peer has died, or if the deadline has passed. */
static bool flush_messages(epic_group *group)
{
    deadline end = deadline_begin_ms((uint64_t)(group->timeout_ns / 1000000));
    int64_t dead_since = 0;
    for (;;) {
        pthread_mutex_lock(group->mutex);
        if (!is_broken(group)) progress_control(group);
        if (!is_broken(group)) progress_drain(group);
        const bool broken = is_broken(group);
        const bool done = !broken && group->num_draining == 0 && control_is_sent(group);
        const bool over = broken || has_dead_peer(group, &dead_since) ||
                          deadline_before_nap(&end, FLUSH_NAP_NS);
        pthread_mutex_unlock(group->mutex);
        if (done) return true;
        if (over) return false;
        runtime_nap(FLUSH_NAP_NS);
    }
}

/* Polls the requests of all op slots. Returns whether all are complete. */
static bool test_slots(epic_group *group)
{
    int idle = 1;
    for (int i = 0; idle && i < group->num_slots; i++) {
        op_slot *slot = &group->slots[i];
        const int code = MPI_Testall(group->num_ranks * NUM_REQUESTS, slot->requests, &idle,
                                     MPI_STATUSES_IGNORE);
        if (code != MPI_SUCCESS) return false;
    }
    return idle;
}

/* Cancels the receives for which no message will arrive, and waits at most CANCEL_NS for all
 * requests. Returns false if some requests are still pending. In this case MPI may still access
 * the rings, so the rings must not be freed. */
static bool cancel_requests(epic_group *group)
{
    pthread_mutex_lock(group->mutex);
    for (int i = 0; i < group->num_slots; i++)
        for (int q = 0; q < group->num_ranks * NUM_REQUESTS; q++) {
            MPI_Request *request = &group->slots[i].requests[q];
            if (q % NUM_REQUESTS >= REQUEST_RECEIVE && *request != MPI_REQUEST_NULL)
                MPI_Cancel(request);
        }
    bool idle;
    const int64_t end = clock_ns() + CANCEL_NS;
    while (!(idle = test_slots(group)) && clock_ns() < end) sched_yield();
    pthread_mutex_unlock(group->mutex);
    return idle;
}

/* Breaks the group, because a peer died or did not receive rows before the deadline. The
 * communicator of a broken group is never freed, so that MPI cannot reuse its id and deliver
 * delayed messages of this group to another group. */
static void break_with_timeout(epic_group *group)
{
    const epic_failure_info failure = {.result = EPIC_ETIMEOUT,
                                       .rank = group->rank,
                                       .sentence = "a rank closed while a peer had not "
                                                   "fetched its rows; open a new group"};
    progress_break_group(group, &failure);
}

/* Leaves the group: sends the close message, waits until MPI no longer needs this rank's
 * memory, and frees the rings. lifecycle.c keeps the communicator until all peers have left. */
void mpi_leave(epic_group *group)
{
    const bool up = runtime_is_up();
    bool idle = false;
    if (up) {
        pthread_mutex_lock(group->mutex);
        control_close(group);
        pthread_mutex_unlock(group->mutex);
        idle = flush_messages(group);
        if (!idle && !is_broken(group)) break_with_timeout(group);
    }
    drain_stop(group);
    if (up && !idle) idle = cancel_requests(group);
    tables_release_rings(group, !idle);
    liveness_unwatch(group);
    lifecycle_retire(group);
}
