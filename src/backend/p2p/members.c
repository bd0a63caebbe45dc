/* SPDX-License-Identifier: Apache-2.0 */
/* Changes the members of a group on GPUs. A *seat* is a rank number; it is *vacant* if its rank
 * has left the group. Kernels read the vacant seats from device memory (p2p_group_words), so
 * the arguments of captured CUDA graphs stay valid.
 *
 * A *generation* is the group between two changes of its members. All generations use the same
 * heap. A member clears its heap when it enters a generation. Before it stores into the heaps
 * of the other members, it waits until they have cleared their heaps
 * (p2p_mailbox_wait_members()). A rank that was left out may still store into the heaps of the
 * members, but only into two parts: the part of its own seat, which no rank reads, and the word
 * `broken`, which members ignore because it contains the number of an old generation. */
#include <stddef.h>

#include "backend/p2p/mailbox.h"
#include "backend/regroup.h"
#include "base/error.h"

#if WITH_VACANT_SEATS
/* Stops using the heap of a rank that has left. Reports to that rank that it may free its heap,
 * because this rank does not access the heap any more. */
static void release_seat(epic_group *g, int seat)
{
    const seat_set ranks = seat_set_of(seat);
    *g->word = P2P_RELEASED;
    if (!p2p_is_dead(g, seat) && !p2p_has_released(g, seat))
        g->hooks->write(g, &ranks, g->self.at.gone + 8 * g->rank, g->word, sizeof *g->word);
    p2p_heap_unmap(g, seat);
}

/* Calls release_seat() for each rank that is not in `members` any more, and marks its seat as
 * vacant. */
static void release_others(epic_group *g, const seat_set *members)
{
    for (int q = 0; q < g->num_ranks; q++) {
        if (seat_set_has(members, q) || p2p_is_vacant(g, q)) continue;
        release_seat(g, q);
        g->vacant |= 1u << q;
    }
}

/* Writes the generation and the vacant seats into this rank's heap, where its kernels read
 * them. */
static void write_group_words(epic_group *g)
{
    const uint32_t words[2] = {g->generation, g->vacant};
    const seat_set self = seat_set_of(g->rank);
    const int64_t at = g->self.at.broken + (int64_t)offsetof(p2p_group_words, generation);
    g->hooks->write(g, &self, at, words, sizeof words);
}

void p2p_set_members(epic_group *g, const seat_set *members)
{
    release_others(g, members);
    write_group_words(g);
}

/* Returns whether another rank of the group may use this rank's device from this process. */
static bool shares_device(const epic_group *g)
{
    if (g->ranks_here == 1) return false;
    for (int q = 0; q < g->num_ranks; q++)
        if (q != g->rank && p2p_same(g->peers[q].process, g->peers[g->rank].process))
            return true;
    return false;
}

/* Implements epic_regroup_transport.begin: waits for the work of this rank on the device. If
 * another rank of the group uses the device from this process, cudaDeviceSynchronize() could
 * wait for a kernel of that rank, which may wait for this rank. So in this case the function
 * does not wait, and requires that the caller has synchronized its streams. */
static epic_result begin_regroup(epic_group *g)
{
    int before = -1;
    if (g->windows)
        return epic_fail(
            EPIC_ENOTSUP,
            "ctx has windows: the members of such a group cannot change; open a new group");
    if (shares_device(g)) return EPIC_OK;
    TRY(p2p_cuda(cudaGetDevice(&before), "the current device"));
    TRY(p2p_cuda(cudaSetDevice(g->device), "the device of the context"));
    const cudaError_t error = cudaDeviceSynchronize();
    (void)cudaSetDevice(before);
    return p2p_cuda(error, "waiting for the work of this rank");
}

/* Removes the failure and the data errors that kernels have reported in the old generation. */
static void clear_status(p2p_status *status)
{
    for (int i = 0; i < P2P_NOTICES; i++)
        __atomic_store_n(&status->notices[i].result, (uint32_t)EPIC_OK, __ATOMIC_RELAXED);
    __atomic_store_n(&status->result, (uint32_t)EPIC_OK, __ATOMIC_RELEASE);
}

/* Implements epic_regroup_transport.enter: makes `members` the members of the next
 * generation. */
static epic_result enter_generation(epic_group *g, const seat_set *members)
{
    int before = -1;
    (void)cudaGetDevice(&before);
    (void)cudaSetDevice(g->device);
    g->generation++;
    release_others(g, members);
    epic_result result = p2p_heap_renew(g);
    if (result == EPIC_OK) {
        write_group_words(g);
        clear_status(g->status);
        result = p2p_mailbox_wait_members(g);
    }
    if (before >= 0) (void)cudaSetDevice(before);
    return result;
}

static bool is_gone(epic_group *g, int seat)
{
    return p2p_mailbox_is_gone(g, seat);
}

/* Implements epic_regroup_transport.send. Ignores group_id: all generations use the same heap,
 * so no handle to memory is sent. */
static void send_message(epic_group *g, int to, const void *message, size_t bytes,
                         uint64_t group_id)
{
    (void)group_id;
    p2p_mailbox_send(g, to, message, bytes);
}

const epic_regroup_transport p2p_regroup = {.begin = begin_regroup,
                                            .send = send_message,
                                            .receive = p2p_mailbox_receive,
                                            .is_gone = is_gone,
                                            .enter = enter_generation};
#endif
