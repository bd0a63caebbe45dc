/* SPDX-License-Identifier: Apache-2.0 */
/* A call of an operator, read in order: arguments, results, errors.
 *
 * A kernel gets a stack of 64-bit values, the arguments in the order of the schema:
 *     Tensor         a handle that is the kernel's to delete
 *     Tensor?        0, or a heap cell, the kernel's to delete, that holds such a handle
 *     int, SymInt    an int64_t
 *     float          the bits of a double
 * Results overwrite the stack from its start; a returned handle is torch's.
 *
 * An operator NAME_out has the arguments of NAME and behind them one Tensor? for each result, which
 * the kernel of NAME writes into; 0: that result is not wanted.  Both run the same lines: what
 * call_result gives is made, or the caller's.
 *
 * A call keeps its first error and gives harmless values from then on.  So a kernel reads all of
 * its arguments, runs the core unless call.failed, and ends with call_end, which deletes what the
 * call owns and throws the error. */
#ifndef EPIC_TORCH_CALL_H
#define EPIC_TORCH_CALL_H

#include "epic/epic.h"
#include "groups.h"
#include "shim.h"

enum { CALL_TENSORS = 36, CALL_DIMS = 8 }; /* most of an operator, and of a tensor */

#define CALL_U8 100u      /* beside epic_type: bytes of plans and memory */
#define CALL_ROWS 101u    /* any type that is added: F32, BF16, F16, F64 */
#define CALL_FLOAT 102u   /* F32 or F64 */
#define CALL_INDEX 103u   /* I32 or I64 */
#define CALL_MATRIX 104u  /* of weights: CALL_ROWS, or E4M3 */
#define CALL_WEIGHTS 105u /* any type and dimensions: comes as F32 */
#define CALL_OTHER 255u

typedef struct call_text {
    char text[80];
} call_text;

typedef struct call_span { /* where an argument lies */
    const char *name;
    uintptr_t begin, end;
} call_span;

typedef struct torch_call {
    const char *op;
    torch_value *stack;
    int next;     /* argument to be read */
    bool has_out; /* NAME_out: results are arguments */
    int num_owned, num_made, num_spans;
    torch_tensor owned[2 * CALL_TENSORS]; /* an argument may have a copy */
    torch_tensor made[CALL_TENSORS];
    call_span spans[CALL_TENSORS];
    group_place place; /* of the first tensor, which the others share */
    group_use use;     /* after call_enter */
    void *guard;       /* CUDA: makes the device the thread's */
    bool failed;
    char error[1024];
} torch_call;

typedef struct call_array {
    void *data;   /* NULL: the array is absent; never NULL for one that is there */
    int64_t rows; /* all dimensions but the last; of one dimension: its length */
    int64_t columns;
    int64_t count;
    int64_t bytes;
    uint32_t type; /* an epic_type, or CALL_U8 */
    int64_t dim;
    const int64_t *sizes; /* [dim]: an argument's, valid until call_end */
} call_array;

/* num_results: as the kernel was told; 0: results are arguments, or there are none. */
torch_call call_begin(const char *op, torch_value *stack, uint64_t num_results);
void call_fail(torch_call *call, epic_result result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* "[3, 4]", for sentences. */
call_text call_shape(int64_t dim, const int64_t *sizes);

/* The next argument.  `type`: an epic_type, or one of CALL_; dim: the dimensions needed; for 2 it may
 * have more, of which all but the last are rows.  Of one that is not contiguous it is a copy, as
 * gradients often are not; one to be written must be contiguous, and of these dimensions. */
call_array call_arg(torch_call *call, const char *name, uint32_t type, int64_t dim);
call_array call_arg_or_none(torch_call *call, const char *name, uint32_t type, int64_t dim);
call_array call_arg_written(torch_call *call, const char *name, uint32_t type, int64_t dim);
/* Of an array that is there: the core is told no types of each, and no lengths. */
void call_check_type(torch_call *call, const char *name, call_array array, uint32_t type);
void call_check_count(torch_call *call, const char *name, call_array array, int64_t count);
void call_order_token(
    torch_call *call); /* the tensor that orders the calls of a context: never read */
int64_t call_int(torch_call *call);
uint32_t call_uint(torch_call *call, const char *name);
double call_float(torch_call *call);

/* The next two arguments, `int group, int tag`; the core's call, and the context in call->use. */
epic_call call_enter(torch_call *call);
/* The same in two, where the tag stands apart. */
epic_call call_enter_group(torch_call *call);
/* The same of a layer that the group keeps: the next argument is its number. */
epic_call call_enter_layer(torch_call *call, group_layer *layer);
uint64_t call_tag(torch_call *call);
/* Of a local operator, whose group is 0 where no context is needed: host memory. */
epic_call call_enter_local(torch_call *call);

/* After either: does the core compute on a GPU? */
bool call_on_gpu(const torch_call *call);

/* The next result; columns -1: of one dimension. */
call_array call_result(torch_call *call, const char *name, uint32_t type, int64_t rows,
                       int64_t columns);
/* Of the shape of an argument; absent as that. */
call_array call_result_like(torch_call *call, const char *name, uint32_t type, call_array like);
/* A result of bytes. */
call_array call_memory(torch_call *call, const char *name, int64_t bytes);
/* An absent one: no elements. */
void call_no_result(torch_call *call, const char *name);
/* Memory that goes with the call. */
call_array call_workspace(torch_call *call, int64_t bytes);

/* What the core said. */
void call_check_result(torch_call *call, epic_result result);
/* The end: results on the stack, or the error thrown. */
void call_end(torch_call *call);

epic_rows call_rows(call_array array);
epic_const_rows call_const_rows(call_array array);

#endif
