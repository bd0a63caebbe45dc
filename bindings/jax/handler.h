/* SPDX-License-Identifier: Apache-2.0 */
/* One collective operation, from XLA's call to its end.
 *
 * An operation is a table: which arrays its call has, where they go in the core's arguments, and
 * what to do with them.  On the CPU it runs on a thread that sets XLA's future; on a GPU it is
 * enqueued on XLA's stream before the handler returns. */
#ifndef EPIC_JAX_HANDLER_H
#define EPIC_JAX_HANDLER_H

#include "ffi.h"
#include "members.h"
#include "pool.h"

/* What an operation does: the last bits of its tag. */
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

/* The number of a plan: the caller's channel if there is one, else of its call site. */
typedef uint32_t handler_channel;

/* The sizes that the arrays of a call are made of.  An array names its dimensions by these, and the
 * call is refused where the number of its elements is another one. */
typedef enum handler_dim {
    DIM_ONE,
    DIM_ANY, /* bytes of memory: the core checks them */
    DIM_TOKENS,
    DIM_TOP_K,
    DIM_SLOTS,
    DIM_HIDDEN,
    DIM_SCALES,       /* of a row */
    DIM_SLOT_COLUMNS, /* weights of a slot: 1; layout flat: top_k */
    DIM_EXPERTS,
    DIM_LOGICAL,
    DIM_LOCAL,   /* experts of a rank */
    DIM_COUNTED, /* entries of expert_rows: DIM_LOCAL, with rank_of_expert DIM_EXPERTS */
    DIM_COLUMNS, /* of the logits */
    DIM_WIDTH,
    DIM_INNER,
    DIM_SHARED_WIDTH,
    DIM_SHARED_INNER,
    DIM_TABLE_ROWS,
    NUM_DIMS
} handler_dim;

enum { HANDLER_DIMS = 3 };

/* A job begins with this; what follows is the operation's.  XLA keeps arrays alive until the
 * future is set, but not the frame, so all that is used is copied. */
typedef struct handler_call {
    pool_task task;
    member_use use;
    const struct handler_operation *operation;
    const XLA_FFI_Api *api;
    XLA_FFI_Future *future;
    handler_channel channel;
    uint32_t site;
    uint32_t row_type, weight_type; /* for HANDLER_ROW_TYPE and HANDLER_WEIGHT_TYPE */
    int64_t sizes[NUM_DIMS];        /* by handler_dim */
    int32_t rank;                   /* of this device in the mesh of the program; -1: unknown */
    bool on_device;
} handler_call;

typedef enum handler_kind {
    HANDLER_ARRAY,
    HANDLER_PLAN,     /* a finished plan: the bytes before its tail, and its channel */
    HANDLER_NEW_PLAN, /* the plan that will be made */
    HANDLER_SITE,     /* the id of the call site, and the rank */
    HANDLER_CHANNEL   /* the caller's, for an operation with a channel of its own */
} handler_kind;

/* In the place of a set of types. */
enum {
    HANDLER_ROW_TYPE = 1u << 27,   /* the rows' type: of the array that leads */
    HANDLER_WIDE_TYPE = 1u << 28,  /* EPIC_F64 for rows of that, else EPIC_F32 */
    HANDLER_WEIGHT_TYPE = 1u << 29 /* of the experts' weights */
};
enum { HANDLER_ARG, HANDLER_RESULT = 1, HANDLER_OPTIONAL = 2, HANDLER_SETS_TYPE = 4 };

/* An array of a call.  The last five are offsets into the job, 0: not wanted. */
typedef struct handler_array {
    handler_kind kind;
    uint32_t flags;
    const char *name;
    uint32_t types;             /* a set of FFI_SET bits, or one of the above */
    uint8_t dims[HANDLER_DIMS]; /* handler_dims, whose product is the number of its elements */
    uint8_t sets_rows;          /* the handler_dim that this array's rows define; 0: none */
    uint8_t sets_columns;       /* likewise */
    size_t data;                /* a pointer */
    size_t rows;                /* epic_rows */
    size_t element;             /* uint32_t: its type */
    size_t num_rows;            /* int64_t */
    size_t count;               /* int64_t or size_t: elements; bytes of a plan */
} handler_array;

/* clang-format off */
#define HANDLER_DATA(how, text, must, offset, ...) \
    {.flags = how, .name = text, .types = must, .data = offset, .dims = {__VA_ARGS__}}
#define HANDLER_ROWS(how, text, must, offset, ...) \
    {.flags = how, .name = text, .types = must, .rows = offset, .dims = {__VA_ARGS__}}
/* clang-format on */
#define HANDLER_LENGTH(arrays) ((int)(sizeof(arrays) / sizeof *(arrays)))

typedef struct handler_operation {
    const char *what; /* "dispatch" */
    handler_role role;
    size_t bytes;       /* of its job */
    size_t call_offset; /* where in it the epic_call is */
    const handler_array *arrays;
    int num_arrays;
    void (*read)(ffi_reader *reader,
                 handler_call *call); /* attributes and sizes, before the arrays */
    void (*check)(ffi_reader *reader, handler_call *call); /* after the arrays; or NULL */
    epic_result (*run)(handler_call *call);
} handler_operation;

enum { HANDLER_PLAN_TAIL = 16 }; /* bytes behind the core's plan: its channel, then zeros */

/* What the handlers of an operation do. */
ffi_error *handler_run_on_host(ffi_frame *frame, const handler_operation *operation);
ffi_error *handler_run_on_gpu(ffi_frame *frame, const handler_operation *operation,
                              bool in_graphs);

/* The exports: for the CPU; for CUDA inside of XLA's command buffers, and outside only. */
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

/* Writes the tail of a plan, from whose host bytes the channel is read again. */
void handler_write_channel(const handler_call *call, void *plan, size_t plan_bytes);

#endif
