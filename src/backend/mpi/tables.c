/* SPDX-License-Identifier: Apache-2.0 */
/* Allocates the memory of a group in one mapping: first the tables, then the rings (the buffers
 * for rows). The system allocates a page only when it is first accessed. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/mpi/group.h"
#include "base/error.h"

#define PAGE 4096
/* ring sizes are multiples of this, so that the halves of a ring are multiples of 64 bytes */
#define RING_UNIT 128
#define MIN_RING (2 * MIN_SEGMENT)
#define MAX_RING (1 << 20)
#define DEFAULT_STAGING (256ll << 20)
/* Huge pages are used only if all rings of an op slot together have at most this size. With
 * larger rings, huge pages that are only partly used could waste much memory. */
#define MAX_HUGE_PAGES (32ll << 20)

/* Divides the memory at `base` into consecutive parts. If `base` is NULL, only adds up the
 * sizes of the parts. */
typedef struct carver {
    unsigned char *base;
    size_t used;
} carver;

static void *carve_bytes(carver *from, size_t bytes)
{
    unsigned char *piece = from->base ? from->base + from->used : NULL;
    from->used += (bytes + 63) / 64 * 64;
    return piece;
}

#define CARVE(from, count, type) ((type *)carve_bytes(from, (size_t)(count) * sizeof(type)))

static void carve_slot(carver *from, int num_ranks, op_slot *slot)
{
    slot->headers = CARVE(from, num_ranks, epic_op_header);
    slot->has_header = CARVE(from, num_ranks, atomic_bool);
    slot->peer_slots = CARVE(from, num_ranks, int32_t);
    slot->send_rings = CARVE(from, num_ranks, staging_ring);
    slot->receive_rings = CARVE(from, num_ranks, staging_ring);
    slot->statuses = CARVE(from, num_ranks, peer_status);
    slot->requests = CARVE(from, num_ranks * NUM_REQUESTS, MPI_Request);
}

/* Sets the pointers to all tables. If from->base is NULL, only adds up their sizes. */
static void carve_tables(carver *from, epic_group *group)
{
    const int num_ranks = group->num_ranks;
    group->slots = CARVE(from, group->num_slots, op_slot);
    group->peers = CARVE(from, num_ranks, peer);
    group->pidfds = CARVE(from, num_ranks, struct pollfd);
    group->send_buffers = CARVE(from, NUM_SEND_BUFFERS, send_buffer);
    group->receive_buffers = CARVE(from, NUM_RECEIVE_BUFFERS, control_message);
    group->indices = CARVE(from, num_ranks * NUM_REQUESTS, int);
    group->broadcast_requests = CARVE(from, 2 * num_ranks, MPI_Request);
    op_slot counted;
    peer early;
    for (int i = 0; i < group->num_slots; i++)
        carve_slot(from, num_ranks, from->base ? &group->slots[i] : &counted);
    for (int r = 0; r < num_ranks; r++)
        (from->base ? &group->peers[r] : &early)->early =
            CARVE(from, group->max_early, early_header);
    from->used = (from->used + PAGE - 1) / PAGE * PAGE;
}

static int64_t num_rings(const epic_config *config, int num_ranks)
{
    return 2ll * (num_ranks - 1) * config->max_in_flight;
}

/* Returns the size of a ring in bytes: the largest size from MIN_RING to MAX_RING that
 * config.staging_bytes allows. EPIC_LEAST_STAGING means MIN_RING. */
static int64_t choose_ring_bytes(const epic_config *config, int num_ranks)
{
    const int64_t rings = num_rings(config, num_ranks);
    if (config->staging_bytes == EPIC_LEAST_STAGING) return MIN_RING;
    const int64_t staging = config->staging_bytes ? config->staging_bytes : DEFAULT_STAGING;
    int64_t bytes = rings ? staging / rings / RING_UNIT * RING_UNIT : MAX_RING;
    if (bytes > MAX_RING) bytes = MAX_RING;
    if (bytes < MIN_RING && !config->staging_bytes) bytes = MIN_RING;
    return bytes;
}

/* Computes the sizes of a group. Allocates nothing, so that mpi_memory() can call it for a
 * group that is not open. */
static void measure_group(epic_group *group, const epic_config *config, int rank, int num_ranks)
{
    group->rank = rank;
    group->num_ranks = num_ranks;
    group->num_slots = (int)config->max_in_flight;
    group->max_early = 2 * config->max_in_flight;
    group->ring_bytes = choose_ring_bytes(config, num_ranks);
    carver count = {0};
    carve_tables(&count, group);
    group->table_bytes = count.used;
    group->memory_bytes =
        count.used + (size_t)(num_rings(config, num_ranks) * group->ring_bytes);
}

