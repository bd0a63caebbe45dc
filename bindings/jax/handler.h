/* SPDX-License-Identifier: Apache-2.0 */
/* Handlers of collective operations, from XLA's call to its end.
 *
 * A handler_operation is a table: the arrays of a call, the field of the core's arguments that
 * each one fills, and the function of the core to run.  On the CPU the function runs on a
 * thread of pool.c, which then sets XLA's future.  On a GPU the handler enqueues the kernels on
 * XLA's stream before it returns.  steps.c and moe.c have the tables. */
#ifndef EPIC_JAX_HANDLER_H
#define EPIC_JAX_HANDLER_H

#include "ffi.h"
#include "members.h"
#include "pool.h"

/* Kind of an operation, in the low bits of its tag. */
typedef enum handler_role {
    ROLE_PLAN = 0,
    ROLE_DISPATCH = 1,
    ROLE_COMBINE = 2,
    ROLE_DISPATCH_BACKWARD = 3,
    ROLE_COMBINE_BACKWARD = 4,
    ROLE_SUM = 5,
    ROLE_MOE = 6,
    ROLE_MOE_BACKWARD = 7,
    ROLE_SUM_REPLICAS = 8
} handler_role;

/* Number of a plan: the caller's channel if it passed one, else the number of the call site. */
typedef uint32_t handler_channel;

/* Sizes of a call.  Each array lists its dimensions by these names, and the handler refuses an
 * array whose number of elements is not their product. */
typedef enum handler_dim {
    DIM_ONE,
    DIM_ANY, /* any number of bytes: the core checks it */
    DIM_TOKENS,
    DIM_TOP_K,
    DIM_SLOTS,
    DIM_HIDDEN,
    DIM_SCALES,       /* scales of a row */
    DIM_SLOT_COLUMNS, /* weights of a slot: 1, or top_k with layout flat */
    DIM_EXPERTS,
    DIM_LOGICAL,
    DIM_LOCAL,   /* experts of this rank */
    DIM_COUNTED, /* entries of expert_rows: DIM_LOCAL, or DIM_EXPERTS with rank_of_expert */
    DIM_COLUMNS, /* columns of the logits */
    DIM_WIDTH,
    DIM_INNER,
    DIM_SHARED_WIDTH,
    DIM_SHARED_INNER,
    DIM_TABLE_ROWS,
    NUM_DIMS
} handler_dim;

enum { HANDLER_DIMS = 3 };

/* One call of an operation.  Each operation has a larger struct that begins with this one.
 *
 * XLA keeps the arrays alive until the future is set, but not the frame.  So the call has
 * copies of everything that it uses later. */
typedef struct handler_call {
    pool_task task;
    member_use use;
    const struct handler_operation *operation;
    const XLA_FFI_Api *api;
    XLA_FFI_Future *future;
    handler_channel channel;
    uint32_t site;
    uint32_t row_type, weight_type; /* types for HANDLER_ROW_TYPE, HANDLER_WEIGHT_TYPE */
    int64_t sizes[NUM_DIMS];        /* indexed by handler_dim */
    int32_t rank;                   /* this device's rank in the program's mesh; -1: unknown */
    bool on_device;
} handler_call;

/* Kind of an entry in an operation's table. */
typedef enum handler_kind {
    HANDLER_ARRAY,
    HANDLER_PLAN,     /* a finished plan: its bytes, and the channel in its tail */
    HANDLER_NEW_PLAN, /* the memory of a plan that this call makes */
    HANDLER_SITE,     /* two int32: the number of the call site, and the rank */
    HANDLER_CHANNEL   /* one int32: the caller's channel, or -1 */
} handler_kind;

/* Values of handler_array.types that stand for a type of the call. */
enum {
    HANDLER_ROW_TYPE = 1u << 27,   /* the type of the array with HANDLER_SETS_TYPE */
    HANDLER_WIDE_TYPE = 1u << 28,  /* EPIC_F64 if the rows are EPIC_F64, else EPIC_F32 */
    HANDLER_WEIGHT_TYPE = 1u << 29 /* the type of the experts' weights */
};
/* Flags of an array. */
enum { HANDLER_ARG, HANDLER_RESULT = 1, HANDLER_OPTIONAL = 2, HANDLER_SETS_TYPE = 4 };

/* An entry in an operation's table.  The last five fields are offsets into the call's struct,
 * where the handler stores a value; 0: it does not store it. */
typedef struct handler_array {
    handler_kind kind;
    uint32_t flags;
    const char *name;
    uint32_t types;             /* a set of FFI_SET bits, or a HANDLER_*_TYPE */
    uint8_t dims[HANDLER_DIMS]; /* the product of these sizes is its number of elements */
    uint8_t sets_rows;          /* the size that its number of rows defines; 0: none */
    uint8_t sets_columns;       /* the size that its number of columns defines; 0: none */
    size_t data;                /* void *: its address */
    size_t rows;                /* epic_rows */
    size_t element;             /* uint32_t: its type */
    size_t num_rows;            /* int64_t: its number of rows */
    size_t count;               /* int64_t or size_t: its number of elements */
} handler_array;

/* clang-format off */
#define HANDLER_DATA(how, text, must, offset, ...) \
    {.flags = how, .name = text, .types = must, .data = offset, .dims = {__VA_ARGS__}}
#define HANDLER_ROWS(how, text, must, offset, ...) \
    {.flags = how, .name = text, .types = must, .rows = offset, .dims = {__VA_ARGS__}}
/* clang-format on */
#define HANDLER_LENGTH(arrays) ((int)(sizeof(arrays) / sizeof *(arrays)))

/* An operation: one per custom-call target. */
typedef struct handler_operation {
    const char *what; /* "dispatch" */
    handler_role role;
    size_t bytes;       /* size of its call struct */
    size_t call_offset; /* offset of the epic_call in that struct */
    const handler_array *arrays;
    int num_arrays;
    /* Reads attributes and sets sizes, before the arrays are read. */
    void (*read)(ffi_reader *reader, handler_call *call);
    /* Checks the arrays after they are read; may be NULL. */
    void (*check)(ffi_reader *reader, handler_call *call);
    epic_result (*run)(handler_call *call);
} handler_operation;

enum { HANDLER_PLAN_TAIL = 16 }; /* bytes after the core's plan: its channel, then zeros */

/* Run a handler of an operation.  in_graphs: XLA may put the call into a command buffer. */
ffi_error *handler_run_on_host(ffi_frame *frame, const handler_operation *operation);
ffi_error *handler_run_on_gpu(ffi_frame *frame, const handler_operation *operation,
                              bool in_graphs);

/* Defines the exported handlers: for the CPU, for CUDA with command buffers, and for CUDA
 * without. */
#define HANDLER_EXPORTS(name)                                        \
    FFI_EXPORT ffi_error *epic_jax_##name(ffi_frame *frame)          \
    {                                                                \
        return handler_run_on_host(frame, &name##_operation);        \
    }                                                                \
    FFI_EXPORT ffi_error *epic_jax_cuda_##name(ffi_frame *frame)     \
    {                                                                \
        return handler_run_on_gpu(frame, &name##_operation, true);   \
    }                                                                \
    FFI_EXPORT ffi_error *epic_jax_no_graph_##name(ffi_frame *frame) \
    {                                                                \
        return handler_run_on_gpu(frame, &name##_operation, false);  \
    }

/* Writes the tail of a plan.  Later calls on the plan read the channel from it, on the host
 * only. */
void handler_write_channel(const handler_call *call, void *plan, size_t plan_bytes);

#endif
