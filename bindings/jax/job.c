/* SPDX-License-Identifier: Apache-2.0 */
/* One operation that waits for peers: from XLA's call to its future. */
#include "job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *job_new(ffi_reader *reader, size_t bytes)
{
    void *made = calloc(1, bytes);
    if (made == NULL && reader->error == NULL)
        reader->error = ffi_fail(reader->frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                                 "no memory for %zu bytes", bytes);
    return made;
}

/* ------------------------------------------------------------------------------ tags ---- */

enum { CALLERS_CHANNEL = 1 << 23 }; /* callers' numbers and call sites' never meet */

job_channel job_read_channel(ffi_reader *reader, uint32_t *site)
{
    *site = (uint32_t)ffi_arg_int(reader, "site");
    const int32_t channel = ffi_arg_int(reader, "channel");
    if (reader->error != NULL || channel < 0) return *site;
    if (channel >= CALLERS_CHANNEL)
        reader->error = ffi_fail(reader->frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                                 "channel %d: 0 to %d is needed", channel, CALLERS_CHANNEL - 1);
    return (job_channel)channel | CALLERS_CHANNEL;
}

uint64_t job_tag(job_channel channel, uint32_t site, job_role role)
{
    return (uint64_t)channel << 40 | (uint64_t)site << 8 | role;
}

job_channel job_plan_channel(ffi_reader *reader, ffi_array *plan)
{
    job_channel channel = 0;
    if (reader->error != NULL) return channel;
    if (plan->bytes < JOB_PLAN_TAIL) {
        reader->error = ffi_fail(reader->frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                                 "plan: %lld bytes are no plan", (long long)plan->bytes);
        return channel;
    }
    plan->bytes -= JOB_PLAN_TAIL;
    memcpy(&channel, (const char *)plan->data + plan->bytes, sizeof channel);
    return channel & (2 * CALLERS_CHANNEL - 1);
}

void job_put_channel(void *plan, size_t plan_bytes, job_channel channel)
{
    char *tail = (char *)plan + plan_bytes;
    memset(tail, 0, JOB_PLAN_TAIL);
    memcpy(tail, &channel, sizeof channel);
}

/* --------------------------------------------------------------------- start and end ---- */

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

/* The seat is left before the future is set: what runs next may use the same tag. */
static void run_task(pool_task *task)
{
    job *mine = (job *)task;
    const epic_result result = mine->run(mine);
    ffi_error *error = NULL;
    if (result != EPIC_OK) {
        char text[768];
        snprintf(text, sizeof text, "epic.jax.%s: %s", mine->what, epic_error(mine->use.ctx));
        error = ffi_error_new(mine->api, ffi_code(result), text);
    }
    seat_leave(&mine->use);
    const XLA_FFI_Api *api = mine->api;
    XLA_FFI_Future *future = mine->future;
    free(mine);
    set_future(api, future, error);
}

static ffi_error *refuse(const ffi_frame *frame, const job *job, seat_answer answer,
                         const char *name, int32_t ordinal)
{
    if (answer == SEAT_NONE)
        return ffi_fail(frame, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                        "epic.jax.%s: group \"%s\" is not open on device %d of this process: "
                        "call epic.jax.open before the program runs",
                        job->what, name, ordinal);
    return ffi_fail(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                    "epic.jax.%s: another call with the same number (tag %llu) is in flight on "
                    "device %d, so their order would be chance.  An inner jit that is called "
                    "twice gives both calls one number: give their plans different channel=, "
                    "or order them by after=.  The group is broken: open it again",
                    job->what, (unsigned long long)job->use.tag, ordinal);
}

static ffi_error *make_future(ffi_frame *frame, job *job)
{
    XLA_FFI_Future_Create_Args create = {XLA_FFI_Future_Create_Args_STRUCT_SIZE, NULL, NULL};
    ffi_error *error = frame->api->XLA_FFI_Future_Create(&create);
    if (error != NULL) return error;
    job->api = frame->api;
    job->future = create.future;
    frame->future = create.future;
    return NULL;
}

static ffi_error *launch(ffi_frame *frame, job *job)
{
    ffi_error *error = make_future(frame, job);
    if (error != NULL) {
        seat_leave(&job->use);
        free(job);
        return error;
    }
    XLA_FFI_Future *future = job->future;
    if (pool_run(&job->task)) return NULL; /* the job may be gone by now */
    seat_leave(&job->use);
    set_future(frame->api, future,
               ffi_fail(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                        "epic.jax.%s: the system gives no more threads", job->what));
    free(job);
    return NULL;
}

ffi_error *job_start(ffi_frame *frame, ffi_reader *reader, job *job, uint64_t tag)
{
    char name[SEATS_NAME];
    ffi_text(reader, "group", name, sizeof name);
    XLA_FFI_DeviceOrdinal_Get_Args ordinal = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL,
                                              frame->ctx, -1};
    if (reader->error == NULL) reader->error = frame->api->XLA_FFI_DeviceOrdinal_Get(&ordinal);
    if (reader->error != NULL) {
        free(job);
        return reader->error;
    }
    job->task.run = run_task;
    job->use.tag = tag;
    const seat_answer answer = seat_enter(&job->use, name, ordinal.device_ordinal);
    if (answer == SEAT_OK) return launch(frame, job);
    ffi_error *error = refuse(frame, job, answer, name, ordinal.device_ordinal);
    free(job);
    return error;
}
