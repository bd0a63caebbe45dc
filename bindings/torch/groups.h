/* SPDX-License-Identifier: Apache-2.0 */
/* The contexts of this process by number.  Operators get the number: one of a group that was
 * closed is an error and not a stray pointer. */
#ifndef EPIC_TORCH_GROUPS_H
#define EPIC_TORCH_GROUPS_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

typedef struct group_place {
    int32_t device_type; /* TORCH_CPU or TORCH_CUDA; -1: none yet */
    int32_t device_index;
} group_place;

typedef struct group group;

/* A call in a group, from group_enter to group_leave. */
typedef struct group_use {
    group *group; /* NULL: in none */
    epic_context *ctx;
    group_place place;
} group_use;

bool group_enter(group_use *use, int64_t number); /* false: no such group is open */
void group_leave(group_use *use);

/* A layer as a group's plans have it. */
typedef struct group_layer {
    epic_layer layer;
    int64_t capacity;   /* of a rank, that can never overflow */
    int64_t plan_bytes; /* without the counts that follow a plan; a multiple of 16 */
} group_layer;

/* Numbers of layers say their group too, and are valid until it closes.  0: no memory, no group. */
int64_t group_add_layer(int64_t group, const group_layer *layer);
bool group_enter_layer(group_use *use, int64_t number, group_layer *layer);

/* For Python.  The number of a context, from 1 on, never given twice; 0: no memory. */
int64_t epic_torch_group_add(epic_context *ctx, int32_t device_type, int32_t device_index);

/* Takes the number away, waits for the calls in flight to end and returns the context. */
epic_context *epic_torch_group_remove(int64_t number);
int32_t epic_torch_group_drain(int64_t number, int32_t ms);

#endif
