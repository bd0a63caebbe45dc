/* SPDX-License-Identifier: Apache-2.0 */
/* The seats of this process: a list under one mutex, which is never held across a wait. */
#include "seats.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ffi.h"

struct seat {
    char name[SEATS_NAME];
    seat_device device;
    seat_place place;
    epic_context *ctx;
    seat_use *uses; /* in flight */
    struct seat *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t left = PTHREAD_COND_INITIALIZER;
static seat *seats;

/* name NULL: of any group. */
static bool is_at(const seat *seat, const char *name, seat_device device)
{
    return seat->device.ordinal == device.ordinal && seat->device.is_gpu == device.is_gpu &&
           (name == NULL || strcmp(seat->name, name) == 0);
}

static seat **find(const char *name, seat_device device)
{
    seat **at = &seats;
    while (*at != NULL && !is_at(*at, name, device)) at = &(*at)->next;
    return at;
}

static bool is_busy(const seat *found, uint64_t tag)
{
    for (const seat_use *use = found->uses; use != NULL; use = use->next)
        if (use->tag == tag) return true;
    return false;
}

/* Once one operation of a tag cannot be made, the order of the tag is lost for good, and peers
 * would wait for it until their deadline. */
static void tell_peers(epic_context *ctx, uint64_t tag, seat_answer answer)
{
    if (answer == SEAT_TAG_BUSY)
        epic_abort(
            ctx, tag,
            "two calls of the program share a number (an inner jit that is called twice?) "
            "and came at once: give their plans different channel=, or order them by after=");
    if (answer == SEAT_OTHER_RANK)
        epic_abort(ctx, tag,
                   "the mesh of the program has the group's devices in another order than the "
                   "mesh that the group was opened with");
}

static seat_answer answer_of(const seat *found, const seat_use *use, const seat_place *place)
{
    if (found == NULL) return SEAT_NONE;
    if (strcmp(found->place.devices, place->devices) != 0) return SEAT_OTHER_DEVICES;
    if (place->rank >= 0 && place->rank != found->place.rank) return SEAT_OTHER_RANK;
    if (!found->device.is_gpu && is_busy(found, use->tag)) return SEAT_TAG_BUSY;
    return SEAT_OK;
}

static void sit(seat_use *use, seat *seat)
{
    use->seat = seat;
    use->ctx = seat->ctx;
    use->next = seat->uses;
    seat->uses = use;
}

seat_answer seat_enter(seat_use *use, const char *name, seat_device device, seat_place *place)
{
    pthread_mutex_lock(&mutex);
    seat *found = *find(name, device);
    const seat_answer answer = answer_of(found, use, place);
    if (answer == SEAT_OK)
        sit(use, found);
    else if (found != NULL)
        tell_peers(found->ctx, use->tag, answer);
    if (found != NULL) *place = found->place;
    pthread_mutex_unlock(&mutex);
    return answer;
}

seat_answer seat_borrow(seat_use *use, seat_device device)
{
    pthread_mutex_lock(&mutex);
    seat *found = *find(NULL, device);
    if (found != NULL) sit(use, found);
    pthread_mutex_unlock(&mutex);
    return found != NULL ? SEAT_OK : SEAT_NONE;
}

void seat_leave(seat_use *use)
{
    pthread_mutex_lock(&mutex);
    seat_use **at = &use->seat->uses;
    while (*at != use) at = &(*at)->next;
    *at = use->next;
    pthread_cond_broadcast(&left);
    pthread_mutex_unlock(&mutex);
}

FFI_EXPORT int epic_jax_seat_add(const char *name, int is_gpu, int32_t ordinal,
                                 const char *devices, int32_t rank, epic_context *ctx)
{
    const seat_device device = {is_gpu != 0, ordinal};
    seat *made = calloc(1, sizeof *made);
    if (made == NULL) return 2;
    pthread_mutex_lock(&mutex);
    const bool refused = strlen(name) >= SEATS_NAME || strlen(devices) >= SEATS_DEVICES ||
                         *find(name, device) != NULL;
    if (!refused) {
        strcpy(made->name, name);
        strcpy(made->place.devices, devices);
        made->place.rank = rank;
        made->device = device;
        made->ctx = ctx;
        made->next = seats;
        seats = made;
    }
    pthread_mutex_unlock(&mutex);
    if (refused) free(made);
    return refused;
}

FFI_EXPORT epic_context *epic_jax_seat_remove(const char *name, int is_gpu, int32_t ordinal)
{
    const seat_device device = {is_gpu != 0, ordinal};
    pthread_mutex_lock(&mutex);
    seat **at = find(name, device), *found = *at;
    epic_context *ctx = NULL;
    if (found != NULL) {
        *at = found->next;
        while (found->uses != NULL) pthread_cond_wait(&left, &mutex);
        ctx = found->ctx;
    }
    pthread_mutex_unlock(&mutex);
    free(found);
    return ctx;
}
