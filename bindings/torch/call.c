/* SPDX-License-Identifier: Apache-2.0 */
/* Reads arguments from torch's stack, checks them and makes results. call.h describes each
 * function. */
#include "call.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../dtypes.h"

/* Address of tensors without elements, for which torch returns NULL. */
static char no_elements[64];

/* ---------------------------------------------------------------------------- errors ---- */

torch_call call_begin(const char *op, torch_value *stack, uint64_t num_results)
{
    /* the arrays in it stay uninitialized, because they are large and later code fills them */
    torch_call call;
    call.op = op;
    call.stack = stack;
    call.has_out = num_results == 0;
    call.next = call.num_owned = call.num_new_results = call.num_spans = 0;
    call.device = (group_device){-1, 0};
    call.use.group = NULL;
    call.use.ctx = NULL;
    call.guard = NULL;
    call.failed = false;
    return call;
}

call_text call_shape(int64_t dim, const int64_t *sizes)
{
    call_text out;
    size_t length = (size_t)snprintf(out.text, sizeof out.text, "[");
    for (int64_t d = 0; d < dim && length < sizeof out.text; d++)
        length += (size_t)snprintf(out.text + length, sizeof out.text - length, "%s%" PRId64,
                                   d > 0 ? ", " : "", sizes[d]);
    if (length < sizeof out.text) snprintf(out.text + length, sizeof out.text - length, "]");
    return out;
}

void call_fail(torch_call *call, epic_result result, const char *format, ...)
{
    if (call->failed) return;
    call->failed = true;
    const int length = snprintf(call->error, sizeof call->error,
                                "%s: epic.torch.%s: ", epic_result_name(result), call->op);
    va_list list;
    va_start(list, format);
    vsnprintf(call->error + length, sizeof call->error - (size_t)length, format, list);
    va_end(list);
}

void call_check_result(torch_call *call, epic_result result)
{
    if (result != EPIC_OK) call_fail(call, result, "%s", epic_error(NULL));
}

/* Throws the error of the call. First copies the error text to the stack frame of this
 * function, because the kernel's frame, which contains the call, ends while the exception
 * passes through it. */
static _Noreturn void throw_copy(const torch_call *call)
{
    char text[sizeof call->error];
    memcpy(text, call->error, sizeof text);
    torch_throw(text);
}

void call_end(torch_call *call)
{
    if (call->guard != NULL) torch.delete_cuda_guard(call->guard);
    group_leave(&call->use);
    torch_delete_tensors(call->owned, call->num_owned);
    if (call->failed) {
        torch_delete_tensors(call->new_results, call->num_new_results);
        throw_copy(call);
    }
    for (int i = 0; i < call->num_new_results; i++)
        call->stack[i] = (torch_value)(uintptr_t)call->new_results[i];
}

/* ------------------------------------------------------------------------- arguments ---- */

/* Returns the epic_type of a dtype, CALL_U8 or CALL_OTHER. */
static uint32_t type_of(int32_t dtype)
{
    if (dtype == torch.dtype_float32()) return EPIC_F32;
    if (dtype == torch.dtype_bfloat16()) return EPIC_BF16;
    if (dtype == torch.dtype_float16()) return EPIC_F16;
    if (dtype == torch.dtype_float64()) return EPIC_F64;
    if (dtype == torch.dtype_int32()) return EPIC_I32;
    if (dtype == torch.dtype_int64()) return EPIC_I64;
    if (dtype == torch.dtype_uint8()) return CALL_U8;
    if (dtype == torch.dtype_float8_e4m3fn()) return EPIC_E4M3;
    return CALL_OTHER;
}

/* Returns torch's enum value of the dtype of an epic_type or of CALL_U8. */
static int32_t dtype_of(uint32_t type)
{
    switch (type) {
    case EPIC_F32:
        return torch.dtype_float32();
    case EPIC_BF16:
        return torch.dtype_bfloat16();
    case EPIC_F16:
        return torch.dtype_float16();
    case EPIC_F64:
        return torch.dtype_float64();
    case EPIC_I32:
        return torch.dtype_int32();
    case EPIC_I64:
        return torch.dtype_int64();
    case EPIC_E4M3:
        return torch.dtype_float8_e4m3fn();
    default:
        return torch.dtype_uint8();
    }
}

