/* SPDX-License-Identifier: Apache-2.0 */
/* Handlers of collective operations. A handler reads the frame, enters its device's member of
 * the group (members.h), runs a function of the core, and reports the result to XLA. */
#include "handler.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "translate.h"

/* ------------------------------------------------------------------------------ tags ---- */

/* This bit of a channel is set if the caller chose the channel. It is clear in the ids of call
 * sites. */
enum { CALLERS_CHANNEL = 1 << 23 };

/* Reads the id of the call site, and this device's rank in the mesh of the program. On a GPU
 * the host cannot read the rank, so it is -1. */
static void read_site(ffi_reader *reader, handler_call *call)
{
    call->site = (uint32_t)ffi_read_arg_int(reader, "site");
    call->rank = ffi_read_arg_int(reader, "rank");
    if (reader->on_device) call->rank = -1;
}

/* Reads the channel that the caller passed. If it is not negative, it replaces the default
 * channel, which is the id of the call site. */
static void read_channel(ffi_reader *reader, handler_call *call)
{
    const int32_t channel = ffi_read_arg_int(reader, "channel");
    call->channel = call->site;
    if (reader->error != NULL || channel < 0) return;
    if (channel >= CALLERS_CHANNEL)
        reader->error = ffi_fail(reader->frame, EPIC_EINVAL, "channel is %d: must be 0 to %d",
                                 channel, CALLERS_CHANNEL - 1);
    call->channel = (handler_channel)channel | CALLERS_CHANNEL;
}

/* Returns the tag of this operation, by which the ranks match their calls.
 *
 * On the CPU the tag is equal on all ranks, and any two calls of a program have different tags,
 * with one exception: calls inside an inner jit that is called twice have the same tags. On
 * GPUs the host cannot read channel and site, so the tag contains only the role, and the ranks
 * match their calls by their order in the streams. */
static uint64_t make_tag(const handler_call *call)
{
    return (uint64_t)call->channel << 40 | (uint64_t)call->site << 8 | call->operation->role;
}

void handler_write_channel(const handler_call *call, void *plan, size_t plan_bytes)
{
    if (call->on_device) return;
    char *tail = (char *)plan + plan_bytes;
    memset(tail, 0, HANDLER_CHANNEL_BYTES);
    memcpy(tail, &call->channel, sizeof call->channel);
}

/* ---------------------------------------------------------------------------- arrays ---- */

/* The array of a plan contains the core's plan, followed by HANDLER_CHANNEL_BYTES bytes with
 * the channel. Subtracts the number of these bytes from plan->count. If an earlier call has
 * made the plan and the plan is on the host, also reads the channel from these bytes. */
static void read_plan_tail(ffi_reader *reader, handler_call *call, const handler_array *field,
                           ffi_array *plan)
{
    if (plan->count < HANDLER_CHANNEL_BYTES) {
        reader->error = ffi_fail(reader->frame, EPIC_EINVAL,
                                 "plan has %lld bytes: must be the bytes of a plan",
                                 (long long)plan->count);
        return;
    }
    plan->count -= HANDLER_CHANNEL_BYTES;
    if (field->kind != HANDLER_PLAN || reader->on_device) return;
    memcpy(&call->channel, (const char *)plan->data + plan->count, sizeof call->channel);
    call->channel &= 2 * CALLERS_CHANNEL - 1;
}

/* Copies a value to an offset of the call struct. Does nothing if the offset is 0. */
static void copy_to_field(handler_call *call, size_t offset, const void *value, size_t bytes)
{
    if (offset != 0) memcpy((char *)call + offset, value, bytes);
}

/* Returns the set of types that the array may have in this call. */
static uint32_t accepted_types(const handler_call *call, const handler_array *field)
{
    switch (field->types) {
    case HANDLER_ROW_TYPE:
        return ffi_set_of(call->row_type);
    case HANDLER_WIDE_TYPE:
        return call->row_type == EPIC_F64 ? FFI_SET(EPIC_F64) : FFI_SET_F32;
    case HANDLER_WEIGHT_TYPE:
        return call->weight_set;
    case HANDLER_BIAS_TYPE:
        return ffi_set_of(call->bias_type);
    case HANDLER_SHARED_TYPE:
        return ffi_set_of(call->shared_type);
    default:
        return field->types;
    }
}