/* Returns EPIC_EINVAL if staging_bytes is too small for this number of ranks. */
static epic_result tables_check(const epic_config *config, int num_ranks)
{
    if (choose_ring_bytes(config, num_ranks) >= MIN_RING) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "config.staging_bytes is %lld; backend mpi needs %lld for %d ranks and "
                     "max_in_flight %u: raise it, lower max_in_flight, or pass 0",
                     (long long)config->staging_bytes,
                     (long long)(num_rings(config, num_ranks) * MIN_RING), num_ranks,
                     config->max_in_flight);
}

/* Sets all requests to MPI_REQUEST_NULL and all descriptors to -1. The rest is zero already. */
static void clear_tables(epic_group *group)
{
    const int per_slot = group->num_ranks * NUM_REQUESTS;
    for (int i = 0; i < group->num_slots; i++) {
        group->slots[i].index = i;
        for (int q = 0; q < per_slot; q++) group->slots[i].requests[q] = MPI_REQUEST_NULL;
    }
    for (int i = 0; i < NUM_SEND_BUFFERS; i++)
        group->send_buffers[i].request = MPI_REQUEST_NULL;
    for (int i = 0; i < NUM_RECEIVE_BUFFERS; i++) group->receive_requests[i] = MPI_REQUEST_NULL;
    for (int i = 0; i < 2 * group->num_ranks; i++)
        group->broadcast_requests[i] = MPI_REQUEST_NULL;
    for (int r = 0; r < group->num_ranks; r++)
        group->pidfds[r] = (struct pollfd){.fd = -1, .events = POLLIN};
}

/* Requests huge pages for the rings, unless that could waste much memory. Huge pages make large
 * messages faster, because MPI copies page by page between processes of one host. A system
 * without huge pages ignores the request. */
static void use_large_pages(const epic_group *group)
{
    const int64_t slot_bytes = 2 * (group->num_ranks - 1) * group->ring_bytes;
    if (slot_bytes <= MAX_HUGE_PAGES)
        madvise(group->rings, group->memory_bytes - group->table_bytes, MADV_HUGEPAGE);
}

/* Allocates a group with its memory; sets fields that need no other rank. Errors:
 * EPIC_ENOMEM. */
epic_result tables_make(epic_group **out, const epic_config *config, int rank, int num_ranks)
{
    epic_group *group = calloc(1, sizeof *group);
    if (!group) return epic_fail(EPIC_ENOMEM, "no memory for a group");
    measure_group(group, config, rank, num_ranks);
    group->memory = mmap(NULL, group->memory_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (group->memory == MAP_FAILED) {
        const size_t bytes = group->memory_bytes;
        free(group);
        return epic_fail(EPIC_ENOMEM,
                         "backend mpi: no memory for %zu bytes; lower "
                         "config.staging_bytes or max_in_flight",
                         bytes);
    }
    carver from = {.base = group->memory};
    carve_tables(&from, group);
    group->rings = from.base + group->table_bytes;
    use_large_pages(group);
    group->timeout_ns = 1000000ll * config->timeout_ms;
    group->comm = MPI_COMM_NULL;
    pthread_mutex_init(&group->own_mutex, NULL);
    pthread_cond_init(&group->drain_wake_up, NULL);
    group->mutex = runtime_mutex() ? runtime_mutex() : &group->own_mutex;
    clear_tables(group);
    *out = group;
    return EPIC_OK;
}

/* Releases the rings. If in_use is set, MPI may still access them: frees their pages but keeps
 * the addresses mapped, so that an access does not crash. */
void tables_release_rings(epic_group *group, bool in_use)
{
    const size_t bytes = group->memory_bytes - group->table_bytes;
    if (!bytes) return;
    if (in_use) {
        madvise(group->rings, bytes, MADV_DONTNEED);
        return;
    }
    munmap(group->rings, bytes);
    group->memory_bytes = group->table_bytes;
}

void tables_free(epic_group *group)
{
    munmap(group->memory, group->memory_bytes);
    pthread_cond_destroy(&group->drain_wake_up);
    pthread_mutex_destroy(&group->own_mutex);
    free(group);
}

/* Implements epic_backend.memory: computes the memory of a context before it is opened. */
epic_result mpi_memory(const epic_config *config, epic_memory_info *out)
{
    epic_group group = {0};
    const int num_ranks = (int)config->num_ranks;
    TRY(tables_check(config, num_ranks));
    measure_group(&group, config, 0, num_ranks);
    out->host_bytes = (int64_t)(sizeof group + group.memory_bytes);
    out->staging_bytes = num_rings(config, num_ranks) * group.ring_bytes;
    return EPIC_OK;
}