/* Returns the name of a type, or of a set of types, for errors. */
static const char *type_name(uint32_t type)
{
    switch (type) {
    case CALL_U8:
        return "uint8";
    case CALL_ROWS:
    case CALL_WEIGHTS:
        return "float32, bfloat16, float16 or float64";
    case CALL_FLOAT:
        return "float32 or float64";
    case CALL_INDEX:
        return "int32 or int64";
    case CALL_MATRIX:
        return "float32, bfloat16, float16, float64 or float8_e4m3fn";
    default: {
        const char *name = dtype_name(type);
        return name != NULL ? name : "of another dtype";
    }
    }
}

/* Returns true if `type` is `wanted`, or in the set of types that `wanted` means. */
static bool is_one_of(uint32_t type, uint32_t wanted)
{
    switch (wanted) {
    case CALL_ROWS:
        return type == EPIC_F32 || type == EPIC_BF16 || type == EPIC_F16 || type == EPIC_F64;
    case CALL_FLOAT:
        return type == EPIC_F32 || type == EPIC_F64;
    case CALL_INDEX:
        return type == EPIC_I32 || type == EPIC_I64;
    case CALL_MATRIX:
        return type == EPIC_E4M3 || is_one_of(type, CALL_ROWS);
    case CALL_WEIGHTS:
        return is_one_of(type, CALL_ROWS);
    default:
        return type == wanted;
    }
}

/* Returns the tensor of a stack value, and adds it to the tensors that call_end() deletes. */
static torch_tensor own_tensor(torch_call *call, torch_value value)
{
    return call->owned[call->num_owned++] = (torch_tensor)(uintptr_t)value;
}

static torch_tensor next_tensor(torch_call *call)
{
    return own_tensor(call, call->stack[call->next++]);
}

/* Returns the next argument, whose type in the schema is Tensor?. Returns NULL if it is absent.
 * torch passes the tensor in a cell on the heap, which this function frees. */
static torch_tensor next_tensor_or_none(torch_call *call)
{
    torch_value *cell = (torch_value *)(uintptr_t)call_int(call);
    if (cell == NULL) return NULL;
    const torch_value value = *cell;
    torch_cell_delete(cell);
    return own_tensor(call, value);
}

/* Writes the name of a device to `out`, such as "cuda:1", and returns `out`. */
static const char *device_name(group_device device, char *out, size_t size)
{
    if (device.device_type == TORCH_CPU)
        snprintf(out, size, "cpu");
    else
        snprintf(out, size, "%s:%d",
                 device.device_type == TORCH_CUDA ? "cuda" : "another device",
                 (int)device.device_index);
    return out;
}

static bool is_same_device(group_device a, group_device b)
{
    return a.device_type == b.device_type &&
           (a.device_type == TORCH_CPU || a.device_index == b.device_index);
}

/* Checks that a tensor is on the device of the call, which is the device of its first
 * tensor. */
static void check_device(torch_call *call, const char *name, torch_tensor tensor)
{
    group_device device;
    if (torch.get_device_type(tensor, &device.device_type) ||
        torch.get_device_index(tensor, &device.device_index))
        call_fail(call, EPIC_EINVAL, "%s: torch did not return its device", name);
    if (call->device.device_type < 0) call->device = device;
    char here[32], there[32];
    if (!is_same_device(call->device, device))
        call_fail(call, EPIC_EINVAL, "%s is on %s, other tensors are on %s: use one device",
                  name, device_name(device, here, sizeof here),
                  device_name(call->device, there, sizeof there));
}

/* Computes rows, columns, count and bytes of an array from its shape. */
static void measure_array(call_array *array, int64_t dim, const int64_t *sizes)
{
    array->dim = dim;
    array->sizes = sizes;
    array->rows = array->columns = 1;
    for (int64_t d = 0; d < dim - (dim > 1); d++) array->rows *= sizes[d];
    if (dim > 1) array->columns = sizes[dim - 1];
    array->count = array->rows * array->columns;
    array->bytes = array->count * dtype_bytes(array->type);
}

/* Adds the memory of a tensor to call->spans, for check_overlap(). */
static void note_span(torch_call *call, const char *name, call_array array)
{
    const uintptr_t begin = (uintptr_t)array.data;
    call->spans[call->num_spans++] = (call_span){name, begin, begin + (size_t)array.bytes};
}

/* Creates an uninitialized contiguous tensor on the device of the call. If that fails, *out is
 * NULL. */
