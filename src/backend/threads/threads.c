/* SPDX-License-Identifier: Apache-2.0 */
/* The backend threads: ranks are threads of one process.
 *
 * The first rank that joins maps the segment (the memory that all ranks access,
 * backend/shared), and the last rank that leaves unmaps it. A rank finds its group by the
 * group's id in process_groups, a global list of this process. Ranks do not send the segment's
 * address through the bootstrap, because another program that can connect to the bootstrap
 * could send a false address. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/shared/shared.h"
#include "backend/threads/mailbox.h"
#include "base/error.h"
#include "base/process.h"

/* One generation of a group of this process: the group between two changes of its members. It
 * exists from the join of its first rank to the leave of its last rank. */
typedef struct thread_group {
    struct thread_group *next;
    uint64_t group_id;
    shared_layout layout;
    char *segment;
    mailbox *mail;  /* the mailbox that all generations of the group share */
    int num_joined; /* number of ranks that have joined and not left */
    int num_seen; /* number of ranks that have joined so far, including ranks that have left */
    /* [rank]: true if the rank has ever joined; a second join of a rank is an error */
    bool seen[EPIC_MAX_RANKS];
} thread_group;

/* Implements epic_backend.can_join: all ranks must be threads of one process that use the same
 * copy of the library. */
static bool can_join(const epic_peer *peers, int num_ranks, const epic_config *config,
                     char *why)
{
    (void)config;
    for (int r = 1; r < num_ranks; r++) {
        if (memcmp(peers[r].process, peers[0].process, sizeof peers[0].process) != 0) {
            snprintf(
                why, 256,
                "threads needs ranks of one process; ranks 0 and %d are different processes",
                r);
            return false;
        }
        if (peers[r].library == peers[0].library) continue;
        snprintf(
            why, 256,
            "threads needs ranks that share one copy of libepic; ranks 0 and %d have loaded "
            "different copies",
            r);
        return false;
    }
    return true;
}

/* The generations of the group that a rank has joined. */
typedef struct thread_seat {
    thread_group *current;
    thread_group *prepared; /* the next generation; NULL: none is prepared */
} thread_seat;

/* Creates a generation: maps its segment and adds it to the list. `mail` is the mailbox of the
 * previous generation, or NULL if there is none. Returns NULL after an error. */
static thread_group *new_thread_group(const shared_layout *layout, uint64_t group_id,
                                      mailbox *mail)
{
    thread_group *h = calloc(1, sizeof *h);
    if (mail)
        mailbox_retain(mail);
    else
        mail = mailbox_new(layout->num_ranks);
    char *segment = mmap(NULL, (size_t)layout->segment_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!h || !mail || segment == MAP_FAILED) {
        if (segment != MAP_FAILED) munmap(segment, (size_t)layout->segment_bytes);
        if (mail) mailbox_release(mail);
        free(h);
        epic_fail(EPIC_ENOMEM,
                  "threads: no address space for %lld bytes shared by the ranks; lower "
                  "config.max_in_flight or config.staging_bytes",
                  (long long)layout->segment_bytes);
        return NULL;
    }
    shared_segment_init(segment, layout, group_id);
    *h = (thread_group){.next = process_groups.first,
                        .group_id = group_id,
                        .layout = *layout,
                        .segment = segment,
                        .mail = mail};
    return process_groups.first = h;
}

static thread_group *find_thread_group(uint64_t group_id)
{
    thread_group *h = process_groups.first;
    while (h && h->group_id != group_id) h = h->next;
    return h;
}

/* Finds the generation group_id in the list, or creates it with the mailbox `mail` (see
 * new_thread_group()). Adds this rank to num_joined. The caller holds the mutex. */
static epic_result join_locked(thread_group **out, const shared_layout *layout,
                               uint64_t group_id, int rank, mailbox *mail)
{
    thread_group *h = find_thread_group(group_id);
    if (!h) h = new_thread_group(layout, group_id, mail);
    if (!h) return EPIC_ENOMEM;
    if (memcmp(&h->layout, layout, sizeof *layout) != 0 || h->seen[rank])
        return epic_fail(EPIC_EPEER,
                         "threads: rank %d has joined this group already: the bootstrap mixed "
                         "two groups; open only one group from each bootstrap",
                         rank);
    h->seen[rank] = true;
    h->num_seen++;
    h->num_joined++;
    *out = h;
    return EPIC_OK;
}

