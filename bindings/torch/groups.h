/* SPDX-License-Identifier: Apache-2.0 */
/* The contexts of this process by number.  Operators get a number instead of a pointer, so that the
 * use of a closed group is an error and not undefined behavior. */
#ifndef EPIC_TORCH_GROUPS_H
#define EPIC_TORCH_GROUPS_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

/* A device, as torch numbers it. */
typedef struct group_place {
    int32_t device_type; /* TORCH_CPU or TORCH_CUDA; -1: not known yet */
    int32_t device_index;
} group_place;

typedef struct group group;

/* The use of a group by one call, from group_enter() to group_leave(). */
typedef struct group_use {
    group *group; /* NULL: no group was entered */
    epic_context *ctx;
    group_place place;
} group_use;

/* Enters the group of that number, which cannot be removed until group_leave().  Returns false if no
 * such group is open.  Thread-safe, like all functions here. */
bool group_enter(group_use *use, int64_t number);
void group_leave(group_use *use);

/* A layer that a group keeps for its plans. */
typedef struct group_layer {
    epic_layer layer;
    int64_t capacity;   /* slots of a rank that can never overflow */
    int64_t plan_bytes; /* without the counts that follow a plan; a multiple of 16 */
} group_layer;

/* Keeps a layer.  Returns its number, which also identifies the group and is valid until the group
 * closes; 0: no memory, too many layers, or no such group. */
int64_t group_add_layer(int64_t group, const group_layer *layer);
/* Enters the group of a layer and copies the layer. */
bool group_enter_layer(group_use *use, int64_t number, group_layer *layer);

/* Called by Python: registers a context.  Returns its number, from 1 on, which is never used twice;
 * 0: no memory. */
int64_t epic_torch_group_add(epic_context *ctx, int32_t device_type, int32_t device_index);

/* Called by Python: removes the number, waits until calls in flight end, and returns the context. */
epic_context *epic_torch_group_remove(int64_t number);

/* Called by Python: refuses further calls and waits at most `ms` until those in flight end.  Returns
 * how many are still in flight. */
int32_t epic_torch_group_drain(int64_t number, int32_t ms);

#endif
