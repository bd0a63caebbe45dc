/* SPDX-License-Identifier: Apache-2.0 */
/* One call of an operator: reads its arguments in order, makes its results and reports errors.
 *
 * A *kernel* in this folder is the C function of an operator, for CPU and GPU tensors. torch
 * passes it a stack of 64-bit values, the arguments in the order of the schema:
 *
 * - Tensor: a handle that the kernel must delete
 * - Tensor?: 0, or a heap cell with such a handle; the kernel must delete both
 * - int, SymInt: an int64_t
 * - float: the bits of a double
 *
 * The results overwrite the stack from its start, and torch then owns their handles.
 *
 * For each operator NAME there is also an operator NAME_out. It has the arguments of NAME,
 * followed by one Tensor? for each result, into which the kernel writes. 0 means that the
 * caller does not want that result. NAME and NAME_out use the same kernel: call_result()
 * returns a new tensor for NAME, and the caller's tensor for NAME_out.
 *
 * A torch_call stores its first error. After an error, the functions below return harmless
 * values. So a kernel reads all of its arguments, calls the core unless call.failed is set, and
 * ends with call_end(). call_end() deletes the tensors that the call owns, and throws the
 * error. */
#ifndef EPIC_TORCH_CALL_H
#define EPIC_TORCH_CALL_H

#include "epic/epic.h"
#include "groups.h"
#include "shim.h"

/* Maximum number of tensors of an operator, and of dimensions of a tensor. */
enum { CALL_TENSORS = 36, CALL_DIMS = 8 };

/* Types of arguments in addition to epic_type. Some mean a set of types. */
#define CALL_U8 100u      /* bytes: plans, `saved` and workspaces */
#define CALL_ROWS 101u    /* F32, BF16, F16 or F64: all types that the core can add */
#define CALL_FLOAT 102u   /* F32 or F64 */
#define CALL_INDEX 103u   /* I32 or I64 */
#define CALL_MATRIX 104u  /* weights of experts: CALL_ROWS or E4M3 */
#define CALL_WEIGHTS 105u /* CALL_ROWS with any number of dimensions; converted to F32 */
#define CALL_OTHER 255u   /* any other dtype */

/* A short text, returned by value. */
typedef struct call_text {
    char text[80];
} call_text;

/* The memory of an argument or result. The memory of a result must not overlap that of another
 * array of the call. */
typedef struct call_span {
    const char *name;
    uintptr_t begin, end;
} call_span;

/* State of one call, on the stack of the kernel. */
typedef struct torch_call {
    const char *op;     /* name of the operator, for errors */
    torch_value *stack; /* torch's stack of arguments and results */
    int next;           /* index of the next argument */
    bool has_out;       /* the operator is NAME_out, so results are arguments too */
    int num_owned, num_new_results, num_spans;
    torch_tensor owned[2 * CALL_TENSORS];   /* arguments and temporary tensors, which
                                             call_end() deletes */
    torch_tensor new_results[CALL_TENSORS]; /* tensors that the call made for results */
    call_span spans[CALL_TENSORS];
    group_device device; /* device of the first tensor; all tensors must be on it */
    group_use use;       /* the group that the call uses; set by the call_enter functions */
    /* CUDA: guard object that makes the device current for this thread; NULL: none was
     * needed */
    void *guard;
    bool failed;
    char error[1024]; /* text of the first error */
} torch_call;

/* A tensor argument or result. */
typedef struct call_array {
    void *data; /* NULL only if the argument is absent */
    /* product of all dimensions except the last; if there is one dimension: its size */
    int64_t rows;
    int64_t columns;
    int64_t count;
    int64_t bytes;
    uint32_t type; /* an epic_type, or CALL_U8 */
    int64_t dim;
    const int64_t *sizes; /* [dim], memory of the tensor, valid until call_end() */
} call_array;

/* Begins a call of the operator `op`. num_results is the number of results that torch passed to
 * the kernel. It is 0 if the kernel writes its results into arguments (NAME_out), or has
 * none. */
