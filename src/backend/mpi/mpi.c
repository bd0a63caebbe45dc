/* SPDX-License-Identifier: Apache-2.0 */
/* Backend mpi: ranks are processes of one MPI job and share nothing; everything is a message. */
#include "backend/mpi/group.h"
#include "base/error.h"

#define LATELY_NS 1000000

static int claim(epic_group *group)
{
    pthread_mutex_lock(group->mutex);
    if (!is_broken(group)) progress_drain(group); /* caches know the memory of the last one */
    cell *c = cells_find_free(group);
    if (c) c->state = CELL_CLAIMED;
    pthread_mutex_unlock(group->mutex);
    return c ? c->index : -1;
}

static bool has_come(const cell *c, int from)
{
    return atomic_load_explicit(&c->came[from], memory_order_acquire);
}

static const epic_note *note(epic_group *group, int index, int from)
{
    cell *c = &group->cells[index];
    if (!has_come(c, from)) progress_asked(group, c);
    return has_come(c, from) ? &c->notes[from] : NULL;
}

static void *room(epic_group *group, int index, int to, int64_t entry)
{
    cell *c = &group->cells[index];
    void *at = lanes_room(group, c, to, entry);
    if (!at) progress_asked(group, c);
    return at;
}

static const void *entry_of(epic_group *group, int index, int from, int64_t entry)
{
    cell *c = &group->cells[index];
    const void *at = lanes_entry(group, c, from, entry);
    if (at) return at;
    progress_asked(group, c);
    return lanes_entry(group, c, from, entry);
}

static void look(epic_group *group, int from, uint64_t tag, uint64_t place, epic_sight *out)
{
    pthread_mutex_lock(group->mutex);
    progress_control(group);
    sights_look(group, from, tag, place, out);
    pthread_mutex_unlock(group->mutex);
}

static bool looked_lately(epic_group *group)
{
    const int64_t looked = atomic_load_explicit(&group->looked_ns, memory_order_relaxed);
    return clock_ns() - looked < LATELY_NS;
}

/* Looks at MPI now and then, unless another thread does: a rank that never waits hears of
 * failures too.  One that comes after a while hears all that its peers said meanwhile, before it
 * joins an operation that they gave up: a look may have MPI receive what only the next one
 * finds, so two in vain end it. */
static bool failure(epic_group *group, epic_failure_info *out)
{
    if (!is_broken(group) && !looked_lately(group) &&
        pthread_mutex_trylock(group->mutex) == 0) {
        while (progress_control(group) || progress_control(group)) continue;
        pthread_mutex_unlock(group->mutex);
    }
    if (!is_broken(group)) return false;
    *out = group->failure;
    return true;
}

static const epic_transport transport = {
    .shares = false,
    .lane_bytes = mpi_lane_bytes,
    .claim = claim,
    .announce = mpi_announce,
    .note = note,
    .shape = mpi_shape,
    .room = room,
    .send = mpi_send,
    .entry = entry_of,
    .drop = mpi_drop,
    .finish = mpi_finish,
    .wait = mpi_wait,
    .look = look,
    .break_group = progress_break,
    .failure = failure,
    .bytes_sent = mpi_bytes_sent,
};

extern EPIC_API const epic_backend epic_backend_mpi;
const epic_backend epic_backend_mpi = {
    .name = "mpi",
    .can_join = mpi_can_join,
    .join = mpi_join,
    .leave = mpi_leave,
    .memory = mpi_memory,
    .transport = &transport,
    .sentence = epic_sentence,
    .bootstrap = mpi_bootstrap,
};
