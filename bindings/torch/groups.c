/* SPDX-License-Identifier: Apache-2.0 */
/* A list under one mutex, which is never held across a call of the core. */
#include "groups.h"

#include <pthread.h>
#include <stdlib.h>

#include "shim.h"

struct group {
    int64_t number;
    epic_context *ctx;
    group_place place;
    int num_uses;
    group *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t left = PTHREAD_COND_INITIALIZER;
static group *groups;
static int64_t last_number;

static group **find(int64_t number)
{
    group **at = &groups;
    while (*at != NULL && (*at)->number != number) at = &(*at)->next;
    return at;
}

bool group_enter(group_use *use, int64_t number)
{
    pthread_mutex_lock(&mutex);
    group *found = *find(number);
    if (found != NULL) {
        found->num_uses++;
        *use = (group_use){found, found->ctx, found->place};
    }
    pthread_mutex_unlock(&mutex);
    return found != NULL;
}

void group_leave(group_use *use)
{
    if (use->group == NULL) return;
    pthread_mutex_lock(&mutex);
    if (--use->group->num_uses == 0) pthread_cond_broadcast(&left);
    pthread_mutex_unlock(&mutex);
    use->group = NULL;
}

TORCH_EXPORT int64_t epic_torch_group_add(epic_context *ctx, int32_t device_type,
                                          int32_t device_index)
{
    group *made = calloc(1, sizeof *made);
    if (made == NULL) return 0;
    pthread_mutex_lock(&mutex);
    const int64_t number = ++last_number;
    *made = (group){number, ctx, {device_type, device_index}, 0, groups};
    groups = made;
    pthread_mutex_unlock(&mutex);
    return number;
}

TORCH_EXPORT epic_context *epic_torch_group_remove(int64_t number)
{
    epic_context *ctx = NULL;
    pthread_mutex_lock(&mutex);
    group **at = find(number), *found = *at;
    if (found != NULL) {
        *at = found->next;
        while (found->num_uses > 0) pthread_cond_wait(&left, &mutex);
        ctx = found->ctx;
    }
    pthread_mutex_unlock(&mutex);
    free(found);
    return ctx;
}