torch_call call_begin(const char *op, torch_value *stack, uint64_t num_results);
/* Stores an error, unless the call already has one. */
void call_fail(torch_call *call, epic_result result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Returns a shape as text, such as "[3, 4]". */
call_text call_shape(int64_t dim, const int64_t *sizes);

/* Return the next argument. type is an epic_type, or one of CALL_*. dim is the number of
 * dimensions. If dim is 2, the tensor may have more dimensions, and all except the last then
 * count as rows. If a tensor is not contiguous, as gradients often are, the functions return a
 * contiguous copy. A tensor that the kernel writes (call_arg_written) must be contiguous and
 * have exactly dim dimensions. */
call_array call_arg(torch_call *call, const char *name, uint32_t type, int64_t dim);
call_array call_arg_or_none(torch_call *call, const char *name, uint32_t type, int64_t dim);
call_array call_arg_written(torch_call *call, const char *name, uint32_t type, int64_t dim);
/* Check the type, the number of elements or the shape of an array, unless it is absent. The
 * core cannot check them, because its arguments contain only the addresses of arrays. */
void call_check_type(torch_call *call, const char *name, call_array array, uint32_t type);
void call_check_count(torch_call *call, const char *name, call_array array, int64_t count);
void call_check_shape(torch_call *call, const char *name, call_array array, int64_t dim,
                      const int64_t *sizes);
/* Skips the argument order_token. Tracers use this tensor to keep the calls of a context in
 * order, and the kernel never reads it. */
void call_order_token(torch_call *call);
/* Return the next argument as a number. call_uint() checks that it is 0 to 2^32 - 1. */
int64_t call_int(torch_call *call);
uint32_t call_uint(torch_call *call, const char *name);
double call_float(torch_call *call);

/* The ids of groups and layers are below 2^CALL_SMS_SHIFT. In an argument `int group` or `int
 * layer`, the higher bits contain the maximum number of SMs for the call. If they are 0, the
 * limit of the group applies. */
enum { CALL_SMS_SHIFT = 48 };

/* Reads the next two arguments, `int group, int tag`, and begins a use of the group
 * (group_enter()). The context of the group is then in call->use. Returns the epic_call for the
 * core, with stream and tag. */
epic_call call_enter(torch_call *call);
/* Like call_enter(), but reads only `int group`. call_tag() then reads the tag. */
epic_call call_enter_group(torch_call *call);
/* Reads `int layer`, begins a use of the group of that layer, and copies the layer to
 * *layer. */
epic_call call_enter_layer(torch_call *call, group_layer *layer);
uint64_t call_tag(torch_call *call);
/* Reads `int group` of an operator that involves no other rank, and begins a use of the group.
 * The id may be 0 if the tensors are in host memory, because the core then needs no context. */
epic_call call_enter_local(torch_call *call);

/* Returns true if the core computes on a GPU. May be called after a call_enter function. */
bool call_on_gpu(const torch_call *call);

/* Returns the next result, with shape [rows, columns], or [rows] if columns is -1. */
call_array call_result(torch_call *call, const char *name, uint32_t type, int64_t rows,
                       int64_t columns);
/* Returns the next result, with the shape of `like`. If `like` is absent, the result is absent
 * too. */
call_array call_result_like(torch_call *call, const char *name, uint32_t type, call_array like);
/* Returns the next result, an array of `bytes` bytes. */
call_array call_memory(torch_call *call, const char *name, int64_t bytes);
/* Makes the next result a tensor without elements. Used for a result that this call does not
 * compute. */
void call_no_result(torch_call *call, const char *name);
/* Returns memory that call_end() frees. */
call_array call_workspace(torch_call *call, int64_t bytes);

/* If `result` is an error, stores the error of the core in the call. */
void call_check_result(torch_call *call, epic_result result);
/* Ends the call: ends the use of the group, and deletes the tensors that the call owns. Then
 * puts the results on the stack, or throws the error. */
void call_end(torch_call *call);

/* Return an array as rows for the core. An absent array has no rows. */
epic_rows call_rows(call_array array);
epic_const_rows call_const_rows(call_array array);

#endif