/* Returns the number of elements that the array must have, or FFI_ANY_COUNT. */
static int64_t expected_count(const handler_call *call, const handler_array *field)
{
    if (field->dims[0] == DIM_ANY) return FFI_ANY_COUNT;
    const int64_t *sizes = call->sizes;
    return ffi_multiply_sizes(sizes[field->dims[0]], sizes[field->dims[1]],
                              sizes[field->dims[2]]);
}

/* Reads an array and checks its number of elements. Sets the elements of call->sizes that the
 * array defines, and stores the values for which its table entry has an offset. */
static void read_array(ffi_reader *reader, handler_call *call, const handler_array *field)
{
    const ffi_requirement need = {field->name, accepted_types(call, field), FFI_ANY_COUNT,
                                  .result = (field->flags & HANDLER_RESULT) != 0,
                                  .optional = (field->flags & HANDLER_OPTIONAL) != 0};
    ffi_array array = ffi_read_array(reader, &need);
    if (reader->error != NULL) return;
    if ((field->flags & HANDLER_SETS_TYPE) && array.data != NULL) call->row_type = array.type;
    if (array.data != NULL) {
        if (field->sets_rows) call->sizes[field->sets_rows] = array.rows;
        if (field->sets_columns) call->sizes[field->sets_columns] = array.columns;
        const int64_t count = expected_count(call, field);
        if (count != FFI_ANY_COUNT) ffi_check_count(reader, field->name, array, count);
        if (reader->error != NULL) return;
    }
    if (field->kind != HANDLER_ARRAY) read_plan_tail(reader, call, field, &array);
    const epic_rows rows = ffi_rows_of(array);
    copy_to_field(call, field->data, &array.data, sizeof array.data);
    copy_to_field(call, field->rows, &rows, sizeof rows);
    copy_to_field(call, field->element, &array.type, sizeof array.type);
    copy_to_field(call, field->num_rows, &array.rows, sizeof array.rows);
    copy_to_field(call, field->count, &array.count, sizeof array.count);
}

/* Reads one entry of an operation's table. */
static void read_field(ffi_reader *reader, handler_call *call, const handler_array *field)
{
    if (field->kind == HANDLER_SITE)
        read_site(reader, call);
    else if (field->kind == HANDLER_CHANNEL)
        read_channel(reader, call);
    else
        read_array(reader, call, field);
}

/* Returns the epic_call in the arguments of the core's function. */
static epic_call *core_call_of(handler_call *call)
{
    return (epic_call *)(void *)((char *)call + call->operation->call_offset);
}

/* Allocates the call struct and reads the frame into it. If that fails, returns NULL and sets
 * reader->error. */
static handler_call *read_call(ffi_reader *reader, const handler_operation *operation)
{
    handler_call *call = calloc(1, operation->bytes);
    if (call == NULL) {
        reader->error =
            ffi_fail(reader->frame, EPIC_ENOMEM, "no memory for %zu bytes", operation->bytes);
        return NULL;
    }
    call->operation = operation;
    call->on_device = reader->on_device;
    call->api = reader->frame->api;
    call->sizes[DIM_ONE] = 1;
    call->row_type = FFI_OTHER;
    operation->read(reader, call);
    for (int i = 0; i < operation->num_arrays; i++)
        read_field(reader, call, &operation->arrays[i]);
    ffi_read_result(reader, "done", FFI_SET_U8,
                    /* no code writes this result; it exists so that XLA can wait for the
                     * call */
                    1);
    if (operation->check != NULL && reader->error == NULL) operation->check(reader, call);
    call->use.tag = make_tag(call);
    core_call_of(call)->tag = call->use.tag;
    core_call_of(call)->max_sms = ffi_read_uint(reader, "max_sms");
    if (reader->error == NULL) return call;
    free(call);
    return NULL;
}