static call_array make_empty(torch_call *call, uint32_t type, int64_t dim, const int64_t *sizes,
                             torch_tensor *out)
{
    call_array array = {.data = no_elements, .type = type};
    int64_t strides[CALL_DIMS];
    int64_t count = 1;
    for (int64_t d = dim - 1; d >= 0; d--) {
        strides[d] = count;
        count *= sizes[d];
        if (sizes[d] < 0)
            call_fail(call, EPIC_EINVAL, "an array of %" PRId64 " rows cannot be made",
                      sizes[d]);
    }
    if (call->failed) return array;
    if (torch.empty_strided(dim, sizes, strides, dtype_of(type), call->device.device_type,
                            call->device.device_index, out)) {
        *out = NULL;
        call_fail(call, EPIC_ENOMEM, "no memory for %" PRId64 " elements", count);
        return array;
    }
    measure_array(&array, dim, sizes);
    torch.get_data_ptr(*out, &array.data);
    if (array.data == NULL) array.data = no_elements;
    return array;
}

/* Creates a tensor for this call only, which call_end() deletes. */
static call_array make_temporary(torch_call *call, uint32_t type, int64_t dim,
                                 const int64_t *sizes)
{
    torch_tensor tensor = NULL;
    const call_array array = make_empty(call, type, dim, sizes, &tensor);
    if (tensor != NULL) call->owned[call->num_owned++] = tensor;
    return array;
}

/* Copies an argument into a contiguous tensor of the given type. */
static call_array copy_argument(torch_call *call, const char *name, torch_tensor tensor,
                                call_array array, uint32_t type)
{
    const call_array copy = make_temporary(call, type, array.dim, array.sizes);
    if (call->failed) return copy;
    if (torch.copy_(call->owned[call->num_owned - 1], tensor, 0))
        call_fail(call, EPIC_ENOMEM, "%s cannot be copied: call .contiguous() on it", name);
    return copy;
}

/* Reads shape, type and address of a tensor. out->sizes points to memory of the tensor. Returns
 * false on an error. */
static bool read_properties(torch_call *call, const char *name, torch_tensor tensor,
                            call_array *out, bool *contiguous)
{
    int64_t *sizes;
    int32_t dtype;
    if (torch.get_dim(tensor, &out->dim) || torch.get_sizes(tensor, &sizes) ||
        torch.get_dtype(tensor, &dtype) || torch.get_data_ptr(tensor, &out->data) ||
        torch.is_contiguous(tensor, contiguous)) {
        call_fail(call, EPIC_EINVAL, "%s: torch did not return its properties", name);
        return false;
    }
    out->sizes = sizes;
    out->type = type_of(dtype);
    return true;
}

/* Reads a tensor and checks its device, type and number of dimensions. If it is not contiguous
 * or must be converted, returns a copy. A tensor that the kernel writes (`written`) is never
 * copied. */
static call_array read_array(torch_call *call, const char *name, torch_tensor tensor,
                             uint32_t type, int64_t dim, bool written)
{
    call_array array = {.data = no_elements};
    bool contiguous;
    check_device(call, name, tensor);
    if (!read_properties(call, name, tensor, &array, &contiguous)) return array;
    if (!is_one_of(array.type, type))
        call_fail(call, EPIC_EINVAL, "%s is %s: must be %s", name, type_name(array.type),
                  type_name(type));
    const bool leads = dim == 2 && (array.dim > 2 || type == CALL_WEIGHTS) &&
                       array.dim <= CALL_DIMS && !written;
    if (array.dim != dim && !leads)
        call_fail(call, EPIC_EINVAL, "%s has %" PRId64 " dimensions: must have %" PRId64, name,
                  array.dim, dim);
    if (!contiguous && written)
        call_fail(call, EPIC_EINVAL, "%s is not contiguous: call .contiguous() on it", name);
    if (call->failed) return array;
    const uint32_t wanted = type == CALL_WEIGHTS ? EPIC_F32 : array.type;
    if (!contiguous || array.type != wanted)
        return copy_argument(call, name, tensor, array, wanted);
    measure_array(&array, array.dim, array.sizes);
    if (array.data == NULL) array.data = no_elements;
    note_span(call, name, array);
    return array;
}

call_array call_arg(torch_call *call, const char *name, uint32_t type, int64_t dim)
{
    return read_array(call, name, next_tensor(call), type, dim, false);
}

call_array call_arg_written(torch_call *call, const char *name, uint32_t type, int64_t dim)
{
    return read_array(call, name, next_tensor(call), type, dim, true);
}

call_array call_arg_or_none(torch_call *call, const char *name, uint32_t type, int64_t dim)
{
    torch_tensor tensor = next_tensor_or_none(call);
    if (tensor == NULL) return (call_array){0};
    return read_array(call, name, tensor, type, dim, false);
}

