/* SPDX-License-Identifier: Apache-2.0 */
/* One collective operation, from XLA's call to its end. */
#include "job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "words.h"

/* ------------------------------------------------------------------------------ tags ---- */

enum { CALLERS_CHANNEL = 1 << 23 }; /* callers' numbers and call sites' never meet */

/* The rank is where the program takes this device to be; on a GPU nobody can read it here. */
static void read_site(ffi_reader *reader, job *job)
{
    job->site = (uint32_t)ffi_arg_int(reader, "site");
    job->rank = ffi_arg_int(reader, "rank");
    if (reader->on_device) job->rank = -1;
}

/* A caller's number comes after the site's, and replaces it. */
static void read_channel(ffi_reader *reader, job *job)
{
    const int32_t channel = ffi_arg_int(reader, "channel");
    job->channel = job->site;
    if (reader->error != NULL || channel < 0) return;
    if (channel >= CALLERS_CHANNEL)
        reader->error = ffi_fail(reader->frame, EPIC_EINVAL, "channel %d: 0 to %d is needed",
                                 channel, CALLERS_CHANNEL - 1);
    job->channel = (job_channel)channel | CALLERS_CHANNEL;
}

/* Operations are matched between ranks by this number: alike on all ranks, and on the CPU
 * different for any two calls of a program, except for an inner jit called twice.  On GPUs the
 * numbers of the call are out of reach, and streams order it: there the role is compared. */
static uint64_t tag_of(const job *job)
{
    return (uint64_t)job->channel << 40 | (uint64_t)job->site << 8 | job->operation->role;
}

void job_put_channel(const job *job, void *plan, size_t plan_bytes)
{
    if (job->on_device) return;
    char *tail = (char *)plan + plan_bytes;
    memset(tail, 0, JOB_PLAN_TAIL);
    memcpy(tail, &job->channel, sizeof job->channel);
}

/* ---------------------------------------------------------------------------- arrays ---- */

/* Cuts the tail off, and reads what it says where it can be read. */
static void read_tail(ffi_reader *reader, job *job, const job_array *field, ffi_array *plan)
{
    if (plan->count < JOB_PLAN_TAIL) {
        reader->error = ffi_fail(reader->frame, EPIC_EINVAL, "plan: %lld bytes are no plan",
                                 (long long)plan->count);
        return;
    }
    plan->count -= JOB_PLAN_TAIL;
    if (field->kind != JOB_PLAN || reader->on_device) return;
    memcpy(&job->channel, (const char *)plan->data + plan->count, sizeof job->channel);
    job->channel &= 2 * CALLERS_CHANNEL - 1;
}

static void put(job *job, size_t offset, const void *value, size_t bytes)
{
    if (offset != 0) memcpy((char *)job + offset, value, bytes);
}

/* Returns the set of types that the array may have in this call. */
static uint32_t types_of(const job *job, const job_array *field)
{
    switch (field->types) {
    case JOB_SAME_TYPE:
        return ffi_set(job->row_type);
    case JOB_WIDE_TYPE:
        return job->row_type == EPIC_F64 ? FFI_SET(EPIC_F64) : FFI_SET_F32;
    case JOB_WEIGHT_TYPE:
        return ffi_set(job->weight_type);
    default:
        return field->types;
    }
}

/* Returns how many elements the array must have, or FFI_ANY_COUNT. */
static int64_t count_of(const job *job, const job_array *field)
{
    if (field->dims[0] == DIM_ANY) return FFI_ANY_COUNT;
    const int64_t *sizes = job->sizes;
    return ffi_product(sizes[field->dims[0]], sizes[field->dims[1]], sizes[field->dims[2]]);
}

