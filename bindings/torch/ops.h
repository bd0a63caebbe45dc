/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of operators. Each file that implements operators has one table. register.c
 * registers the operators of all tables. */
#ifndef EPIC_TORCH_OPS_H
#define EPIC_TORCH_OPS_H

#include "shim.h"

/* An operator. If it has results, it is also registered as NAME_out (call.h). */
typedef struct torch_op {
    const char *name; /* name without the namespace epic:: */
    const char *schema;
    torch_kernel *kernel; /* runs for tensors on CPUs and on GPUs */
} torch_op;

typedef struct torch_ops {
    const torch_op *ops;
    int count;
} torch_ops;

/* Return the tables of the files steps.c, router.c, experts.c and moe.c. */
torch_ops steps_ops(void);
torch_ops router_ops(void);
torch_ops experts_ops(void);
torch_ops moe_ops(void);

#define OPS_OF(array) ((torch_ops){array, (int)(sizeof(array) / sizeof *(array))})
#define OP(name, schema)               \
    {                                  \
#name, #name schema, op_##name \
    }

#endif
