/* SPDX-License-Identifier: Apache-2.0 */
/* Creates a bootstrap from a communicator.
 *
 * MPI's own collectives wait forever for a missing rank and do not report which rank is
 * missing. So this file duplicates the caller's communicator with the non-blocking
 * MPI_Comm_idup. In a gather, every rank sends a message to every other rank on the duplicate.
 *
 * While the duplicate is created, a rank cannot see which ranks are missing. So after half of
 * the time limit each rank sends a roll call, an empty message, to all ranks on the caller's
 * communicator. If the roll call of a rank does not arrive, the error text reports that rank as
 * missing.
 *
 * MPI can cancel neither the creation of a duplicate nor messages in flight. It may still
 * access their memory after a failure, so this memory is then never freed. */
#include "bootstrap/bootstrap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/mpi/group.h"
#include "base/deadline.h"

#define GATHER_TAG 0
#define ROLL_TAG 32767 /* MPI tag of roll calls: the largest tag that every MPI allows */
#define NAP_NS 100000

/* The state of a bootstrap made from a communicator; epic_bootstrap.self points to it. */
typedef struct bootstrap {
    MPI_Comm comm;
    int rank, num_ranks;
    uint32_t timeout_ms;
    epic_result failed; /* EPIC_OK, or the result of the first gather that failed */
    char sentence[512];
} bootstrap;

/* The state of one gather. `requests` has one receive per rank, then one send per rank. The two
 * requests for this rank itself stay MPI_REQUEST_NULL. */
typedef struct gather_round {
    unsigned char *bytes;  /* [num_ranks, size]: the bytes of each rank */
    MPI_Request *requests; /* [2, num_ranks]: a receive from, and a send to, each rank */
    MPI_Status *statuses;  /* [2, num_ranks]: output of MPI_Testsome */
    int *indices;          /* [2, num_ranks]: output of MPI_Testsome */
    bool *missing;         /* [num_ranks]: true for ranks whose message has not arrived */
    size_t size;
} gather_round;

static void lock_mpi(void)
{
    if (runtime_mutex()) pthread_mutex_lock(runtime_mutex());
}

static void unlock_mpi(void)
{
    if (runtime_mutex()) pthread_mutex_unlock(runtime_mutex());
}

static void send_roll_calls(MPI_Comm comm, int rank, int num_ranks)
{
    for (int r = 0; r < num_ranks; r++) {
        MPI_Request request;
        if (r == rank || MPI_Isend(NULL, 0, MPI_BYTE, r, ROLL_TAG, comm, &request)) continue;
        MPI_Request_free(&request);
    }
}

/* If a roll call has arrived, receives it and clears the `missing` flag of its sender. Returns
 * false if no roll call has arrived. */
static bool receive_roll_call(MPI_Comm comm, bool *missing)
{
    int came = 0;
    MPI_Message message;
    MPI_Status status;
    if (MPI_Improbe(MPI_ANY_SOURCE, ROLL_TAG, comm, &came, &message, &status) || !came)
        return false;
    MPI_Mrecv(NULL, 0, MPI_BYTE, &message, MPI_STATUS_IGNORE);
    missing[status.MPI_SOURCE] = false;
    return true;
}

/* Receives the roll calls ("I am here" messages) that have arrived. Sends this rank's own roll
 * call once: when half of the time limit has passed (`late`), or when a roll call of another
 * rank has arrived. missing[m->rank] is true until this rank has sent its roll call.
 *
 * Ignores MPI errors, because roll calls only improve an error text. Sets MPI_ERRORS_RETURN
 * during the call, because the communicator's error handler may end the program. */
static void exchange_roll_calls(const bootstrap *m, MPI_Comm comm, bool *missing, bool late)
{
    MPI_Errhandler theirs;
    MPI_Comm_get_errhandler(comm, &theirs);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    while (receive_roll_call(comm, missing)) late = true;
    if (late && missing[m->rank]) {
        send_roll_calls(comm, m->rank, m->num_ranks);
        missing[m->rank] = false;
    }
    MPI_Comm_set_errhandler(comm, theirs);
    MPI_Errhandler_free(&theirs);
}

static epic_result fail_with_missing(const bootstrap *m, const bool *missing)
{
    char names[160];
    epic_bootstrap_list_ranks(names, sizeof names, missing, m->num_ranks);
    return epic_fail(EPIC_ETIMEOUT,
                     "bootstrap over MPI: rank %d waited %u ms for %s, which did not join the "
                     "communicator's bootstrap",
                     m->rank, m->timeout_ms, names);
}

/* Polls until the duplicate communicator exists or the time limit has passed. In the second
 * half of the time limit, also exchanges roll calls. Other threads may use MPI between two
 * polls. */
