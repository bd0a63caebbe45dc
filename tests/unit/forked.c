/* SPDX-License-Identifier: Apache-2.0 */
/* Tests a process that forks while it has a context. In the child every call is refused.
 * Closing the context there changes nothing for the parent and its peers. */
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "context/context.h"
#include "epic/epic.h"
#include "run.h"
#include "step.h"

static void refused(epic_context *ctx, epic_result result, const char *call)
{
    CHECK_SAY(result == EPIC_ECLOSED && strstr(epic_error(ctx), "fork"), "%s: %s: %s", call,
              epic_result_name(result), epic_error(ctx));
}

/* Makes every call that takes a context, then epic_close. */
static void be_a_child(epic_context *ctx, step *s)
{
    epic_failure_info info;
    const epic_plan_args plan = step_plan(s, 1);
    const epic_dispatch_args dispatch = step_dispatch(s, 1);
    const epic_allreduce_sum_args sum = step_sum(s, 1);
    const epic_router_args router = {.num_tokens = 0};
    const epic_moe_args moe = {.weights = NULL};
    refused(ctx, epic_plan(ctx, &plan), "plan");
    refused(ctx, epic_dispatch(ctx, &dispatch), "dispatch");
    refused(ctx, epic_allreduce_sum(ctx, &sum), "sum");
    refused(ctx, epic_router_forward(ctx, &router), "router_forward");
    refused(ctx, epic_moe_forward(ctx, &moe), "moe_forward");
    refused(ctx, epic_check(ctx), "check");
    refused(ctx, epic_failure(ctx, &info), "failure");
    epic_abort(ctx, 1, "the child has nothing to say");
    CHECK_EQ(epic_max_sms(ctx), 0);
    CHECK_EQ(epic_rank(ctx), s->rank);
    epic_close(ctx);

    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES};
    CHECK_SAY(epic_open(&ctx, NULL, &config) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(step_works(ctx, 1));
    epic_close(ctx);
}

/* Rank 0 forks, and its child forks again. Then all ranks continue. */
static void ranks(const epic_bootstrap *bootstrap, void *self)
{
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .backend = self,
                                .timeout_ms = 20000};
    epic_context *ctx;
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    step s;
    step_open(&s, ctx, 6, 32);
    CHECK(step_all(&s, 1));
    const pid_t child = bootstrap->rank == 0 ? fork() : 1;
    if (child == 0) {
        const pid_t grandchild = fork();
        be_a_child(ctx, &s);
        if (grandchild > 0) waitpid(grandchild, NULL, 0);
        _exit(0);
    }
    if (bootstrap->rank == 0) {
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK_SAY(step_all(&s, 1), "after the child: %s", epic_error(ctx));
    CHECK(epic_check(ctx) == EPIC_OK);
    step_close(&s);
    epic_close(ctx);
}

/* ----------------------------------------------- a thread that is in epic_close ---- */

static _Thread_local bool stays_in_munmap;
static sem_t entered, may_return;

/* Replaces the function of the C library, to keep a thread inside epic_close, which holds the
 * lock of backend threads when it unmaps the memory of a group. */
int munmap(void *at, size_t bytes)
{
    if (stays_in_munmap) {
        stays_in_munmap = false;
        sem_post(&entered);
        sem_wait(&may_return);
    }
    return (int)syscall(SYS_munmap, at, bytes);
}

static epic_context *open_threads(void)
{
    const epic_bootstrap alone = {.num_ranks = 1};
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .backend = "threads"};
    epic_context *ctx = NULL;
    const bool is_open = epic_open(&ctx, &alone, &config) == EPIC_OK;
    CHECK_SAY(is_open, "%s", epic_error(ctx));
    return ctx;
}

static void *close_slowly(void *ctx)
{
    stays_in_munmap = true;
    epic_close(ctx);
    return NULL;
}

/* Forks while another thread is inside epic_close. The child does not have this thread. It can
 * still close the context of its parent, and open and close one of its own. */
static void fork_during_close(void)
{
    pthread_t thread;
    int status = -1;
    epic_context *ctx = open_threads();
    sem_init(&entered, 0, 0);
    sem_init(&may_return, 0, 0);
    if (!CHECK(pthread_create(&thread, NULL, close_slowly, open_threads()) == 0)) return;
    sem_wait(&entered);
    const pid_t child = run_fork();
    if (child == 0) {
        run_alarm(20);
        epic_close(ctx);
        epic_close(open_threads());
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    sem_post(&may_return);
    pthread_join(thread, NULL);
    epic_close(ctx);
}

int main(void)
{
    static char shm[] = "shm", threads[] = "threads";
    check_begin();
    run_alarm(100);
    run_processes(1, ranks, NULL, 30);
    run_processes(3, ranks, shm, 60);
    run_threads(2, ranks, threads);
    fork_during_close();
    return check_end();
}
