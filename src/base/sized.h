/* SPDX-License-Identifier: Apache-2.0 */
/* Structs that travel with their size: how a caller's struct becomes ours, and ours a caller's. */
#ifndef EPIC_SIZED_H
#define EPIC_SIZED_H

#include "base/error.h"

/* Every struct that has a size, with the last field that it had in release 0.1: no caller has a
 * smaller one, so a smaller size is a mistake, mostly sizeof of a pointer.  Rows never change;
 * fields that are appended to a struct change nothing here. */
#define SIZED_STRUCTS(ROW)                         \
    ROW(epic_tcp, timeout_ms)                      \
    ROW(epic_config, native)                       \
    ROW(epic_failure_info, sentence)               \
    ROW(epic_layer, flags)                         \
    ROW(epic_plan_args, demand)                    \
    ROW(epic_plan_info, rank_offset)               \
    ROW(epic_dispatch_args, reserved)              \
    ROW(epic_combine_args, flags)                  \
    ROW(epic_dispatch_backward_args, flags)        \
    ROW(epic_combine_backward_args, reserved)      \
    ROW(epic_allreduce_sum_args, flags)            \
    ROW(epic_sum_replicas_args, reserved)          \
    ROW(epic_memory_info, plan_bytes)              \
    ROW(epic_router, scale)                        \
    ROW(epic_router_args, flags)                   \
    ROW(epic_router_backward_args, flags)          \
    ROW(epic_balance_loss_args, loss_type)         \
    ROW(epic_balance_loss_backward_args, reserved) \
    ROW(epic_z_loss_args, loss_type)               \
    ROW(epic_z_loss_backward_args, reserved)       \
    ROW(epic_bias_update_args, flags)              \
    ROW(epic_layer_info, first_expert)             \
    ROW(epic_dispatcher_config, ctx)               \
    ROW(epic_slots, num_local_experts)             \
    ROW(epic_experts, alpha)                       \
    ROW(epic_experts_memory_info, backward_bytes)  \
    ROW(epic_experts_args, weights_type)           \
    ROW(epic_experts_backward_args, weights_type)  \
    ROW(epic_moe, reserved)                        \
    ROW(epic_moe_memory_info, backward_bytes)      \
    ROW(epic_moe_weights, w_shared_gate)           \
    ROW(epic_moe_args, reserved)                   \
    ROW(epic_moe_gradients, w_shared_gate)         \
    ROW(epic_moe_backward_args, loss_type)

typedef struct sized_type {
    const char *name;
    size_t bytes; /* in this library */
    size_t first; /* in release 0.1 */
} sized_type;

#define SIZED_NUMBER(type, last) SIZED_##type,
enum { SIZED_STRUCTS(SIZED_NUMBER) NUM_SIZED };

extern const sized_type sized_types[NUM_SIZED];

/* The sized_type of what `ours` points to; a struct that is missing above does not compile. */
#define SIZED_CASE(type, last) , type * : SIZED_##type
#define SIZED_TYPE(ours) (&sized_types[_Generic((ours)SIZED_STRUCTS(SIZED_CASE))])

/* Copies a caller's struct into ours.  Shorter than ours: the rest is zero.  Longer: the tail
 * that we do not know must be zero.  EPIC_EINVAL for that, for NULL, and for a size that never
 * was the struct's; `name` is what the caller calls it. */
epic_result sized_read(void *ours, const sized_type *type, const void *theirs, size_t size,
                       const char *name);

/* Is there a place for an answer of this type?  EPIC_EINVAL. */
epic_result sized_place(const void *out, const sized_type *type, size_t size, const char *name);

/* Writes an answer to such a place: as much as fits, zeros where the caller's is longer. */
void sized_write(void *out, const void *ours, const sized_type *type, size_t size);

#define READ_SIZED(ours, theirs, size, name) \
    sized_read(ours, SIZED_TYPE(ours), theirs, size, name)
#define CHECK_PLACE(out, size) sized_place(out, SIZED_TYPE(out), size, "out")
#define WRITE_SIZED(out, ours, size) sized_write(out, ours, SIZED_TYPE(out), size)

#endif
