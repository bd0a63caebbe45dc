/* SPDX-License-Identifier: Apache-2.0 */
/* The members of this process, in a list that one mutex protects. Only epic_jax_member_remove()
 * waits for another thread while it holds the mutex. It waits on a condition variable, which
 * releases the mutex during the wait. */
#include "members.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ffi.h"

/* The member of one device in one open group. */
struct member {
    char name[MEMBER_NAME_BYTES];
    member_device device;
    member_position position;
    epic_context *ctx;
    /* true: the group was closed; the struct stays in the list so that calls can report this */
    bool is_closed;
    member_use *uses; /* list of the operations in flight */
    struct member *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t use_ended = PTHREAD_COND_INITIALIZER;
static member *members;

/* Returns true if a member belongs to this device and to the group `name`, or to any group if
 * name is NULL. */
static bool matches_device(const member *member, const char *name, member_device device)
{
    return member->device.ordinal == device.ordinal && member->device.is_gpu == device.is_gpu &&
           (name == NULL || strcmp(member->name, name) == 0);
}

/* Returns the member of this device in the group `name`, or NULL. Searches only closed members
 * if is_closed is set, and only open ones if not. */
static member *find_member(const char *name, member_device device, bool is_closed)
{
    member *at = members;
    while (at != NULL && (at->is_closed != is_closed || !matches_device(at, name, device)))
        at = at->next;
    return at;
}

/* Returns true if an operation with this tag is in flight on the member. */
static bool is_busy(const member *found, uint64_t tag)
{
    for (const member_use *use = found->uses; use != NULL; use = use->next)
        if (use->tag == tag) return true;
    return false;
}

/* Aborts the operation on the peers, because this rank will not run it. Without this, the peers
 * would wait for this rank until their deadline. */
static void notify_peers(epic_context *ctx, uint64_t tag, member_status answer)
{
    if (answer == MEMBER_TAG_BUSY)
        epic_abort(
            ctx, tag,
            "two calls of the program share a number (an inner jit that is called twice?) "
            "and arrived at the same time: pass different channel= to their plans, or order "
            "them by after=");
    if (answer == MEMBER_OTHER_RANK)
        epic_abort(ctx, tag,
                   "the mesh of the program has the group's devices in another order than the "
                   "mesh that the group was opened with");
}

/* Checks whether an operation may begin on the member. Its devices and its rank must be those
 * that the program expects. No operation with the same tag may be in flight. */
static member_status check_entry(const member *found, const member_use *use,
                                 const member_position *position)
{
    if (strcmp(found->position.devices, position->devices) != 0) return MEMBER_OTHER_DEVICES;
    if (position->rank >= 0 && position->rank != found->position.rank) return MEMBER_OTHER_RANK;
    if (!found->device.is_gpu && is_busy(found, use->tag)) return MEMBER_TAG_BUSY;
    return MEMBER_OK;
}

/* Adds an operation to those in flight on a member. */
static void begin_use(member_use *use, member *member)
{
    use->member = member;
    use->ctx = member->ctx;
    use->next = member->uses;
    member->uses = use;
}

member_status member_enter(member_use *use, const char *name, member_device device,
                           member_position *position)
{
    pthread_mutex_lock(&mutex);
    member *found = find_member(name, device, false);
    const bool was_open = found == NULL && find_member(name, device, true) != NULL;
    const member_status absent = was_open ? MEMBER_CLOSED : MEMBER_NONE;
    const member_status answer = found == NULL ? absent : check_entry(found, use, position);
    if (answer == MEMBER_OK)
        begin_use(use, found);
    else if (found != NULL)
        notify_peers(found->ctx, use->tag, answer);
    if (found != NULL) *position = found->position;
    pthread_mutex_unlock(&mutex);
    return answer;
}

member_status member_borrow(member_use *use, member_device device)
{
    pthread_mutex_lock(&mutex);
    member *found = find_member(NULL, device, false);
    if (found != NULL) begin_use(use, found);
    pthread_mutex_unlock(&mutex);
    return found != NULL ? MEMBER_OK : MEMBER_NONE;
}

void member_leave(member_use *use)
{
    pthread_mutex_lock(&mutex);
    member_use **at = &use->member->uses;
    while (*at != use) at = &(*at)->next;
    *at = use->next;
    pthread_cond_broadcast(&use_ended);
    pthread_mutex_unlock(&mutex);
}

/* Frees the struct of a closed member. Called when the group is opened again on this device. */
static void forget_closed(const char *name, member_device device)
{
    for (member **at = &members; *at != NULL; at = &(*at)->next) {
        member *found = *at;
        if (!found->is_closed || found->ctx != NULL || !matches_device(found, name, device))
            continue;
        *at = found->next;
        free(found);
        return;
    }
}

FFI_EXPORT int epic_jax_member_add(const char *name, int is_gpu, int32_t ordinal,
                                   const char *devices, int32_t rank, epic_context *ctx)
{
    const member_device device = {is_gpu != 0, ordinal};
    member *new_member = calloc(1, sizeof *new_member);
    if (new_member == NULL) return 2;
    pthread_mutex_lock(&mutex);
    const bool refused = strlen(name) >= MEMBER_NAME_BYTES ||
                         strlen(devices) >= MEMBER_DEVICES_BYTES ||
                         find_member(name, device, false) != NULL;
    if (!refused) {
        forget_closed(name, device);
        strcpy(new_member->name, name);
        strcpy(new_member->position.devices, devices);
        new_member->position.rank = rank;
        new_member->device = device;
        new_member->ctx = ctx;
        new_member->next = members;
        members = new_member;
    }
    pthread_mutex_unlock(&mutex);
    if (refused) free(new_member);
    return refused;
}

FFI_EXPORT epic_context *epic_jax_member_remove(const char *name, int is_gpu, int32_t ordinal)
{
    const member_device device = {is_gpu != 0, ordinal};
    pthread_mutex_lock(&mutex);
    member *found = find_member(name, device, false);
    epic_context *ctx = NULL;
    if (found != NULL) {
        found->is_closed = true;
        while (found->uses != NULL) pthread_cond_wait(&use_ended, &mutex);
        ctx = found->ctx;
        found->ctx = NULL;
    }
    pthread_mutex_unlock(&mutex);
    return ctx;
}
