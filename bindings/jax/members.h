/* SPDX-License-Identifier: Apache-2.0 */
/* Members of groups. A member is the core's context of one device in one open group.
 *
 * A compiled program contains only the name of its group. The handlers look up the member in
 * every call, so a group may be closed and opened again without compiling the program again.
 * When a member is closed, its struct stays in the list, so that a program that still uses the
 * closed group gets an error text with the name of the group. */
#ifndef EPIC_JAX_MEMBERS_H
#define EPIC_JAX_MEMBERS_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

enum { MEMBER_NAME_BYTES = 64, MEMBER_DEVICES_BYTES = 256 };

typedef struct member member;

/* A device, as XLA numbers it. */
typedef struct member_device {
    bool is_gpu;
    int32_t ordinal; /* index of the device among the CPU or the GPU devices of the process */
} member_device;

/* An operation in flight on a member: from member_enter() or member_borrow() to
 * member_leave(). */
typedef struct member_use {
    member *member;
    epic_context *ctx;
    uint64_t tag;
    struct member_use *next; /* next in the list of members.c */
} member_use;

/* Result of entering a member. */
typedef enum member_status {
    MEMBER_OK,
    MEMBER_NONE,          /* no group of this name was ever open on the device */
    MEMBER_CLOSED,        /* the group of this name was open on the device, and is closed now */
    MEMBER_OTHER_DEVICES, /* the group was opened with other devices than the program's */
    /* the device's rank in the program's mesh differs from its rank in the group */
    MEMBER_OTHER_RANK,
    MEMBER_TAG_BUSY /* an operation with this tag is in flight on the member (host
                             only) */
} member_status;

/* Position of a member in its group. `devices` is a text that lists the group's devices, made
 * by epic/jax/meshes.py. `rank` is the device's rank in the group; -1: unknown. */
typedef struct member_position {
    char devices[MEMBER_DEVICES_BYTES];
    int32_t rank;
} member_position;

/* Begins an operation with the tag use->tag on the member of this device in the group `name`.
 * Before the call, *position is the position that the program expects. After it, *position is
 * the actual position of the member.
 *
 * MEMBER_OTHER_DEVICES is returned on all ranks, because they run the same program.
 * MEMBER_OTHER_RANK and MEMBER_TAG_BUSY may be returned on some ranks only. In these two cases
 * the function also aborts the operation on the peers (epic_abort), so that they do not wait
 * for this rank. */
member_status member_enter(member_use *use, const char *name, member_device device,
                           member_position *position);

void member_leave(member_use *use);

/* Begins a local call on any member of the device. Returns MEMBER_OK or MEMBER_NONE. */
member_status member_borrow(member_use *use, member_device device);

/* Adds a member. Called by epic/jax/groups.py. Returns 0 on success, and 2 if out of memory.
 * Returns 1 if the group already has a member on the device, or if `name` or `devices` is too
 * long. */
int epic_jax_member_add(const char *name, int is_gpu, int32_t ordinal, const char *devices,
                        int32_t rank, epic_context *ctx);

/* Removes a member. Waits until its operations in flight have ended. Returns its context, or
 * NULL if there is no such member. */
epic_context *epic_jax_member_remove(const char *name, int is_gpu, int32_t ordinal);

#endif