static epic_result wait_for_duplicate(bootstrap *m, MPI_Comm comm, MPI_Request *request,
                                      bool *missing)
{
    const int64_t start = epic_bootstrap_now_ms();
    deadline end = deadline_begin_ms(m->timeout_ms);
    for (;;) {
        int done = 0;
        const int64_t now = epic_bootstrap_now_ms();
        lock_mpi();
        const int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (code == MPI_SUCCESS && !done)
            exchange_roll_calls(m, comm, missing, now - start >= m->timeout_ms / 2);
        unlock_mpi();
        if (code != MPI_SUCCESS) return runtime_fail(code, "MPI_Comm_idup");
        if (done) return EPIC_OK;
        if (deadline_before_nap(&end, NAP_NS)) return fail_with_missing(m, missing);
        runtime_nap(NAP_NS);
    }
}

static epic_result duplicate_comm(bootstrap *m, MPI_Comm comm)
{
    MPI_Request request;
    bool *missing = malloc((size_t)m->num_ranks * sizeof *missing);
    if (!missing) return epic_fail(EPIC_ENOMEM, "no memory for %d ranks", m->num_ranks);
    for (int r = 0; r < m->num_ranks; r++) missing[r] = true;
    lock_mpi();
    const int code = MPI_Comm_idup(comm, &m->comm, &request);
    unlock_mpi();
    const epic_result result = code == MPI_SUCCESS
                                   ? wait_for_duplicate(m, comm, &request, missing)
                                   : runtime_fail(code, "MPI_Comm_idup");
    free(missing);
    if (result == EPIC_OK) MPI_Comm_set_errhandler(m->comm, MPI_ERRORS_RETURN);
    return result;
}

static void free_round(gather_round *r)
{
    free(r->bytes);
    free(r->requests);
    free(r->statuses);
    free(r->indices);
    free(r->missing);
}

/* Allocates the arrays of a gather and copies `mine` to this rank's index. */
static epic_result make_round(gather_round *r, const bootstrap *m, const void *mine,
                              size_t size)
{
    const size_t n = (size_t)m->num_ranks;
    *r = (gather_round){.bytes = malloc(n * size + 1),
                        .requests = malloc(2 * n * sizeof *r->requests),
                        .statuses = calloc(2 * n, sizeof *r->statuses),
                        .indices = malloc(2 * n * sizeof *r->indices),
                        .missing = malloc(n * sizeof *r->missing),
                        .size = size};
    if (!r->bytes || !r->requests || !r->statuses || !r->indices || !r->missing) {
        free_round(r);
        return epic_fail(EPIC_ENOMEM, "no memory for %zu bytes of %d ranks", size,
                         m->num_ranks);
    }
    for (size_t i = 0; i < 2 * n; i++) r->requests[i] = MPI_REQUEST_NULL;
    for (size_t i = 0; i < n; i++) r->missing[i] = i != (size_t)m->rank;
    if (size > 0) memcpy(r->bytes + (size_t)m->rank * size, mine, size);
    return EPIC_OK;
}

static int post_messages(gather_round *r, const bootstrap *m)
{
    const unsigned char *mine = r->bytes + (size_t)m->rank * r->size;
    const int size = (int)r->size;
    int code = MPI_SUCCESS;
    for (int i = 0; i < m->num_ranks && code == MPI_SUCCESS; i++) {
        if (i == m->rank) continue;
        code = MPI_Irecv(r->bytes + (size_t)i * r->size, size, MPI_BYTE, i, GATHER_TAG, m->comm,
                         &r->requests[i]);
        if (code == MPI_SUCCESS)
            code = MPI_Isend(mine, size, MPI_BYTE, i, GATHER_TAG, m->comm,
                             &r->requests[m->num_ranks + i]);
    }
    return code;
}

static epic_result fail_with_sizes(const bootstrap *m, int other, size_t size)
{
    return epic_fail(
        EPIC_EMISMATCH,
        "bootstrap over MPI: rank %d passed %zu bytes to a gather, rank %d another "
        "number; install the same EPIC on every rank",
        m->rank, size, other);
}

/* Handles one finished request: number i of the requests that MPI_Testsome has reported. `code`
 * is the result of MPI_Testsome. Returns EPIC_EMISMATCH if the peer sent a different number of
 * bytes. */
static epic_result finish_request(gather_round *r, const bootstrap *m, int i, int code)
{
    const int which = r->indices[i];
    MPI_Status *status = &r->statuses[i];
    int size = 0, kind = MPI_SUCCESS;
    if (code != MPI_SUCCESS) MPI_Error_class(status->MPI_ERROR, &kind);
    if (kind == MPI_ERR_TRUNCATE) return fail_with_sizes(m, which, r->size);
    if (kind != MPI_SUCCESS && kind != MPI_ERR_PENDING)
        return runtime_fail(status->MPI_ERROR, "a message");
    if (which >= m->num_ranks) return EPIC_OK;
    MPI_Get_count(status, MPI_BYTE, &size);
    if ((size_t)size != r->size) return fail_with_sizes(m, which, r->size);
    r->missing[which] = false;
    return EPIC_OK;
}

