/* SPDX-License-Identifier: Apache-2.0 */
/* Where the ranks of this process have their heaps.  What comes through the meeting is never an
 * address: whoever reached the meeting could choose it. */
#include <pthread.h>
#include <stdlib.h>

#include "backend/p2p/p2p.h"
#include "base/error.h"

typedef struct shown {
    struct shown *next;
    const epic_group *group;
} shown;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the list */
static shown *list;

static const epic_group *find(uint64_t group_id, int rank)
{
    const shown *at = list;
    while (at && (at->group->self.group_id != group_id || at->group->rank != rank))
        at = at->next;
    return at ? at->group : NULL;
}

epic_result p2p_heap_show(const epic_group *group)
{
    shown *mine = malloc(sizeof *mine);
    if (!mine) return epic_fail(EPIC_ENOMEM, "no host memory for a context");
    pthread_mutex_lock(&mutex);
    const bool taken = find(group->self.group_id, group->rank) != NULL;
    if (!taken) {
        *mine = (shown){list, group};
        list = mine;
    }
    pthread_mutex_unlock(&mutex);
    if (!taken) return EPIC_OK;
    free(mine);
    return epic_fail(EPIC_EPEER,
                     "backend p2p: rank %d of this group is in it already: the meeting mixed "
                     "two groups; open one from each meeting",
                     group->rank);
}

void p2p_heap_hide(const epic_group *group)
{
    pthread_mutex_lock(&mutex);
    for (shown **link = &list; *link; link = &(*link)->next) {
        shown *at = *link;
        if (at->group != group) continue;
        *link = at->next;
        free(at);
        break;
    }
    pthread_mutex_unlock(&mutex);
}

uint8_t *p2p_heap_find(uint64_t group_id, int rank)
{
    pthread_mutex_lock(&mutex);
    const epic_group *peer = find(group_id, rank);
    uint8_t *heap = peer ? peer->self.heap[rank] : NULL;
    pthread_mutex_unlock(&mutex);
    return heap;
}
