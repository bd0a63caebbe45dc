/* SPDX-License-Identifier: Apache-2.0 */
/* The contexts of this process. Operators take the id of a group as argument, not a pointer, so
 * that a call on a closed group returns an error. With a pointer, such a call would read freed
 * memory. */
#ifndef EPIC_TORCH_GROUPS_H
#define EPIC_TORCH_GROUPS_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

/* A device, as torch numbers it. */
typedef struct group_device {
    int32_t device_type; /* TORCH_CPU or TORCH_CUDA; -1: not yet known */
    int32_t device_index;
} group_device;

typedef struct group group;

/* Use of a group by one call, from group_enter() to group_leave(). */
typedef struct group_use {
    group *group; /* NULL: no group was entered */
    epic_context *ctx;
    group_device device;
} group_use;

/* Begins a use of the group with this id, and fills in *use. The group cannot be removed until
 * group_leave() ends the use. Returns false if no such group is open. Any thread may call the
 * functions of this header. */
bool group_enter(group_use *use, int64_t number);
void group_leave(group_use *use);

/* A layer that a group stores for its plans. */
typedef struct group_layer {
    epic_layer layer;
    int64_t capacity; /* number of slots per rank that suffices for any choice of experts */
    /* size of a plan in bytes without the counts that follow it; a multiple of 16 */
    int64_t plan_bytes;
    bool has_int64_counts; /* expert_rows and expert_tokens are int64; otherwise int32 */
} group_layer;

/* Stores a layer in a group. Returns the id of the layer, which also identifies the group and
 * is valid until the group closes. Returns 0 if out of memory, if the group has too many
 * layers, or if there is no such group. */
int64_t group_add_layer(int64_t group, const group_layer *layer);
/* Begins a use of the group of a layer, and copies the layer to *layer. Returns false if the
 * group is not open. */
bool group_enter_layer(group_use *use, int64_t number, group_layer *layer);

/* For Python: registers a context as a group. Returns the id of the group, which is at least 1
 * and is never used again. Returns 0 if out of memory. */
int64_t epic_torch_group_add(epic_context *ctx, int32_t device_type, int32_t device_index);

/* For Python: removes the group with this id, waits until its calls in flight have ended, and
 * returns its context. */
epic_context *epic_torch_group_remove(int64_t number);

/* For Python: makes further calls on the group fail, and waits until the calls in flight have
 * ended, for at most `ms` milliseconds. Returns the number of calls that are still in
 * flight. */
int32_t epic_torch_group_drain(int64_t number, int32_t ms);

#endif