void call_check_type(torch_call *call, const char *name, call_array array, uint32_t type)
{
    if (array.data != NULL && array.type != type)
        call_fail(call, EPIC_EINVAL, "%s is %s: must be %s", name, type_name(array.type),
                  type_name(type));
}

void call_check_count(torch_call *call, const char *name, call_array array, int64_t count)
{
    if (array.data != NULL && array.count != count)
        call_fail(call, EPIC_EINVAL, "%s has %" PRId64 " elements: must have %" PRId64, name,
                  array.count, count);
}

void call_check_shape(torch_call *call, const char *name, call_array array, int64_t dim,
                      const int64_t *sizes)
{
    if (array.data == NULL || call->failed) return;
    if (array.dim != dim || memcmp(array.sizes, sizes, (size_t)dim * sizeof *sizes) != 0)
        call_fail(call, EPIC_EINVAL, "%s has the shape %s: must be %s", name,
                  call_shape(array.dim, array.sizes).text, call_shape(dim, sizes).text);
}

void call_order_token(torch_call *call)
{
    check_device(call, "order_token", next_tensor(call));
}

int64_t call_int(torch_call *call)
{
    return (int64_t)call->stack[call->next++];
}

uint32_t call_uint(torch_call *call, const char *name)
{
    const int64_t value = call_int(call);
    if (value < 0 || value > UINT32_MAX)
        call_fail(call, EPIC_EINVAL, "%s is %" PRId64 ": must be 0 to %u", name, value,
                  UINT32_MAX);
    return (uint32_t)value;
}

double call_float(torch_call *call)
{
    double value;
    memcpy(&value, &call->stack[call->next++], sizeof value);
    return value;
}

/* ---------------------------------------------------------------- devices and groups ---- */

/* Makes the device of the tensors current, and reads its stream for the kernels of the core. A
 * guard changes the current device, but creating one is slow. So the function first checks
 * whether the device is already current, which is the usual case. */
static void enter_device(torch_call *call, epic_call *out)
{
    const int32_t wanted = call->device.device_index;
    int32_t current;
    if (call->device.device_type != TORCH_CUDA || call->failed) return;
    if (torch.get_current_cuda_stream == NULL || torch.get_current_device_index(&current) ||
        (current != wanted && torch.create_cuda_guard(wanted, &call->guard)) ||
        torch.get_current_cuda_stream(wanted, &out->stream))
        call_fail(call, EPIC_EDEVICE, "torch did not return the current stream");
}

/* Checks the result of group_enter(), and that the group is on the device of the tensors. */
static void check_entered(torch_call *call, bool entered)
{
    if (!entered) {
        call_fail(call, EPIC_ECLOSED, "the group was closed: open a new one");
        return;
    }
    char here[32], there[32];
    if (!is_same_device(call->device, call->use.device))
        call_fail(call, EPIC_EINVAL, "the tensors are on %s, the group is on %s",
                  device_name(call->device, here, sizeof here),
                  device_name(call->use.device, there, sizeof there));
}

/* Begins a use of the group with this id. */
static void enter_group(torch_call *call, int64_t number)
{
    if (!call->failed) check_entered(call, group_enter(&call->use, number));
}

/* Reads the id of a group or of a layer. The high bits of the argument contain the maximum
 * number of SMs, which Python adds for calls with max_sms= (epic/torch/plans.py), so that
 * operators need no separate argument for it. */
static int64_t read_number(torch_call *call, epic_call *out)
{
    const int64_t value = call_int(call);
    out->max_sms = (uint32_t)((uint64_t)value >> CALL_SMS_SHIFT);
    return value & (((int64_t)1 << CALL_SMS_SHIFT) - 1);
}

epic_call call_enter_layer(torch_call *call, group_layer *layer)
{
    epic_call out = {0};
    const int64_t number = read_number(call, &out);
    if (!call->failed) check_entered(call, group_enter_layer(&call->use, number, layer));
    enter_device(call, &out);
    return out;
}

epic_call call_enter_group(torch_call *call)
{
    epic_call out = {0};
    enter_group(call, read_number(call, &out));
    enter_device(call, &out);
    return out;
}

uint64_t call_tag(torch_call *call)
{
    return (uint64_t)call_int(call);
}

epic_call call_enter(torch_call *call)
{
    epic_call out = call_enter_group(call);
    out.tag = call_tag(call);
    return out;
}

epic_call call_enter_local(torch_call *call)
{
    epic_call out = {0};
    const int64_t number = read_number(call, &out);
    if (number != 0)
        enter_group(call, number);
    else if (call->device.device_type != TORCH_CPU)
        call_fail(call, EPIC_EINVAL, "tensors on a GPU need a group of that GPU: pass group=");
    enter_device(call, &out);
    return out;
}