static epic_result join_thread_group(thread_group **out, const shared_layout *layout,
                                     uint64_t group_id, int rank, mailbox *mail)
{
    pthread_mutex_lock(&process_groups.mutex);
    const epic_result result = join_locked(out, layout, group_id, rank, mail);
    pthread_mutex_unlock(&process_groups.mutex);
    return result;
}

/* Removes one rank from its generation. The rank must not access the segment after this call.
 * The last rank unmaps the segment. */
static void leave_thread_group(thread_group *h)
{
    pthread_mutex_lock(&process_groups.mutex);
    if (--h->num_joined == 0) {
        thread_group **link = &process_groups.first;
        while (*link != h) link = &(*link)->next;
        *link = h->next;
        munmap(h->segment, (size_t)h->layout.segment_bytes);
        mailbox_release(h->mail);
        free(h);
    }
    pthread_mutex_unlock(&process_groups.mutex);
}

/* Gathers the results of joining from all ranks. `entered` is the result of this rank. If it is
 * an error, returns this error. If another rank failed, returns EPIC_EPEER. */
static epic_result gather_results(const epic_join *join, epic_result entered)
{
    const epic_bootstrap *bootstrap = join->bootstrap;
    const uint64_t mine = entered == EPIC_OK;
    uint64_t all[EPIC_MAX_RANKS];
    TRY(bootstrap->gather(bootstrap->self, &mine, all, sizeof mine));
    for (int r = 0; r < bootstrap->num_ranks && entered == EPIC_OK; r++)
        if (all[r] != 1) return epic_fail(EPIC_EPEER, "threads: rank %d could not join", r);
    return entered;
}

/* Checks that all ranks have joined in this process, because a faulty bootstrap may have
 * reported ranks that do not exist. */
static epic_result check_all_joined(const thread_group *h)
{
    pthread_mutex_lock(&process_groups.mutex);
    const int num_seen = h->num_seen;
    pthread_mutex_unlock(&process_groups.mutex);
    if (num_seen == h->layout.num_ranks) return EPIC_OK;
    return epic_fail(EPIC_EPEER,
                     "threads: %d of the %d ranks are in this process: the bootstrap "
                     "reported ranks that do not exist",
                     num_seen, h->layout.num_ranks);
}

/* Returns whether the rank on a seat (rank number) has closed its context, in any generation.
 * The mailbox has this flag, because a rank that never enters a generation cannot set a flag in
 * that generation's segment. */
static bool threads_is_gone(epic_group *group, int seat)
{
    const thread_seat *own = group->backend_data;
    return mailbox_is_gone(own->current->mail, seat);
}

/* Joins the group. Collective: a rank that failed also takes part in the gather, so that its
 * peers do not wait for it. */
static epic_result threads_join(epic_group **out, const epic_join *join)
{
    shared_layout layout;
    thread_group *h = NULL;
    thread_seat *seat = calloc(1, sizeof *seat);
    epic_result result = seat ? shared_layout_of(join->config, &layout)
                              : epic_fail(EPIC_ENOMEM, "threads: no memory");
    if (result == EPIC_OK)
        result = join_thread_group(&h, &layout, join->group_id, join->bootstrap->rank, NULL);
    result = gather_results(join, result);
    if (result == EPIC_OK) result = check_all_joined(h);
    if (result == EPIC_OK) result = shared_group_new(out, join, &layout, h->segment, false);
    if (result != EPIC_OK) {
        if (h) leave_thread_group(h);
        free(seat);
        return result;
    }
    seat->current = h;
    (*out)->backend_data = seat;
    (*out)->is_dead = threads_is_gone;
    return EPIC_OK;
}