/* Reads an array that may define sizes: its count is checked when they are known. */
static void read_array(ffi_reader *reader, job *job, const job_array *field)
{
    const ffi_need need = {field->name, types_of(job, field), FFI_ANY_COUNT,
                           .result = (field->flags & JOB_RESULT) != 0,
                           .optional = (field->flags & JOB_OPTIONAL) != 0};
    ffi_array array = ffi_take(reader, &need);
    if (reader->error != NULL) return;
    if (field->flags & JOB_LEADS) job->row_type = array.type;
    if (array.data != NULL) {
        if (field->sets_rows) job->sizes[field->sets_rows] = array.rows;
        if (field->sets_columns) job->sizes[field->sets_columns] = array.columns;
        const int64_t count = count_of(job, field);
        if (count != FFI_ANY_COUNT) ffi_check_count(reader, field->name, array, count);
        if (reader->error != NULL) return;
    }
    if (field->kind != JOB_ARRAY) read_tail(reader, job, field, &array);
    const epic_rows rows = ffi_rows(array);
    put(job, field->data, &array.data, sizeof array.data);
    put(job, field->rows, &rows, sizeof rows);
    put(job, field->element, &array.type, sizeof array.type);
    put(job, field->num_rows, &array.rows, sizeof array.rows);
    put(job, field->count, &array.count, sizeof array.count);
}

static void read_field(ffi_reader *reader, job *job, const job_array *field)
{
    if (field->kind == JOB_SITE)
        read_site(reader, job);
    else if (field->kind == JOB_CHANNEL)
        read_channel(reader, job);
    else
        read_array(reader, job, field);
}

static epic_call *call_of(job *job)
{
    return (epic_call *)(void *)((char *)job + job->operation->call);
}

/* NULL: the reader has the error. */
static job *read_job(ffi_reader *reader, const job_operation *operation)
{
    job *job = calloc(1, operation->bytes);
    if (job == NULL) {
        reader->error =
            ffi_fail(reader->frame, EPIC_ENOMEM, "no memory for %zu bytes", operation->bytes);
        return NULL;
    }
    job->operation = operation;
    job->on_device = reader->on_device;
    job->api = reader->frame->api;
    job->sizes[DIM_ONE] = 1;
    job->row_type = FFI_OTHER;
    operation->read(reader, job);
    for (int i = 0; i < operation->num_arrays; i++)
        read_field(reader, job, &operation->arrays[i]);
    ffi_result(reader, "done", FFI_SET_U8, 1); /* never written: see epic/jax/call.py */
    if (operation->check != NULL && reader->error == NULL) operation->check(reader, job);
    job->use.tag = tag_of(job);
    call_of(job)->tag = job->use.tag;
    if (reader->error == NULL) return job;
    free(job);
    return NULL;
}

/* ----------------------------------------------------------------------------- members ---- */

typedef struct claim {
    char name[MEMBERS_NAME];
    member_device device;
    member_place wanted, has;
} claim;

static ffi_error *other_devices(const ffi_frame *frame, const char *what, const claim *claim)
{
    return ffi_fail(
        frame, EPIC_EMISMATCH,
        "epic.jax.%s: the program was made for group \"%s\" of %s, and the group "
        "that is open under this name has %s: use in the program what epic.jax.open "
        "gave last, or open the group with the program's mesh",
        what, claim->name, claim->wanted.devices, claim->has.devices);
}

static ffi_error *other_rank(const ffi_frame *frame, const char *what, const claim *claim)
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

static ffi_error *refusal(const ffi_frame *frame, const job *job, member_answer answer,
                          const claim *claim)
{
    const char *what = job->operation->what;
    if (answer == MEMBER_OTHER_DEVICES) return other_devices(frame, what, claim);
    if (answer == MEMBER_OTHER_RANK) return other_rank(frame, what, claim);
    if (answer == MEMBER_NONE)
        return ffi_fail(
            frame, EPIC_ECLOSED,
            "epic.jax.%s: group \"%s\" is not open on %s device %d of this process: "
            "call epic.jax.open before the program runs",
            what, claim->name, claim->device.is_gpu ? "CUDA" : "CPU", claim->device.ordinal);
    return ffi_fail(frame, EPIC_EINVAL,
                    "epic.jax.%s: another call with the same number (tag %llu) is in flight on "
                    "device %d, so their order would be chance.  An inner jit that is called "
                    "twice gives both calls one number: give their plans different channel=, "
                    "or order them by after=.  The group is broken: open it again",
                    what, (unsigned long long)job->use.tag, claim->device.ordinal);
}

