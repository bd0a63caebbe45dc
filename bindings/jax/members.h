/* SPDX-License-Identifier: Apache-2.0 */
/* A member of a group: the context that a device has in a group of a given name.  Programs know the name alone; it is
 * looked up at every call, so a group may be closed and opened again under a compiled program. */
#ifndef EPIC_JAX_MEMBERS_H
#define EPIC_JAX_MEMBERS_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

enum { MEMBER_NAME_BYTES = 64, MEMBER_DEVICES_BYTES = 256 };

typedef struct member member;

typedef struct member_device {
    bool is_gpu;
    int32_t ordinal; /* as XLA counts them */
} member_device;

/* An operation on a member, from member_enter to member_leave. */
typedef struct member_use {
    member *member;
    epic_context *ctx;
    uint64_t tag;
    struct member_use *next; /* the members' */
} member_use;

typedef enum member_status {
    MEMBER_OK,
    MEMBER_NONE,          /* no such group on this device of that platform */
    MEMBER_OTHER_DEVICES, /* the group of that name was opened with other devices */
    MEMBER_OTHER_RANK,    /* the program's mesh has this device at another rank */
    MEMBER_TAG_BUSY       /* the tag has an operation in flight here (on the host only) */
} member_status;

/* What a program takes for granted, or what a member has: the devices of the group as epic.jax
 * writes them, "" if they are unknown, and the rank of this device, -1 if it is. */
typedef struct member_position {
    char devices[MEMBER_DEVICES_BYTES];
    int32_t rank;
} member_position;

/* Begins an operation of use->tag.  After MEMBER_OTHER_DEVICES and MEMBER_OTHER_RANK `place` is what
 * the member has.  All ranks get the first of these, as their program is the same.  After the
 * second and MEMBER_TAG_BUSY, which only some may get, the peers have been told that this operation
 * will not come. */
member_status member_enter(member_use *use, const char *name, member_device device,
                           member_position *position);
void member_leave(member_use *use);

/* The same for work that is no operation of the group: on any member of the device. */
member_status member_borrow(member_use *use, member_device device);

/* For Python.  0: done; 1: the name is taken on that device, or a text is too long; 2: no memory. */
int epic_jax_member_add(const char *name, int is_gpu, int32_t ordinal, const char *devices,
                        int32_t rank, epic_context *ctx);

/* Takes the member away, waits for its operations to end and returns its context; NULL: there was
 * none. */
epic_context *epic_jax_member_remove(const char *name, int is_gpu, int32_t ordinal);

#endif
