/* SPDX-License-Identifier: Apache-2.0 */
/* One operation that waits for peers: from XLA's call to its future. */
#ifndef EPIC_JAX_JOB_H
#define EPIC_JAX_JOB_H

#include "ffi.h"
#include "pool.h"
#include "seats.h"

/* What an operation does: the last bits of its tag. */
typedef enum job_role {
    ROLE_PLAN = 0,
    ROLE_DISPATCH = 1,
    ROLE_COMBINE = 2,
    ROLE_DISPATCH_BACKWARD = 3,
    ROLE_COMBINE_BACKWARD = 4,
    ROLE_SUM = 5,
    ROLE_MOE = 6,
    ROLE_MOE_BACKWARD = 7
} job_role;

/* The number of a plan: the caller's channel if there is one, else of its call site. */
typedef uint32_t job_channel;

enum { JOB_PLAN_TAIL = 16 }; /* bytes behind the core's plan: its channel, then zeros */

/* A job begins with this; what follows is the operation's.  XLA keeps arrays alive until the
 * future is set, but not the frame, so all that is used is copied. */
typedef struct job {
    pool_task task;
    seat_use use;
    const char *what; /* "dispatch" */
    epic_result (*run)(struct job *job);
    const XLA_FFI_Api *api;
    XLA_FFI_Future *future;
} job;

/* Zeroed memory for a job, `bytes` long; NULL: the reader has the error. */
void *job_new(ffi_reader *reader, size_t bytes);

/* Reads the two numbers that every operation with a channel of its own is given. */
job_channel job_read_channel(ffi_reader *reader, uint32_t *site);

/* Operations are matched between ranks by this number: alike on all ranks, and different for
 * any two calls of a program, except for an inner jit called twice. */
uint64_t job_tag(job_channel channel, uint32_t site, job_role role);

/* The channel that travels with a plan.  `plan` is the array of a finished plan; its tail is cut
 * off. */
job_channel job_plan_channel(ffi_reader *reader, ffi_array *plan);
void job_put_channel(void *plan, size_t plan_bytes, job_channel channel);

/* Gives the job its thread and the frame its future, or frees the job and returns an error, also
 * the reader's.  Its attribute `group` says whose seat. */
ffi_error *job_start(ffi_frame *frame, ffi_reader *reader, job *job, uint64_t tag);

#endif