/* Returns true if the group's backend computes on a GPU. The device of the tensors does not
 * show this in tests, where the memory of an emulated GPU is host memory. */
bool call_on_gpu(const torch_call *call)
{
    const char *name = call->use.ctx != NULL ? epic_backend_name(call->use.ctx) : "";
    return strcmp(name, "p2p") == 0 || strcmp(name, "hosts") == 0;
}

/* --------------------------------------------------------------------------- results ---- */

static call_array new_result(torch_call *call, uint32_t type, int64_t dim, const int64_t *sizes)
{
    torch_tensor tensor = NULL;
    const call_array array = make_empty(call, type, dim, sizes, &tensor);
    if (tensor != NULL) call->new_results[call->num_new_results++] = tensor;
    return array;
}

/* Sets an error if the caller's tensor for a result shares memory with an argument or with
 * another result. */
static void check_overlap(torch_call *call, const char *name)
{
    if (call->failed) return;
    const call_span own = call->spans[call->num_spans - 1];
    for (int i = 0; i < call->num_spans - 1; i++)
        if (own.begin < call->spans[i].end && call->spans[i].begin < own.end)
            call_fail(call, EPIC_EINVAL, "out %s shares memory with %s: pass another tensor",
                      name, call->spans[i].name);
}

/* Returns the next result of an operator NAME_out: the tensor that the caller passed for it,
 * after checking that tensor. If the caller passed None, returns temporary memory. */
static call_array written_result(torch_call *call, const char *name, uint32_t type, int64_t dim,
                                 const int64_t *sizes)
{
    const torch_tensor given = next_tensor_or_none(call);
    if (given == NULL) return make_temporary(call, type, dim, sizes);
    int64_t found_dim, *found;
    bool contiguous;
    char named[64];
    if (!call->failed && !torch.get_dim(given, &found_dim) && found_dim == dim &&
        !torch.get_sizes(given, &found) &&
        memcmp(found, sizes, (size_t)dim * sizeof *sizes) != 0)
        call_fail(call, EPIC_EINVAL, "out %s has the shape %s: must be %s", name,
                  call_shape(dim, found).text, call_shape(dim, sizes).text);
    if (!call->failed && !torch.is_contiguous(given, &contiguous) && !contiguous)
        call_fail(call, EPIC_EINVAL, "out %s is not contiguous: pass a contiguous tensor",
                  name);
    snprintf(named, sizeof named, "out %s", name);
    call_array array = read_array(call, named, given, type, dim, true);
    if (call->failed) return array;
    call->spans[call->num_spans - 1].name = name;
    check_overlap(call, name);
    return array;
}

/* Returns the next result: a new tensor, or the caller's tensor if the operator is NAME_out. */
static call_array next_result(torch_call *call, const char *name, uint32_t type, int64_t dim,
                              const int64_t *sizes)
{
    return call->has_out ? written_result(call, name, type, dim, sizes)
                         : new_result(call, type, dim, sizes);
}

call_array call_result(torch_call *call, const char *name, uint32_t type, int64_t rows,
                       int64_t columns)
{
    const int64_t sizes[2] = {rows, columns};
    return next_result(call, name, type, columns < 0 ? 1 : 2, sizes);
}

call_array call_result_like(torch_call *call, const char *name, uint32_t type, call_array like)
{
    if (like.data != NULL && like.sizes != NULL)
        return next_result(call, name, type, like.dim, like.sizes);
    call_no_result(call, name);
    return (call_array){0};
}

call_array call_memory(torch_call *call, const char *name, int64_t bytes)
{
    return call_result(call, name, CALL_U8, bytes, -1);
}

void call_no_result(torch_call *call, const char *name)
{
    if (!call->has_out)
        (void)call_result(call, name, EPIC_F32, 0, -1);
    else if (next_tensor_or_none(call) != NULL)
        call_fail(call, EPIC_EINVAL,
                  "out %s is a tensor: must be None, as this call has no such result", name);
}

call_array call_workspace(torch_call *call, int64_t bytes)
{
    return make_temporary(call, CALL_U8, 1, &bytes);
}

epic_rows call_rows(call_array array)
{
    if (array.data == NULL) return (epic_rows){0};
    return (epic_rows){array.data, array.rows, array.columns * dtype_bytes(array.type)};
}

epic_const_rows call_const_rows(call_array array)
{
    return epic_rows_as_const(call_rows(array));
}