/* ----------------------------------------------------------------------------- members ---- */

/* A member of a group: the position that the program expects (wanted), and the position in the
 * open group (has). */
typedef struct member_claim {
    char name[MEMBER_NAME_BYTES];
    member_device device;
    member_position wanted, has;
} member_claim;

/* Returns the error for a group that was opened with other devices than those of the
 * program. */
static ffi_error *other_devices_error(const ffi_frame *frame, const char *what,
                                      const member_claim *claim)
{
    return ffi_fail(frame, EPIC_EMISMATCH,
                    "epic.jax.%s: the program was made for group \"%s\" of %s, and the group "
                    "that is open under this name has %s: use in the program the group that "
                    "epic.jax.open returned last, or open the group with the program's mesh",
                    what, claim->name, claim->wanted.devices, claim->has.devices);
}

/* Returns the error for a device whose rank in the group differs from its rank in the program's
 * mesh. */
static ffi_error *other_rank_error(const ffi_frame *frame, const char *what,
                                   const member_claim *claim)
{
    return ffi_fail(
        frame, EPIC_EMISMATCH,
        "epic.jax.%s: device %d is rank %d of group \"%s\" (%s, by rank), and rank %d "
        "on the group's axis in the mesh of the program: run it on the "
        "mesh that the group was opened with, or open a group with this mesh.  The "
        "group is broken: open it again",
        what, claim->device.ordinal, claim->has.rank, claim->name, claim->has.devices,
        claim->wanted.rank);
}

/* Returns the error for a member that could not be entered. */
static ffi_error *refusal_error(const ffi_frame *frame, const handler_call *call,
                                member_status answer, const member_claim *claim)
{
    const char *what = call->operation->what;
    if (answer == MEMBER_OTHER_DEVICES) return other_devices_error(frame, what, claim);
    if (answer == MEMBER_OTHER_RANK) return other_rank_error(frame, what, claim);
    if (answer == MEMBER_CLOSED)
        return ffi_fail(
            frame, EPIC_ECLOSED,
            "epic.jax.%s: group \"%s\" was closed on %s device %d of this process, and the "
            "program was compiled for it: open it again before the program runs, "
            "epic.jax.open(..., name=\"%s\")",
            what, claim->name, claim->device.is_gpu ? "CUDA" : "CPU", claim->device.ordinal,
            claim->name);
    if (answer == MEMBER_NONE)
        return ffi_fail(
            frame, EPIC_ECLOSED,
            "epic.jax.%s: group \"%s\" is not open on %s device %d of this process: "
            "call epic.jax.open before the program runs",
            what, claim->name, claim->device.is_gpu ? "CUDA" : "CPU", claim->device.ordinal);
    return ffi_fail(frame, EPIC_EINVAL,
                    "epic.jax.%s: another call with the same number (tag %llu) is in flight on "
                    "device %d, so their order is not defined.  An inner jit that is called "
                    "twice uses one number for both calls: pass different channel= to their "
                    "plans, or order them by after=.  The group is broken: open it again",
                    what, (unsigned long long)call->use.tag, claim->device.ordinal);
}

/* Begins the call on the member of its device in the group that the attribute `group` names.
 * The group must have the devices that the program expects, and the device must have the
 * expected rank. */
static void enter_member(ffi_reader *reader, handler_call *call)
{
    member_claim claim = {.device = {reader->on_device, ffi_get_ordinal(reader)},
                          .wanted.rank = call->rank};
    ffi_read_text(reader, "group", claim.name, sizeof claim.name);
    ffi_read_text(reader, "devices", claim.wanted.devices, sizeof claim.wanted.devices);
    if (reader->error != NULL) return;
    claim.has = claim.wanted;
    const member_status answer = member_enter(&call->use, claim.name, claim.device, &claim.has);
    if (answer != MEMBER_OK) reader->error = refusal_error(reader->frame, call, answer, &claim);
}

