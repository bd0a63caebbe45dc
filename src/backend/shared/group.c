/* SPDX-License-Identifier: Apache-2.0 */
/* Creates and frees one rank's view of a group. */
#include <stdlib.h>
#include <string.h>

#include "backend/shared/shared.h"
#include "base/error.h"

#define SLICE_NS 100000000

/* Returns the maximum time that a waiting rank sleeps between two heartbeats. It is at most a
 * quarter of the timeout, so that the rank's last heartbeat is recent when the deadline of a
 * peer passes. */
static int64_t slice_of(const epic_config *config)
{
    const int64_t quarter = config->timeout_ms * 1000000ll / 4;
    const int64_t slice = quarter < SLICE_NS ? quarter : SLICE_NS;
    return slice < 1000000 ? 1000000 : slice;
}

/* Publishes the set of cores on which this rank may run. find_core_per_rank() in wait.c reads
 * the sets of all ranks. */
static void publish_cores(epic_group *g)
{
    const core_set mine = cores_of_thread();
    for (int w = 0; w < CORE_WORDS; w++)
        store_relaxed(&shared_rank_state_of(g, g->rank)->cores[w], mine.words[w]);
}

/* Returns how many bytes of private memory a rank needs for its view of a group. */
static int64_t local_bytes(const shared_layout *l)
{
    const size_t slot = sizeof(shared_exchange) + (size_t)l->num_ranks * sizeof(peer_link);
    return (int64_t)(sizeof(epic_group) + (size_t)l->num_slots * slot);
}

epic_result shared_memory_info(const epic_config *config, epic_memory_info *out)
{
    shared_layout layout;
    TRY(shared_layout_of(config, &layout));
    out->host_bytes = local_bytes(&layout);
    out->shared_bytes = layout.num_slots * layout.block_bytes + layout.rings_bytes;
    out->staging_bytes = layout.num_slots * layout.staging_bytes;
    return EPIC_OK;
}

static void init_exchanges(epic_group *g)
{
    for (int i = 0; i < g->layout.num_slots; i++) {
        shared_exchange *x = &g->exchanges[i];
        x->slot = shared_op_slot_of(g, g->rank, i);
        x->index = i;
        x->links = g->links + (size_t)i * (size_t)g->num_ranks;
    }
}

epic_result shared_group_new(epic_group **out, const epic_join *join,
                             const shared_layout *layout, char *segment,
                             bool is_shared_by_processes)
{
    const size_t slots = (size_t)layout->num_slots, ranks = (size_t)layout->num_ranks;
    epic_group *g = calloc(1, sizeof *g);
    if (g) {
        g->exchanges = calloc(slots, sizeof *g->exchanges);
        g->links = calloc(slots * ranks, sizeof *g->links);
    }
    if (!g || !g->exchanges || !g->links) {
        if (g) shared_group_free(g);
        return epic_fail(EPIC_ENOMEM, "no memory for %zu operations of %zu ranks: %lld bytes",
                         slots, ranks, (long long)local_bytes(layout));
    }
    g->segment = segment;
    g->header = (shared_segment_header *)segment;
    g->layout = *layout;
    g->rank = join->bootstrap->rank;
    g->num_ranks = layout->num_ranks;
    seat_set_add_all(&g->members, g->num_ranks);
    g->is_shared_by_processes = is_shared_by_processes;
    g->slice_ns = slice_of(join->config);
    g->timeout_ns = join->config->timeout_ms * INT64_C(1000000);
    publish_cores(g);
    init_exchanges(g);
    *out = g;
    return EPIC_OK;
}

void shared_segment_init(char *segment, const shared_layout *layout, uint64_t group_id)
{
    shared_segment_header *header = (shared_segment_header *)segment;
    header->group_id = group_id;
    header->num_ranks = (uint32_t)layout->num_ranks;
    header->segment_bytes = (uint64_t)layout->segment_bytes;
    header->magic = SEGMENT_MAGIC;
}

bool shared_segment_is_of(const char *segment, const shared_layout *layout, uint64_t group_id)
{
    const shared_segment_header *header = (const shared_segment_header *)segment;
    return header->magic == SEGMENT_MAGIC && header->group_id == group_id &&
           header->segment_bytes == (uint64_t)layout->segment_bytes;
}

/* Implements epic_transport.set_members. */
void shared_set_members(epic_group *g, const seat_set *members)
{
    g->members = *members;
    store_relaxed(&g->core_per_rank, 0);
}

void shared_group_enter(epic_group *g, char *segment, const seat_set *members)
{
    g->segment = segment;
    g->header = (shared_segment_header *)segment;
    publish_cores(g);
    init_exchanges(g);
    shared_set_members(g, members);
}

void shared_group_close(epic_group *g)
{
    store_ordered(&shared_rank_state_of(g, g->rank)->closed, 1);
    store_ordered(&g->header->any_gone, 1);
    shared_wake_all(g);
}

void shared_group_free(epic_group *g)
{
    free(g->exchanges);
    free(g->links);
    free(g);
}

uint64_t shared_bytes_sent(const epic_group *g)
{
    return load_relaxed(&g->bytes_sent);
}
