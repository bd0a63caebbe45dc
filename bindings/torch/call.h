/* SPDX-License-Identifier: Apache-2.0 */
/* One call of an operator: reads its arguments in order, makes its results, and reports errors.
 *
 * torch calls a kernel (the C function of an operator) with a stack of 64-bit values, the arguments
 * in the order of the schema:
 *     Tensor         a handle that the kernel must delete
 *     Tensor?        0, or a heap cell that holds such a handle; the kernel must delete both
 *     int, SymInt    an int64_t
 *     float          the bits of a double
 * The results overwrite the stack from its start; torch owns the returned handles.
 *
 * An operator NAME_out has the arguments of NAME, followed by one Tensor? for each result, which the
 * kernel writes into; 0 means that the caller does not want that result.  Both operators share one
 * kernel: call_result() returns either a new tensor or the caller's.
 *
 * A call keeps its first error, and the functions below return harmless values after it.  A kernel
 * therefore reads all of its arguments, calls the core unless call.failed is set, and ends with
 * call_end(), which deletes the tensors that the call owns and throws the error. */
#ifndef EPIC_TORCH_CALL_H
#define EPIC_TORCH_CALL_H

#include "epic/epic.h"
#include "groups.h"
#include "shim.h"

/* Largest number of tensors of an operator, and of dimensions of a tensor. */
enum { CALL_TENSORS = 36, CALL_DIMS = 8 };

/* Types that arguments may have in addition to epic_type. */
#define CALL_U8 100u      /* bytes of plans and memory */
#define CALL_ROWS 101u    /* any type that the core adds: F32, BF16, F16, F64 */
#define CALL_FLOAT 102u   /* F32 or F64 */
#define CALL_INDEX 103u   /* I32 or I64 */
#define CALL_MATRIX 104u  /* experts' weights: CALL_ROWS, or E4M3 */
#define CALL_WEIGHTS 105u /* CALL_ROWS of any dimensions; read as F32 */
#define CALL_OTHER 255u

/* A short text that is returned by value. */
typedef struct call_text {
    char text[80];
} call_text;

/* The memory of an argument, which results must not share. */
typedef struct call_span {
    const char *name;
    uintptr_t begin, end;
} call_span;

/* The state of one call, on the stack of its kernel. */
typedef struct torch_call {
    const char *op; /* name of the operator, for errors */
    torch_value *stack;
    int next;     /* index of the next argument */
    bool has_out; /* the operator is NAME_out: results are arguments */
    int num_owned, num_made, num_spans;
    torch_tensor owned[2 * CALL_TENSORS]; /* arguments and their copies */
    torch_tensor made[CALL_TENSORS];
    call_span spans[CALL_TENSORS];
    group_place place; /* device of the first tensor, which all others must share */
    group_use use;     /* valid after call_enter() and its variants */
    void *guard;       /* CUDA: keeps the device current for this thread */
    bool failed;
    char error[1024];
} torch_call;

/* A tensor argument or result. */
typedef struct call_array {
    void *data;   /* NULL only if the argument is absent */
    int64_t rows; /* product of all dimensions except the last; with one dimension its length */
    int64_t columns;
    int64_t count;
    int64_t bytes;
    uint32_t type; /* an epic_type, or CALL_U8 */
    int64_t dim;
    const int64_t *sizes; /* [dim]: borrowed from the tensor, valid until call_end() */
} call_array;

/* Begins a call.  num_results: as torch passed it to the kernel; 0: the results are arguments, or
 * there are none. */
torch_call call_begin(const char *op, torch_value *stack, uint64_t num_results);
/* Records an error, unless the call has one. */
void call_fail(torch_call *call, epic_result result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Returns a shape as text, "[3, 4]" for example. */
call_text call_shape(int64_t dim, const int64_t *sizes);

/* Return the next argument.
 * type: an epic_type, or one of CALL_.
 * dim: the number of dimensions.  With 2 the tensor may have more, all of which but the last count as
 *     rows.
 * A tensor that is not contiguous is copied, as gradients often are not.  One that is written must be
 * contiguous and have exactly dim dimensions. */
call_array call_arg(torch_call *call, const char *name, uint32_t type, int64_t dim);
call_array call_arg_or_none(torch_call *call, const char *name, uint32_t type, int64_t dim);
call_array call_arg_written(torch_call *call, const char *name, uint32_t type, int64_t dim);
/* Check the type and the number of elements of an array that is present.  The core cannot check
 * them, because its arguments do not contain them. */
void call_check_type(torch_call *call, const char *name, call_array array, uint32_t type);
void call_check_count(torch_call *call, const char *name, call_array array, int64_t count);
/* Skips the tensor by which tracers order the calls of a context; the kernel never reads it. */
void call_order_token(torch_call *call);
/* Return the next argument as a number; call_uint() checks that it fits. */
int64_t call_int(torch_call *call);
uint32_t call_uint(torch_call *call, const char *name);
double call_float(torch_call *call);

/* Reads the next two arguments, `int group, int tag`, and enters the group: call->use has its
 * context.  Returns the core's call with stream and tag. */
epic_call call_enter(torch_call *call);
/* Does what call_enter() does, but reads only `int group`; call_tag() reads the tag later. */
epic_call call_enter_group(torch_call *call);
/* Reads `int layer`, enters its group and copies the layer that the group keeps. */
epic_call call_enter_layer(torch_call *call, group_layer *layer);
uint64_t call_tag(torch_call *call);
/* Reads `int group` of a local operator.  It is 0 for tensors in host memory, which need no context. */
epic_call call_enter_local(torch_call *call);

/* Returns whether the core computes on a GPU; valid after a call_enter function. */
bool call_on_gpu(const torch_call *call);

/* Returns the next result, [rows, columns], or [rows] if columns is -1. */
call_array call_result(torch_call *call, const char *name, uint32_t type, int64_t rows,
                       int64_t columns);
/* Returns the next result in the shape of an argument; absent if the argument is. */
call_array call_result_like(torch_call *call, const char *name, uint32_t type, call_array like);
/* Returns the next result as an array of bytes. */
call_array call_memory(torch_call *call, const char *name, int64_t bytes);
/* Makes the next result a tensor without elements, for a result that this call does not have. */
void call_no_result(torch_call *call, const char *name);
/* Returns memory that call_end() releases. */
call_array call_workspace(torch_call *call, int64_t bytes);

/* Records the core's error if its call failed. */
void call_check_result(torch_call *call, epic_result result);
/* Ends the call: leaves the group, deletes its tensors, and puts the results on the stack or throws
 * the error. */
void call_end(torch_call *call);

/* Returns an array as the rows of the core. */
epic_rows call_rows(call_array array);
epic_const_rows call_const_rows(call_array array);

#endif
