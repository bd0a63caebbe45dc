/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that are threads of one process.  Rank 0 maps the segment and tells its address; the
 * last rank to leave unmaps it. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/shared/shared.h"
#include "core/error.h"

static bool can_join(const epic_peer *peers, int num_ranks, const epic_config *config,
                     char *why)
{
    (void)config;
    if (num_ranks > EPIC_MAX_RANKS) {
        snprintf(why, 256, "threads is for at most %d ranks", EPIC_MAX_RANKS);
        return false;
    }
    for (int r = 1; r < num_ranks; r++) {
        if (memcmp(peers[r].process, peers[0].process, sizeof peers[0].process) == 0) continue;
        snprintf(why, 256,
                 "threads is for ranks of one process; rank %d is another than rank 0", r);
        return false;
    }
    return true;
}

/* NULL: the sentence says why. */
static char *map_segment(const shared_layout *layout, uint64_t group_id)
{
    char *segment = mmap(NULL, (size_t)layout->segment_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (segment == MAP_FAILED) {
        epic_fail(EPIC_ENOMEM,
                  "no address space for %lld bytes shared by the ranks; lower "
                  "config.max_in_flight or config.staging_bytes",
                  (long long)layout->segment_bytes);
        return NULL;
    }
    shared_found(segment, layout, group_id);
    return segment;
}

/* Each rank departs once, after its last access; the others may still be reading. */
static void depart(char *segment)
{
    shared_header *header = (shared_header *)segment;
    const size_t bytes = header->segment_bytes;
    const uint32_t num_ranks = header->num_ranks;
    if (add_ordered(&header->num_departed, 1) + 1 == num_ranks) munmap(segment, bytes);
}

/* Every rank's address of the segment; only rank 0 has one.  The meeting's own failure leaves
 * the segment mapped when rank 0 cannot know who has its address. */
static epic_result tell_address(const epic_join *join, char **segment)
{
    const epic_meet *meet = join->meet;
    const uint64_t mine = (uint64_t)(uintptr_t)*segment;
    uint64_t all[EPIC_MAX_RANKS];
    if (meet->gather(meet->self, &mine, all, sizeof mine) != EPIC_OK)
        return epic_fail(EPIC_EPEER, "the meeting failed while the ranks shared memory");
    *segment = (char *)(uintptr_t)all[0];
    return EPIC_OK;
}

static epic_result threads_join(epic_group **out, const epic_join *join)
{
    shared_layout layout;
    TRY(shared_layout_of(join->config, &layout));
    char *segment = NULL;
    if (join->meet->rank == 0) segment = map_segment(&layout, join->group_id);
    const bool failed = join->meet->rank == 0 && !segment;
    const epic_result told = tell_address(join, &segment);
    if (failed) return EPIC_ENOMEM;
    if (told != EPIC_OK) {
        if (segment) depart(segment);
        return told;
    }
    if (!segment) return epic_fail(EPIC_ENOMEM, "rank 0 could not map the shared memory");
    if (!shared_is_ours(segment, &layout, join->group_id))
        return epic_fail(EPIC_EDEVICE, "rank 0 shared the memory of another group");
    const epic_result result = shared_open(out, join, &layout, segment, false);
    if (result != EPIC_OK) depart(segment);
    return result;
}

static void threads_leave(epic_group *group)
{
    char *segment = group->segment;
    shared_say_goodbye(group);
    shared_free(group);
    depart(segment);
}

const epic_backend epic_backend_threads = {
    .name = "threads",
    .can_join = can_join,
    .join = threads_join,
    .leave = threads_leave,
    .forget = threads_leave, /* a child has the memory for itself */
    .memory = shared_memory,
    .transport = &shared_transport,
};
