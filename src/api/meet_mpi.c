/* SPDX-License-Identifier: Apache-2.0 */
/* Meetings over MPI.  libepic_mpi.so holds them; it has sentences of its own, which are brought
 * to where epic_error looks. */
#include <stdlib.h>

#include "api/config.h"
#include "context/context.h"
#include "meet/meet.h"

typedef struct meeting {
    const epic_backend *backend;
    epic_meet inner;
} meeting;

static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    meeting *m = self;
    TRY(epic_meet_check(mine, all, bytes));
    return backend_said(m->backend, m->inner.gather(m->inner.self, mine, all, bytes));
}

static void close_meeting(void *self)
{
    meeting *m = self;
    epic_meet_close(&m->inner);
    free(m);
}

epic_result epic_meet_mpi(epic_meet *out, const void *comm, uint32_t timeout_ms)
{
    const epic_backend *backend;
    if (out == NULL) return epic_fail(EPIC_EINVAL, "out is NULL: pass an epic_meet to fill in");
    *out = (epic_meet){0}; /* so that a failed meeting can be closed too */
    TRY(backend_find(&backend, "mpi"));
    meeting *m = calloc(1, sizeof *m);
    if (m == NULL) return epic_fail(EPIC_ENOMEM, "no memory for a meeting");
    m->backend = backend;
    const uint32_t patience = timeout_ms > 0 ? timeout_ms : MEET_TIMEOUT_MS;
    const epic_result result = backend_said(backend, backend->meet(&m->inner, comm, patience));
    if (result != EPIC_OK) {
        free(m);
        return result;
    }
    *out = (epic_meet){.rank = m->inner.rank,
                       .num_ranks = m->inner.num_ranks,
                       .gather = gather,
                       .close = close_meeting,
                       .self = m};
    return EPIC_OK;
}