/* Enters the member that the attribute `group` and the call's device say, if it is where the program
 * takes it to be. */
static void enter(ffi_reader *reader, job *job)
{
    claim claim = {.device = {reader->on_device, ffi_ordinal(reader)},
                   .wanted.rank = job->rank};
    ffi_text(reader, "group", claim.name, sizeof claim.name);
    ffi_text(reader, "devices", claim.wanted.devices, sizeof claim.wanted.devices);
    if (reader->error != NULL) return;
    claim.has = claim.wanted;
    const member_answer answer = member_enter(&job->use, claim.name, claim.device, &claim.has);
    if (answer != MEMBER_OK) reader->error = refusal(reader->frame, job, answer, &claim);
}

static ffi_error *run(job *job)
{
    const epic_result result = job->operation->run(job);
    if (result == EPIC_OK) return NULL;
    /* Two calls of one number need not be here at once for ranks to take one for the other. */
    const char *hint =
        result == EPIC_EMISMATCH
            ? ".  Calls of an inner jit that is called twice share a number: give their plans "
              "different channel=, or order them by after="
            : "";
    char sentence[1280], text[1536];
    words_translate(epic_error(job->use.ctx), sentence, sizeof sentence);
    snprintf(text, sizeof text, "epic.jax.%s: %s%s", job->operation->what, sentence, hint);
    return ffi_error_new(job->api, result, text);
}

/* -------------------------------------------------------------------------- the host ---- */

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

/* The member is left before the future is set: what runs next may use the same tag. */
static void run_task(pool_task *task)
{
    job *mine = (job *)task;
    ffi_error *error = run(mine);
    member_leave(&mine->use);
    const XLA_FFI_Api *api = mine->api;
    XLA_FFI_Future *future = mine->future;
    free(mine);
    set_future(api, future, error);
}

static ffi_error *start(ffi_frame *frame, job *job)
{
    const XLA_FFI_Api *api = job->api;
    XLA_FFI_Future_Create_Args create = {XLA_FFI_Future_Create_Args_STRUCT_SIZE, NULL, NULL};
    ffi_error *error = api->XLA_FFI_Future_Create(&create);
    if (error == NULL) {
        job->task.run = run_task;
        job->future = frame->future = create.future;
        if (pool_run(&job->task)) return NULL; /* the job may be gone by now */
    }
    const char *what = job->operation->what;
    member_leave(&job->use);
    free(job);
    if (error == NULL)
        set_future(api, create.future,
                   ffi_fail(frame, EPIC_ENOMEM, "epic.jax.%s: the system gives no more threads",
                            what));
    return error;
}

ffi_error *job_on_host(ffi_frame *frame, const job_operation *operation)
{
    if (ffi_is_query(frame, 0)) return NULL;
    ffi_reader reader = ffi_read(frame, false);
    job *job = read_job(&reader, operation);
    if (job == NULL) return reader.error;
    enter(&reader, job);
    if (reader.error == NULL) return start(frame, job);
    free(job);
    return reader.error;
}

/* --------------------------------------------------------------------------- the GPU ---- */

/* Errors in the data, which epic_check tells, end nothing here: this rank would leave the rest of
 * its program out, and the others would wait for it. */
ffi_error *job_on_gpu(ffi_frame *frame, const job_operation *operation, bool in_graphs)
{
    if (ffi_is_query(frame, in_graphs ? XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE : 0))
        return NULL;
    ffi_reader reader = ffi_read(frame, true);
    job *job = read_job(&reader, operation);
    if (job == NULL) return reader.error;
    call_of(job)->stream = ffi_stream(&reader);
    enter(&reader, job);
    if (reader.error == NULL) {
        reader.error = run(job);
        member_leave(&job->use);
    }
    free(job);
    return reader.error;
}