/* Polls all requests, and subtracts the number of finished requests from *left. */
static epic_result poll_round(gather_round *r, const bootstrap *m, int *left)
{
    int count = 0;
    const int code =
        MPI_Testsome(2 * m->num_ranks, r->requests, &count, r->indices, r->statuses);
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS)
        return runtime_fail(code, "MPI_Testsome");
    for (int i = 0; i < count; i++)
        /* if no request is active, MPI sets count to a negative value */
        TRY(finish_request(r, m, i, code));
    *left -= count > 0 ? count : 0;
    return EPIC_OK;
}

/* Runs one gather: posts all messages, and polls until they are done or the time is over. */
static epic_result run_round(gather_round *r, const bootstrap *m)
{
    deadline end = deadline_begin_ms(m->timeout_ms);
    int left = 2 * (m->num_ranks - 1);
    lock_mpi();
    const int code = post_messages(r, m);
    unlock_mpi();
    if (code != MPI_SUCCESS) return runtime_fail(code, "posting a message");
    for (;;) {
        lock_mpi();
        const epic_result result = poll_round(r, m, &left);
        unlock_mpi();
        if (result != EPIC_OK || left == 0) return result;
        if (deadline_before_nap(&end, NAP_NS)) return fail_with_missing(m, r->missing);
        runtime_nap(NAP_NS);
    }
}

/* Implements epic_bootstrap.gather. After a failure every later call returns the same error. */
static epic_result gather_bytes(void *self, const void *mine, void *all, int64_t bytes)
{
    bootstrap *m = self;
    gather_round r;
    if (m->failed) return epic_fail(m->failed, "%s", m->sentence);
    TRY(make_round(&r, m, mine, bytes));
    m->failed = run_round(&r, m);
    /* after a failure MPI may still access the memory of this gather, so do not free it */
    if (m->failed) {
        snprintf(m->sentence, sizeof m->sentence, "%s", epic_sentence());
        return m->failed;
    }
    if (bytes > 0) memcpy(all, r.bytes, (size_t)m->num_ranks * bytes);
    free_round(&r);
    return EPIC_OK;
}

/* Returns whether `comm` can be used for a bootstrap: it must be a valid intracommunicator. If
 * not, writes the reason to `why`, which has `size` bytes. `name` is the name of the
 * communicator in that text. */
bool bootstrap_can_use(MPI_Comm comm, const char *name, char *why, size_t size)
{
    int inter = 0;
    if (comm != MPI_COMM_NULL) MPI_Comm_test_inter(comm, &inter);
    if (comm != MPI_COMM_NULL && !inter) return true;
    snprintf(why, size,
             inter ? "%s points to an intercommunicator; merge it first"
                   : "%s points to MPI_COMM_NULL",
             name);
    return false;
}

/* Checks that `native` points to a usable communicator. If `native` is NULL, starts MPI unless
 * MPI was started before. */
static epic_result check_native(const void *native)
{
    char why[128];
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized)
        return epic_fail(EPIC_ENOTSUP, "bootstrap over MPI: MPI_Finalize was called");
    if (!native) return runtime_is_up() ? EPIC_OK : lifecycle_start();
    if (!runtime_is_up())
        return epic_fail(EPIC_EINVAL, "bootstrap over MPI: comm is given and MPI is not "
                                      "initialized: call MPI_Init_thread first");
    if (bootstrap_can_use(*(const MPI_Comm *)native, "comm", why, sizeof why)) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "bootstrap over MPI: %s", why);
}

static void close_bootstrap(void *self)
{
    bootstrap *m = self;
    lock_mpi();
    if (!m->failed && runtime_is_up()) MPI_Comm_free(&m->comm);
    unlock_mpi();
    free(m);
}

/* Creates a bootstrap of the ranks of a communicator. `native` points to an MPI_Comm, or is
 * NULL for MPI_COMM_WORLD. Collective. If some ranks do not call this function in time, returns
 * EPIC_ETIMEOUT with an error text that lists these ranks. */
epic_result mpi_bootstrap(epic_bootstrap *out, const void *native, uint32_t timeout_ms)
{
    TRY(check_native(native));
    const MPI_Comm comm = native ? *(const MPI_Comm *)native : MPI_COMM_WORLD;
    bootstrap *m = calloc(1, sizeof *m);
    if (!m) return epic_fail(EPIC_ENOMEM, "no memory for a bootstrap");
    m->timeout_ms = timeout_ms;
    MPI_Comm_rank(comm, &m->rank);
    MPI_Comm_size(comm, &m->num_ranks);
    /* after an error *m is never freed, because MPI may still write to it */
    TRY(duplicate_comm(m, comm));
    *out = (epic_bootstrap){.rank = m->rank,
                            .num_ranks = m->num_ranks,
                            .gather = gather_bytes,
                            .close = close_bootstrap,
                            .self = m};
    return EPIC_OK;
}
