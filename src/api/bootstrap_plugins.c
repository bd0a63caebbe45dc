/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_bootstrap_mpi with the plugin libepic_mpi.so, and epic_bootstrap_nccl with
 * libepic_cuda.so. A plugin stores error texts in its own memory. The caller reads error texts
 * with epic_error() of libepic.so, so every function in this file copies the plugin's error
 * text into libepic.so. */
#include <stdlib.h>

#include "api/config.h"
#include "bootstrap/bootstrap.h"
#include "context/context.h"

/* Wraps `inner`, a bootstrap that a plugin has made. Each function of the wrapper calls the
 * same function of `inner` and copies the plugin's error text into libepic.so. */
typedef struct bootstrap {
    const epic_backend *backend;
    epic_bootstrap inner;
} bootstrap;

static epic_result gather_with_errors(void *self, const void *mine, void *all, int64_t bytes)
{
    bootstrap *m = self;
    TRY(epic_bootstrap_check(mine, all, bytes));
    return backend_copy_error(m->backend, m->inner.gather(m->inner.self, mine, all, bytes));
}

static void close_bootstrap(void *self)
{
    bootstrap *m = self;
    epic_bootstrap_close(&m->inner);
    free(m);
}

/* Creates a bootstrap with the plugin of backend `name`. `native` is an MPI or NCCL
 * communicator. */
static epic_result make_bootstrap(epic_bootstrap *out, const char *name, const void *native,
                                  uint32_t timeout_ms)
{
    const epic_backend *backend;
    TRY(backend_find(&backend, name, 1, 0));
    bootstrap *m = calloc(1, sizeof *m);
    if (m == NULL) return epic_fail(EPIC_ENOMEM, "no memory for a bootstrap");
    m->backend = backend;
    const uint32_t patience = timeout_ms > 0 ? timeout_ms : BOOTSTRAP_TIMEOUT_MS;
    const epic_result result =
        backend_copy_error(backend, backend->bootstrap(&m->inner, native, patience));
    if (result != EPIC_OK) {
        free(m);
        return result;
    }
    *out = (epic_bootstrap){.rank = m->inner.rank,
                            .num_ranks = m->inner.num_ranks,
                            .gather = gather_with_errors,
                            .close = close_bootstrap,
                            .self = m};
    return EPIC_OK;
}

/* Checks that `out` is not NULL. Clears *out, so that the caller may close *out even if the
 * bootstrap cannot be created. */
static epic_result clear_bootstrap(epic_bootstrap *out)
{
    if (out == NULL)
        return epic_fail(EPIC_EINVAL, "out is NULL: pass an epic_bootstrap to fill in");
    *out = (epic_bootstrap){0};
    return EPIC_OK;
}

epic_result epic_bootstrap_mpi(epic_bootstrap *out, const void *comm, uint32_t timeout_ms)
{
    TRY(clear_bootstrap(out));
    return make_bootstrap(out, "mpi", comm, timeout_ms);
}

epic_result epic_bootstrap_nccl(epic_bootstrap *out, struct ncclComm *comm, uint32_t timeout_ms)
{
    TRY(clear_bootstrap(out));
    if (comm == NULL)
        return epic_fail(EPIC_EINVAL,
                         "comm is NULL: must be an initialized NCCL communicator; call "
                         "ncclCommInitRank first");
    return make_bootstrap(out, "p2p", comm, timeout_ms);
}
