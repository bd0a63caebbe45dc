/* SPDX-License-Identifier: Apache-2.0 */
/* Members of groups: the core's context of each device in each open group.
 *
 * A compiled program has only the name of its group.  The handlers look up the member at every
 * call, so a group may be closed and opened again without compiling the program again. */
#ifndef EPIC_JAX_MEMBERS_H
#define EPIC_JAX_MEMBERS_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

enum { MEMBER_NAME_BYTES = 64, MEMBER_DEVICES_BYTES = 256 };

typedef struct member member;

typedef struct member_device {
    bool is_gpu;
    int32_t ordinal; /* XLA's number of the device in its platform */
} member_device;

/* An operation in flight on a member, from member_enter() to member_leave(). */
typedef struct member_use {
    member *member;
    epic_context *ctx;
    uint64_t tag;
    struct member_use *next; /* used by members.c */
} member_use;

/* Result of entering a member. */
typedef enum member_status {
    MEMBER_OK,
    MEMBER_NONE,          /* no group of this name is open on the device */
    MEMBER_OTHER_DEVICES, /* the group was opened with other devices */
    MEMBER_OTHER_RANK,    /* the device has another rank in the program's mesh */
    MEMBER_TAG_BUSY       /* an operation with this tag is in flight (host only) */
} member_status;

/* Position of a member: the group's devices as text of epic/jax/meshes.py, and the device's
 * rank in the group; -1: unknown. */
typedef struct member_position {
    char devices[MEMBER_DEVICES_BYTES];
    int32_t rank;
} member_position;

/* Begins an operation of use->tag on the member of this device in the group `name`, if the
 * member's position is the one that the program expects.  Writes the member's position to
 * `position`.
 *
 * All ranks get MEMBER_OTHER_DEVICES, because they run the same program.  Only some ranks may
 * get MEMBER_OTHER_RANK or MEMBER_TAG_BUSY, so the call then notifies the peers (epic_abort)
 * that this operation will not come. */
member_status member_enter(member_use *use, const char *name, member_device device,
                           member_position *position);

/* Ends the operation. */
void member_leave(member_use *use);

/* Begins local work on any member of the device, which no peer waits for. */
member_status member_borrow(member_use *use, member_device device);

/* Adds a member; epic/jax/groups.py calls it.  Returns 0; 1 if the name is taken on that device
 * or a text is too long; 2 without memory. */
int epic_jax_member_add(const char *name, int is_gpu, int32_t ordinal, const char *devices,
                        int32_t rank, epic_context *ctx);

/* Removes a member after its operations in flight.  Returns its context; NULL if there is no
 * such member. */
epic_context *epic_jax_member_remove(const char *name, int is_gpu, int32_t ordinal);

#endif
