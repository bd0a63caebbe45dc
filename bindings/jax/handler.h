/* SPDX-License-Identifier: Apache-2.0 */
/* Handlers of collective operations. A handler is a function that XLA calls for a custom call.
 *
 * A handler_operation describes an operation: the arrays of a call, the field of the core's
 * arguments that each array fills, and the function of the core to run. On the CPU this
 * function runs on a thread of pool.c, which then completes XLA's future. On a GPU the handler
 * enqueues kernels on XLA's stream before it returns. steps.c and moe.c contain the
 * operations. */
#ifndef EPIC_JAX_HANDLER_H
#define EPIC_JAX_HANDLER_H

#include "ffi.h"
#include "members.h"
#include "pool.h"

/* Which collective operation a call runs. The low 8 bits of the operation's tag contain this
 * value. */
typedef enum handler_operation_id {
    ROLE_PLAN = 0,
    ROLE_DISPATCH = 1,
    ROLE_COMBINE = 2,
    ROLE_DISPATCH_BACKWARD = 3,
    ROLE_COMBINE_BACKWARD = 4,
    ROLE_SUM = 5,
    ROLE_MOE = 6,
    ROLE_MOE_BACKWARD = 7,
    ROLE_SUM_REPLICAS = 8
} handler_operation_id;

/* An id that all calls with the same plan have in common: the caller's channel if the caller
 * passed one, and the id of the plan's call site if not. */
typedef uint32_t handler_channel;

/* Names for the dimensions of the arrays of a call. The table entry of an array lists the
 * array's dimensions by these names. If the number of elements of an array is not the product
 * of its dimensions, the handler returns an error. */
typedef enum handler_dim {
    DIM_ONE,
    DIM_ANY, /* the array may have any number of bytes; the core checks it */
    DIM_TOKENS,
    DIM_TOP_K,
    DIM_SLOTS,
    DIM_HIDDEN,
    DIM_SCALES,       /* number of scales of a row */
    DIM_SLOT_COLUMNS, /* number of weights of a slot: 1, or top_k with layout FLAT */
    DIM_EXPERTS,
    DIM_LOGICAL,
    DIM_LOCAL, /* number of experts of this rank */
    /* number of elements of expert_rows: DIM_LOCAL, or DIM_EXPERTS with rank_of_expert */
    DIM_COUNTED,
    DIM_COLUMNS, /* number of columns of the logits */
    DIM_WIDTH,
    DIM_INNER,
    DIM_SHARED_WIDTH,
    DIM_SHARED_INNER,
    DIM_GATE_UP_SCALES, /* number of scales of an expert's w_gate_up if it is e4m3 */
    DIM_DOWN_SCALES,    /* number of scales of an expert's w_down if it is e4m3 */
    DIM_TABLE_ROWS,
    NUM_DIMS
} handler_dim;

enum { HANDLER_DIMS = 3 }; /* maximum number of dimensions in a table entry */

/* One call of an operation. The struct of each operation begins with this one.
 *
 * XLA keeps the arrays valid until the future completes, but the frame only until the handler
 * returns. So this struct contains copies of everything that is used later. */
typedef struct handler_call {
    pool_task task;
    member_use use;
    const struct handler_operation *operation;
    const XLA_FFI_Api *api;
    XLA_FFI_Future *future;
    handler_channel channel;
    uint32_t site;
    uint32_t row_type;    /* type that HANDLER_ROW_TYPE means in this call */
    uint32_t weight_set;  /* FFI_SET bits: types that HANDLER_WEIGHT_TYPE means in this call */
    uint32_t bias_type;   /* type that HANDLER_BIAS_TYPE means in this call */
    uint32_t shared_type; /* type that HANDLER_SHARED_TYPE means in this call */
    int64_t sizes[NUM_DIMS]; /* indexed by handler_dim */
    int32_t rank; /* this device's rank in the device mesh of the program; -1: unknown */
    bool on_device;
} handler_call;

/* Meaning of an entry in the table of an operation. */
typedef enum handler_kind {
    HANDLER_ARRAY, /* the entry describes one array */
    /* a plan that an earlier call made, followed by its channel (HANDLER_CHANNEL_BYTES) */
    HANDLER_PLAN,
    HANDLER_NEW_PLAN, /* memory for the plan that this call makes */
    /* two arrays of one int32 each: the id of the call site, and this device's rank */
    HANDLER_SITE,
    HANDLER_CHANNEL /* one int32: the caller's channel, or -1 for none */
} handler_kind;