/* Runs the core's function. Returns its error as an XLA error, or NULL. */
static ffi_error *run_operation(handler_call *call)
{
    const epic_result result = call->operation->run(call);
    if (result == EPIC_OK) return NULL;
    /* Two calls may have the same tag: those of an inner jit that is called twice. Even if they
     * do not run at the same time, one rank may match its first call with another rank's second
     * call, which ends in this error. */
    const char *hint =
        result == EPIC_EMISMATCH
            ? ".  Calls of an inner jit that is called twice share a number: pass different "
              "channel= to their plans, or order them by after="
            : "";
    char sentence[1280], text[1536];
    translate_sentence(epic_error(call->use.ctx), sentence, sizeof sentence);
    snprintf(text, sizeof text, "epic.jax.%s: %s%s", call->operation->what, sentence, hint);
    return ffi_error_new(call->api, result, text);
}

/* ----------------------------------------------------------------- calls on the host ---- */

static void set_future(const XLA_FFI_Api *api, XLA_FFI_Future *future, ffi_error *error)
{
    if (error != NULL) {
        XLA_FFI_Future_SetError_Args args = {XLA_FFI_Future_SetError_Args_STRUCT_SIZE, NULL,
                                             future, error};
        api->XLA_FFI_Future_SetError(&args);
    } else {
        XLA_FFI_Future_SetAvailable_Args args = {XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE,
                                                 NULL, future};
        api->XLA_FFI_Future_SetAvailable(&args);
    }
}

/* Runs an operation on a thread of the pool. Leaves the member before it completes the future,
 * because XLA may then start the next call, which may have the same tag. */
static void run_task(pool_task *task)
{
    handler_call *mine = (handler_call *)task;
    ffi_error *error = run_operation(mine);
    member_leave(&mine->use);
    const XLA_FFI_Api *api = mine->api;
    XLA_FFI_Future *future = mine->future;
    free(mine);
    set_future(api, future, error);
}

/* Creates the future and starts the call on a thread of the pool. */
static ffi_error *start_task(ffi_frame *frame, handler_call *call)
{
    const XLA_FFI_Api *api = call->api;
    XLA_FFI_Future_Create_Args create = {XLA_FFI_Future_Create_Args_STRUCT_SIZE, NULL, NULL};
    ffi_error *error = api->XLA_FFI_Future_Create(&create);
    if (error == NULL) {
        call->task.run = run_task;
        call->future = frame->future = create.future;
        if (pool_run(&call->task)) return NULL; /* run_task() may already have freed the call */
    }
    const char *what = call->operation->what;
    member_leave(&call->use);
    free(call);
    if (error == NULL)
        set_future(api, create.future,
                   ffi_fail(frame, EPIC_ENOMEM,
                            "epic.jax.%s: the system cannot create a thread", what));
    return error;
}

ffi_error *handler_run_on_host(ffi_frame *frame, const handler_operation *operation)
{
    if (ffi_is_query(frame, 0)) return NULL;
    ffi_reader reader = ffi_reader_of(frame, false);
    handler_call *call = read_call(&reader, operation);
    if (call == NULL) return reader.error;
    enter_member(&reader, call);
    if (reader.error == NULL) return start_task(frame, call);
    free(call);
    return reader.error;
}

/* -------------------------------------------------------------------- calls on a GPU ---- */

/* Launches the operation on XLA's stream. This handler does not report errors in the data:
 * epic_check() reports them later. If this handler returned an error on one rank, XLA would
 * skip the rest of the program on that rank, and the other ranks would wait for it. */
ffi_error *handler_run_on_gpu(ffi_frame *frame, const handler_operation *operation,
                              bool in_graphs)
{
    if (ffi_is_query(frame, in_graphs ? XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE : 0))
        return NULL;
    ffi_reader reader = ffi_reader_of(frame, true);
    handler_call *call = read_call(&reader, operation);
    if (call == NULL) return reader.error;
    core_call_of(call)->stream = ffi_get_stream(&reader);
    enter_member(&reader, call);
    if (reader.error == NULL) {
        reader.error = run_operation(call);
        member_leave(&call->use);
    }
    free(call);
    return reader.error;
}