/* Called in a forked child: frees this rank's view of the group. Takes no lock, because a
 * thread that does not exist in the child may have held it at the fork. The segment stays
 * mapped until the child exits, because other contexts of the child may point to it. */
static void threads_forget(epic_group *group)
{
    free(group->backend_data);
    shared_group_free(group);
}

static void threads_leave(epic_group *group)
{
    thread_seat *seat = group->backend_data;
    const seat_set members = group->members;
    shared_group_close(group);
    if (seat->prepared) {
        /* Other members may enter the prepared generation, so its segment too must show that
         * this rank has closed. */
        shared_group_enter(group, seat->prepared->segment, &members);
        shared_group_close(group);
        leave_thread_group(seat->prepared);
    }
    thread_group *current = seat->current;
    mailbox_mark_gone(current->mail, group->rank);
    threads_forget(group);
    leave_thread_group(current);
}

static void threads_send(epic_group *group, int to, const void *message, size_t bytes,
                         uint64_t group_id)
{
    (void)group_id;
    const thread_seat *seat = group->backend_data;
    mailbox_send(seat->current->mail, group->rank, to, message, bytes);
}

static bool threads_receive(epic_group *group, int *from, void *message, size_t bytes,
                            uint32_t ms)
{
    const thread_seat *seat = group->backend_data;
    return mailbox_receive(seat->current->mail, group->rank, from, message, bytes, ms);
}

static epic_result threads_prepare(epic_group *group, uint64_t group_id)
{
    thread_seat *seat = group->backend_data;
    if (seat->prepared && seat->prepared->group_id == group_id) return EPIC_OK;
    if (seat->prepared) leave_thread_group(seat->prepared);
    seat->prepared = NULL;
    return join_thread_group(&seat->prepared, &group->layout, group_id, group->rank,
                             seat->current->mail);
}

static epic_result threads_enter(epic_group *group, const seat_set *members)
{
    thread_seat *seat = group->backend_data;
    shared_group_enter(group, seat->prepared->segment, members);
    leave_thread_group(seat->current);
    seat->current = seat->prepared;
    seat->prepared = NULL;
    return EPIC_OK;
}

static const epic_regroup_transport regroup = {.send = threads_send,
                                               .receive = threads_receive,
                                               .is_gone = threads_is_gone,
                                               .prepare = threads_prepare,
                                               .enter = threads_enter};

/* Implements epic_window_transport.offer. The peers are threads of this process, so the handle
 * is the address of the memory. The op header that contains the handle never leaves this
 * process. */
static epic_result threads_offer(epic_group *group, epic_window_memory *memory,
                                 unsigned char *handle)
{
    (void)group;
    if (!memory->data) {
        void *data = mmap(NULL, (size_t)memory->bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED)
            return epic_fail(EPIC_ENOMEM, "bytes is %lld: %s%s; pass less",
                             (long long)memory->bytes, strerror(errno), epic_remedy(errno));
        memory->data = data;
    }
    memcpy(handle, &memory->data, sizeof memory->data);
    return EPIC_OK;
}

static epic_result threads_map(epic_group *group, int peer, const unsigned char *handle,
                               int64_t bytes, void **at)
{
    (void)group, (void)peer, (void)bytes;
    memcpy(at, handle, sizeof *at);
    return EPIC_OK;
}

static void threads_unmap(epic_group *group, void *at, int64_t bytes)
{
    (void)group, (void)at, (void)bytes;
}

static const epic_window_transport windows = {.offer = threads_offer,
                                              .map = threads_map,
                                              .unmap = threads_unmap,
                                              .begin_stores = shared_begin_stores,
                                              .end_stores = shared_end_stores,
                                              .may_store = shared_may_store,
                                              .close = shared_close_windows};

static const epic_transport transport =
    SHARED_TRANSPORT(&windows, &regroup, shared_set_members);

const epic_backend epic_backend_threads = {
    .name = "threads",
    .can_join = can_join,
    .join = threads_join,
    .leave = threads_leave,
    .forget = threads_forget,
    .memory = shared_memory_info,
    .transport = &transport,
};
