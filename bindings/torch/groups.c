/* SPDX-License-Identifier: Apache-2.0 */
/* The groups of this process, in a linked list that one mutex protects. No call of the core is
 * made while the mutex is locked. */
#include "groups.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "shim.h"

struct group {
    int64_t number;
    epic_context *ctx;
    group_device device;
    int num_uses;    /* number of calls in flight */
    bool is_closing; /* true: no further call may use the group */
    int num_layers;
    group_layer *layers;
    group *next;
};

/* The low bits of a layer's id are its index in the group. The high bits are the id of the
 * group. */
enum { LAYER_BITS = 16 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t group_left = PTHREAD_COND_INITIALIZER;
static group *groups;
static int64_t last_number;

/* Returns the address of the pointer in the list that points to the group. This pointer is NULL
 * if there is no such group. */
static group **find_group(int64_t number)
{
    group **at = &groups;
    while (*at != NULL && (*at)->number != number) at = &(*at)->next;
    return at;
}

/* Adds one call in flight to the group, and fills in *use. */
static void use_group(group_use *use, group *found)
{
    found->num_uses++;
    *use = (group_use){found, found->ctx, found->device};
}

bool group_enter(group_use *use, int64_t number)
{
    pthread_mutex_lock(&mutex);
    group *found = *find_group(number);
    const bool is_open = found != NULL && !found->is_closing;
    if (is_open) use_group(use, found);
    pthread_mutex_unlock(&mutex);
    return is_open;
}

bool group_enter_layer(group_use *use, int64_t number, group_layer *layer)
{
    pthread_mutex_lock(&mutex);
    group *found = *find_group(number >> LAYER_BITS);
    const int64_t i = number & ((1 << LAYER_BITS) - 1);
    const bool there = found != NULL && !found->is_closing && i < found->num_layers;
    if (there) {
        use_group(use, found);
        *layer = found->layers[i];
    }
    pthread_mutex_unlock(&mutex);
    return there;
}

/* Appends a layer to the layers of a group. Returns the id of the layer, or 0 on failure. */
static int64_t add_layer(group *to, const group_layer *layer)
{
    if (to->num_layers == 1 << LAYER_BITS) return 0;
    group_layer *layers = realloc(to->layers, (size_t)(to->num_layers + 1) * sizeof *layers);
    if (layers == NULL) return 0;
    to->layers = layers;
    layers[to->num_layers] = *layer;
    return to->number << LAYER_BITS | to->num_layers++;
}

int64_t group_add_layer(int64_t number, const group_layer *layer)
{
    pthread_mutex_lock(&mutex);
    group *found = *find_group(number);
    const int64_t layer_number = found != NULL ? add_layer(found, layer) : 0;
    pthread_mutex_unlock(&mutex);
    return layer_number;
}

void group_leave(group_use *use)
{
    if (use->group == NULL) return;
    pthread_mutex_lock(&mutex);
    if (--use->group->num_uses == 0) pthread_cond_broadcast(&group_left);
    pthread_mutex_unlock(&mutex);
    use->group = NULL;
}

TORCH_EXPORT int64_t epic_torch_group_add(epic_context *ctx, int32_t device_type,
                                          int32_t device_index)
{
    group *new_group = calloc(1, sizeof *new_group);
    if (new_group == NULL) return 0;
    pthread_mutex_lock(&mutex);
    const int64_t number = ++last_number;
    *new_group = (group){
        .number = number, .ctx = ctx, .device = {device_type, device_index}, .next = groups};
    groups = new_group;
    pthread_mutex_unlock(&mutex);
    return number;
}

TORCH_EXPORT int32_t epic_torch_group_drain(int64_t number, int32_t ms)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_nsec += ms % 1000 * 1000000l;
    end.tv_sec += ms / 1000 + end.tv_nsec / 1000000000l;
    end.tv_nsec %= 1000000000l;
    pthread_mutex_lock(&mutex);
    group *found = *find_group(number);
    int wrong = 0;
    if (found != NULL) found->is_closing = true;
    while (found != NULL && found->num_uses > 0 && wrong == 0) {
        wrong = pthread_cond_timedwait(&group_left, &mutex, &end);
        found = *find_group(number); /* another thread may have removed it */
    }
    const int32_t num_inside = found != NULL ? found->num_uses : 0;
    pthread_mutex_unlock(&mutex);
    return num_inside;
}

TORCH_EXPORT epic_context *epic_torch_group_remove(int64_t number)
{
    epic_context *ctx = NULL;
    pthread_mutex_lock(&mutex);
    group **at = find_group(number), *found = *at;
    if (found != NULL) {
        *at = found->next;
        while (found->num_uses > 0) pthread_cond_wait(&group_left, &mutex);
        ctx = found->ctx;
    }
    pthread_mutex_unlock(&mutex);
    if (found != NULL) free(found->layers);
    free(found);
    return ctx;
}
