/* SPDX-License-Identifier: Apache-2.0 */
/* The backend self: a group of one rank, and the smallest complete backend. It has no peers, so
 * its functions for op headers and rings do nothing. The group stores only its failure, and
 * which op slots (the state of one operation each) are in use. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/transport.h"
#include "base/clock.h"
#include "base/error.h"

struct epic_group {
    pthread_mutex_t mutex; /* guards the members below */
    pthread_cond_t changed;
    uint64_t used; /* bit i is set while op slot i is in use */
    int num_op_slots;
    epic_failure_info failure;
};

static int64_t self_ring_bytes(const epic_group *g, bool everyone)
{
    (void)g, (void)everyone;
    return 0;
}

static int self_claim(epic_group *g)
{
    int op_slot = 0;
    pthread_mutex_lock(&g->mutex);
    while (op_slot < g->num_op_slots && g->used >> op_slot & 1) op_slot++;
    if (op_slot < g->num_op_slots) g->used |= 1ull << op_slot;
    pthread_mutex_unlock(&g->mutex);
    return op_slot < g->num_op_slots ? op_slot : -1;
}

static void self_announce(epic_group *g, int op_slot, uint64_t tag, uint64_t sequence,
                          const epic_op_header *header)
{
    (void)g, (void)op_slot, (void)tag, (void)sequence, (void)header;
}

static const epic_op_header *self_header(epic_group *g, int op_slot, int peer)
{
    (void)g, (void)op_slot, (void)peer;
    return NULL;
}

static void self_shape(epic_group *g, int op_slot, const epic_flow *flow)
{
    (void)g, (void)op_slot, (void)flow;
}

static void *self_room(epic_group *g, int op_slot, int to, int64_t index)
{
    (void)g, (void)op_slot, (void)to, (void)index;
    return NULL;
}

static void self_send(epic_group *g, int op_slot, int to, int64_t upto)
{
    (void)g, (void)op_slot, (void)to, (void)upto;
}

static const void *self_entry(epic_group *g, int op_slot, int from, int64_t index)
{
    (void)g, (void)op_slot, (void)from, (void)index;
    return NULL;
}

static void self_drop(epic_group *g, int op_slot, int from, int64_t upto)
{
    (void)g, (void)op_slot, (void)from, (void)upto;
}

static void self_finish(epic_group *g, int op_slot)
{
    pthread_mutex_lock(&g->mutex);
    g->used &= ~(1ull << op_slot);
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->mutex);
}

/* Waits until an op slot is free, until the group has failed, or for `ms` milliseconds. op_slot
 * is always -1, because there are no peers for which an op slot could wait. */
static void self_wait(epic_group *g, int op_slot, uint32_t phase, const uint64_t *waits_for,
                      uint32_t ms)
{
    (void)op_slot, (void)phase, (void)waits_for;
    const struct timespec limit = clock_in_ns(ms * 1000000ll);
    const uint64_t all = g->num_op_slots == 64 ? ~0ull : (1ull << g->num_op_slots) - 1;
    pthread_mutex_lock(&g->mutex);
    int late = 0;
    while (g->used == all && !g->failure.result && !late)
        late = pthread_cond_timedwait(&g->changed, &g->mutex, &limit);
    pthread_mutex_unlock(&g->mutex);
}

static void self_look(epic_group *g, int peer, uint64_t tag, uint64_t sequence,
                      epic_peer_status *out)
{
    (void)g, (void)peer, (void)tag, (void)sequence;
    memset(out, 0, sizeof *out);
}

static void self_break_group(epic_group *g, const epic_failure_info *failure)
{
    pthread_mutex_lock(&g->mutex);
    if (!g->failure.result) g->failure = *failure;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->mutex);
}

static bool self_failure(epic_group *g, epic_failure_info *out)
{
    pthread_mutex_lock(&g->mutex);
    const bool broken = g->failure.result != EPIC_OK;
    if (broken) *out = g->failure;
    pthread_mutex_unlock(&g->mutex);
    return broken;
}

static uint64_t self_bytes_sent(const epic_group *g)
{
    (void)g;
    return 0;
}

#define SENTENCE_RANKS "num_ranks is %d: must be 1 in backend self, other backends support more"

static bool self_can_join(const epic_peer *peers, int num_ranks, const epic_config *config,
                          char *why)
{
    (void)peers, (void)config;
    if (num_ranks == 1) return true;
    snprintf(why, 256, SENTENCE_RANKS, num_ranks);
    return false;
}

static epic_result self_join(epic_group **out, const epic_join *join)
{
    epic_group *g = calloc(1, sizeof *g);
    if (!g) return epic_fail(EPIC_ENOMEM, "no memory for a group of one: %zu bytes", sizeof *g);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&g->mutex, NULL);
    pthread_cond_init(&g->changed, &clock);
    pthread_condattr_destroy(&clock);
    g->num_op_slots = (int)join->config->max_in_flight;
    *out = g;
    return EPIC_OK;
}

static void self_leave(epic_group *g)
{
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->mutex);
    free(g);
}

static epic_result self_memory(const epic_config *config, epic_memory_info *out)
{
    if (config->num_ranks != 1)
        return epic_fail(EPIC_ENOTSUP, SENTENCE_RANKS, (int)config->num_ranks);
    out->host_bytes = sizeof(epic_group);
    return EPIC_OK;
}

static const epic_transport transport = {
    .shares = true,
    .ring_bytes = self_ring_bytes,
    .claim = self_claim,
    .announce = self_announce,
    .op_header = self_header,
    .shape = self_shape,
    .room = self_room,
    .send = self_send,
    .entry = self_entry,
    .drop = self_drop,
    .finish = self_finish,
    .wait = self_wait,
    .look = self_look,
    .break_group = self_break_group,
    .failure = self_failure,
    .bytes_sent = self_bytes_sent,
};

const epic_backend epic_backend_self = {
    .name = "self",
    .can_join = self_can_join,
    .join = self_join,
    .leave = self_leave,
    .forget = self_leave,
    .memory = self_memory,
    .transport = &transport,
};