/* Values of handler_array.types for types that differ from call to call. */
enum {
    /* row type of the call: the type of the array with HANDLER_SETS_TYPE, or the row type in
     * the options */
    HANDLER_ROW_TYPE = 1u << 25,
    HANDLER_WIDE_TYPE = 1u << 26,   /* EPIC_F64 if the rows are EPIC_F64, else EPIC_F32 */
    HANDLER_WEIGHT_TYPE = 1u << 27, /* the type of the experts' weights */
    HANDLER_BIAS_TYPE = 1u << 28,   /* the type of the experts' biases */
    HANDLER_SHARED_TYPE = 1u << 29  /* the type of the shared expert's weights and biases */
};
/* Flags of an array. HANDLER_RESULT: the array is a result, without it an argument.
 * HANDLER_OPTIONAL: the array may be absent. HANDLER_SETS_TYPE: the type of the array becomes
 * call->row_type. */
enum { HANDLER_ARG, HANDLER_RESULT = 1, HANDLER_OPTIONAL = 2, HANDLER_SETS_TYPE = 4 };

/* An entry in the table of an operation. The last five fields are offsets in the call struct,
 * at which the handler stores a value of the array. An offset of 0 means that the value is not
 * stored. */
typedef struct handler_array {
    handler_kind kind;
    uint32_t flags;
    const char *name;
    uint32_t types;             /* a set of FFI_SET bits, or a HANDLER_*_TYPE */
    uint8_t dims[HANDLER_DIMS]; /* dimensions: the number of elements must be their product */
    uint8_t sets_rows; /* index in call->sizes that is set to the number of rows; 0: none */
    /* index in call->sizes that is set to the number of columns; 0: none */
    uint8_t sets_columns;
    size_t data;     /* where to store its address (void *) */
    size_t rows;     /* where to store its rows (epic_rows) */
    size_t element;  /* where to store its type (uint32_t) */
    size_t num_rows; /* where to store its number of rows (int64_t) */
    size_t count;    /* where to store its number of elements (int64_t or size_t) */
} handler_array;

/* clang-format off */
#define HANDLER_DATA(how, text, must, offset, ...) \
    {.flags = how, .name = text, .types = must, .data = offset, .dims = {__VA_ARGS__}}
#define HANDLER_ROWS(how, text, must, offset, ...) \
    {.flags = how, .name = text, .types = must, .rows = offset, .dims = {__VA_ARGS__}}
/* clang-format on */
#define HANDLER_LENGTH(arrays) ((int)(sizeof(arrays) / sizeof *(arrays)))

/* An operation. Each operation is the target of one custom call. */
typedef struct handler_operation {
    const char *what; /* name in errors, such as "dispatch" */
    handler_operation_id role;
    size_t bytes;       /* size of the operation's call struct */
    size_t call_offset; /* offset of the epic_call in that struct */
    const handler_array *arrays;
    int num_arrays;
    /* Reads attributes and sets sizes, before the arrays are read. */
    void (*read)(ffi_reader *reader, handler_call *call);
    /* Checks the arrays after they are read; may be NULL. */
    void (*check)(ffi_reader *reader, handler_call *call);
    epic_result (*run)(handler_call *call);
} handler_operation;

/* number of bytes that follow the core's plan: the channel, then zeros */
enum { HANDLER_CHANNEL_BYTES = 16 };

/* Run one call of an operation, on the host or on a GPU. in_graphs is true if XLA may record
 * the call in a command buffer (a CUDA graph). Return NULL, or an error. */
ffi_error *handler_run_on_host(ffi_frame *frame, const handler_operation *operation);
ffi_error *handler_run_on_gpu(ffi_frame *frame, const handler_operation *operation,
                              bool in_graphs);

/* Defines the three exported handlers of an operation: for the CPU, for CUDA with command
 * buffers, and for CUDA without command buffers. */
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

/* Writes the channel behind the bytes of a plan (HANDLER_CHANNEL_BYTES). Later calls with this
 * plan read the channel there. Does nothing on a GPU. */
void handler_write_channel(const handler_call *call, void *plan, size_t plan_bytes);

#endif
