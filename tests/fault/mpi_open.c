/* SPDX-License-Identifier: Apache-2.0 */
/* Tests a rank that is killed while a group of backend mpi opens, after each of the gathers of
 * open. The others must get an error that names it shortly after their deadline at the latest.
 */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "epic/epic.h"
#include "mpiexec.h"
#include "run.h"

#define NUM_RANKS 3
#define VICTIM 1
#define TIMEOUT_MS 1000
#define LIMIT_MS 5000 /* extra time, because the machine may be busy */
#define GOOD "got an error about rank 1"

/* A bootstrap whose victim dies after its last gather. */
typedef struct doomed {
    epic_bootstrap bootstrap;
    int left;
} doomed;

static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    doomed *d = self;
    const epic_result result = d->bootstrap.gather(d->bootstrap.self, mine, all, bytes);
    if (--d->left > 0 || d->bootstrap.rank != VICTIM) return result;
    run_nap_us(20000); /* by then its last message has been sent */
    raise(SIGKILL);
    return result;
}

static void be_rank(int num_gathers)
{
    int level;
    doomed d = {.left = num_gathers};
    epic_context *ctx;
    const epic_config config = {
        .max_tokens = 1, .max_row_bytes = 64, .timeout_ms = TIMEOUT_MS, .backend = "mpi"};
    run_alarm(20);
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    if (epic_bootstrap_mpi(&d.bootstrap, NULL, TIMEOUT_MS) != EPIC_OK) exit(1);
    const epic_bootstrap bootstrap = {.rank = d.bootstrap.rank,
                                      .num_ranks = d.bootstrap.num_ranks,
                                      .gather = gather,
                                      .self = &d};
    const uint64_t begin = run_now_ns();
    const epic_result result = epic_open(&ctx, &bootstrap, &config);
    const long ms = (long)((run_now_ns() - begin) / 1000000);
    const bool right = (result == EPIC_EPEER || result == EPIC_ETIMEOUT) &&
                       strstr(epic_error(ctx), "rank 1") && ms < LIMIT_MS;
    printf("rank %d %s: %s after %ld ms: %s\n", bootstrap.rank,
           right ? GOOD : "got no error about rank 1", epic_result_name(result), ms,
           epic_error(ctx));
    fflush(stdout);
    epic_close(ctx);
    run_nap_us(200000); /* by then the others have noticed, too, before mpiexec ends the job */
    _exit(0);
}

static void check_killed(const char *program, int num_gathers)
{
    char command[1024], line[1024], said[8192] = "";
    int good = 0;
    snprintf(command, sizeof command, "'%s' --enable-recovery -n %d '%s' %d 2>&1",
             mpiexec_name(), NUM_RANKS, program, num_gathers);
    FILE *out = popen(command, "r");
    while (out && fgets(line, sizeof line, out)) {
        good += strstr(line, GOOD) != NULL;
        strncat(said, line, sizeof said - strlen(said) - 1);
    }
    if (out) pclose(out);
    CHECK_SAY(good == NUM_RANKS - 1, "killed after gather %d: %d of %d got the error:\n%s",
              num_gathers, good, NUM_RANKS - 1, said);
}

int main(int argc, char **argv)
{
    if (argc > 1) be_rank(atoi(argv[1]));
    check_begin();
    mpiexec_permit();
    if (!mpiexec_recovers()) return check_skip("this mpiexec has no --enable-recovery");
    for (int i = 1; i <= 3; i++) check_killed(argv[0], i);
    return check_end();
}
