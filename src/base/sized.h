/* SPDX-License-Identifier: Apache-2.0 */
/* Structs that are passed with their size, so that a program that was compiled with an older or
 * newer epic.h can work with this library. */
#ifndef EPIC_SIZED_H
#define EPIC_SIZED_H

#include "base/error.h"

/* Every struct that is passed with a size, and its last field in release 0.1. A size that does
 * not include this field is a mistake of the caller, usually the sizeof of a pointer. When
 * fields are appended to a struct, its row here must not change. */
#define SIZED_STRUCTS(ROW)                         \
    ROW(epic_tcp, timeout_ms)                      \
    ROW(epic_config, native)                       \
    ROW(epic_failure_info, sentence)               \
    ROW(epic_wait_info, alone_ns)                  \
    ROW(epic_regroup_args, only)                   \
    ROW(epic_members_info, gone)                   \
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
    ROW(epic_window_args, reserved)                \
    ROW(epic_window_info, reserved)                \
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
    size_t bytes; /* size of the struct in this library */
    size_t first; /* size of the struct in release 0.1 */
} sized_type;

#define SIZED_NUMBER(type, last) SIZED_##type,
enum { SIZED_STRUCTS(SIZED_NUMBER) NUM_SIZED };

extern const sized_type sized_types[NUM_SIZED];

/* Expands to the sized_type of the struct that `ours` points to. A struct without a row in
 * SIZED_STRUCTS does not compile. */
#define SIZED_CASE(type, last) , type * : SIZED_##type
#define SIZED_TYPE(ours) (&sized_types[_Generic((ours)SIZED_STRUCTS(SIZED_CASE))])

/* Copies a caller's struct of `size` bytes to *ours. If the caller's struct is shorter, the
 * missing fields of *ours become zero. If it is longer, the additional bytes must be zero.
 * `name` is the argument's name in error texts. Returns EPIC_EINVAL if an additional byte is
 * not zero, if theirs is NULL, or if the size is less than in release 0.1 or more than 65536
 * bytes. */
epic_result sized_read(void *ours, const sized_type *type, const void *theirs, size_t size,
                       const char *name);

/* Checks that `out`, a caller's struct for results, is not NULL, and that its size is not less
 * than in release 0.1 and not more than 65536 bytes. Errors: EPIC_EINVAL. */
epic_result sized_place(const void *out, const sized_type *type, size_t size, const char *name);

/* Copies *ours to `out`, which has `size` bytes. If `out` is shorter than this library's
 * struct, copies only its beginning. If `out` is longer, appends zeros. */
void sized_write(void *out, const void *ours, const sized_type *type, size_t size);

/* These macros call the functions above, and derive the type from the pointer. */
#define READ_SIZED(ours, theirs, size, name) \
    sized_read(ours, SIZED_TYPE(ours), theirs, size, name)
#define CHECK_PLACE(out, size) sized_place(out, SIZED_TYPE(out), size, "out")
#define WRITE_SIZED(out, ours, size) sized_write(out, ours, SIZED_TYPE(out), size)

#endif
