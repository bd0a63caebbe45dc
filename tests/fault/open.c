/* SPDX-License-Identifier: Apache-2.0 */
/* Tests faults inside epic_open. At one of its gathers a rank dies, leaves, stops or is late.
 * The others must get an error that names it, in time, and a new group must open afterwards.
 * Processes use a bootstrap over TCP and backend shm, threads a bootstrap in memory. */
#include <ctype.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"
#include "step.h"

#define MAX_RANKS 4
#define NUM_FAULTS 120 /* scaled */
#define WIDTH 6        /* number of faults that run at the same time */
#define HANG_S 40
#define SOON_MS 1000 /* a death must be reported within this time */
#define GRACE_MS 1500
/* how often a fault is tried if errors are late; on a busy machine they are not late each
 * time */
#define TRIES 6

enum kind { KILLED, AMID, EXITED, STOPPED, CLOSED, STALLED, LATE, NUM_KINDS };

static const struct {
    const char *name;
    bool needs_process, dies;
    epic_result result; /* result of the other ranks */
    uint32_t timeout_ms;
} kinds[NUM_KINDS] = {
    [KILLED] = {"kill -9", true, true, EPIC_EPEER, 15000},
    [AMID] = {"kill -9 a moment", true, true, EPIC_EPEER, 15000},
    [EXITED] = {"exit", true, true, EPIC_EPEER, 15000},
    [STOPPED] = {"stop", true, false, EPIC_ETIMEOUT, 2000},
    [CLOSED] = {"end of the bootstrap", false, false, EPIC_EPEER, 15000},
    [STALLED] = {"stall", false, false, EPIC_ETIMEOUT, 2000},
    [LATE] = {"delay", false, false, EPIC_OK, 15000},
};

typedef struct fault {
    enum kind kind;
    bool processes, after; /* after: the fault happens after the gather, otherwise before it */
    int num_ranks, victim, gather;
    uint64_t seed;
    char name[128];
} fault;

typedef struct stage { /* Memory that the ranks of a fault share. */
    _Atomic int done, closed;
    _Atomic uint64_t begin_ns;
    _Atomic int late;      /* number of errors that came after the promised time */
    char lateness[128];    /* description of the first late error */
    run_rendezvous *again; /* bootstrap of the surviving ranks */
} stage;

static struct tally { /* counts over all faults */
    _Atomic int faults, hangs, wrong_results, wrong_culprits, late, gathers[2];
} * totals;

typedef struct rank_of_fault {
    const fault *f;
    stage *stage;
    epic_bootstrap bootstrap, again;
    int rank, num_gathers;
    bool left;
} rank_of_fault;

static long slack_ms(void)
{
    const char *text = getenv("EPIC_TEST_SLACK_MS");
    return text ? atol(text) : 1000;
}

static void wait_for(_Atomic int *count, int many)
{
    while (atomic_load(count) < many) run_nap_us(500);
}

/* -------------------------------------------------------------------------- the victim ---- */

/* Kills the process a moment later, while the others continue to open. */
static void *kill_soon(void *self)
{
    const rank_of_fault *r = self;
    run_nap_us((long)(r->f->seed % 3000));
    atomic_store(&r->stage->begin_ns, run_now_ns());
    raise(SIGKILL);
    return NULL;
}

static void go_wrong(rank_of_fault *r)
{
    pthread_t thread;
    atomic_store(&r->stage->begin_ns, run_now_ns());
    switch (r->f->kind) {
    case KILLED:
        raise(SIGKILL);
        break;
    case AMID:
        pthread_create(&thread, NULL, kill_soon, r);
        break;
    case EXITED:
        _exit(0);
    case STOPPED:
        raise(SIGSTOP);
        break;
    case CLOSED:
        r->left = true;
        epic_bootstrap_close(&r->bootstrap);
        break;
    case STALLED:
        wait_for(&r->stage->done, r->f->num_ranks - 1);
        break;
    default:
        run_nap_us(100000);
    }
}

static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    rank_of_fault *r = self;
    const bool now = ++r->num_gathers == r->f->gather && r->rank == r->f->victim;
    if (now && !r->f->after) go_wrong(r);
    if (r->left) return EPIC_EPEER;
    const epic_result result = r->bootstrap.gather(r->bootstrap.self, mine, all, bytes);
    if (now && r->f->after) go_wrong(r);
    return result;
}

/* --------------------------------------------------------------------------- all ranks ---- */

/* Returns whether the sentence names the victim and no other rank. The rank of the bootstrap's
 * hub, and the rank whose sentence this is, may also be in it. */
static bool names_victim(const rank_of_fault *r, const char *sentence)
{
    int reporter = -1, after = 0;
    const bool is_from_another = sscanf(sentence, "open: rank %d: %n", &reporter, &after) == 1;
    if (is_from_another) sentence += after;
    bool named = reporter == r->f->victim;
    for (const char *at = strstr(sentence, "rank"); at; at = strstr(at + 4, "rank")) {
        const char *digits = at + 4 + (at[4] == 's') + 1;
        if (!isdigit((unsigned char)*digits)) continue;
        const int rank = atoi(digits);
        named |= rank == r->f->victim;
        if (rank != r->f->victim && rank != r->rank && rank != 0) return false;
        if (at[4] == 's') return false; /* several */
    }
    return named;
}

static void check_report(rank_of_fault *r, epic_context *ctx, epic_result result)
{
    const fault *f = r->f;
    const epic_result right = kinds[f->kind].result;
    /* it died after its open had succeeded */
    const bool opened = result == EPIC_OK && f->kind == AMID;
    float one = 1;
    const epic_allreduce_sum_args args = {.data = &one, .count = 1};
    if (opened) result = epic_allreduce_sum(ctx, &args);
    const long ms = (long)((run_now_ns() - atomic_load(&r->stage->begin_ns)) / 1000000);
    const long wait =
        right == EPIC_ETIMEOUT ? 2 * (long)kinds[f->kind].timeout_ms + GRACE_MS : SOON_MS;
    if (!CHECK_SAY(result == right, "%s: rank %d got %s instead of %s after %ld ms: %s",
                   f->name, r->rank, epic_result_name(result), epic_result_name(right), ms,
                   epic_error(ctx)))
        atomic_fetch_add(&totals->wrong_results, 1);
    if (ms > wait + slack_ms() && atomic_fetch_add(&r->stage->late, 1) == 0)
        snprintf(r->stage->lateness, sizeof r->stage->lateness,
                 "rank %d got %s after %ld ms, limit %ld", r->rank, epic_result_name(result),
                 ms, wait);
    if (result == EPIC_OK) return;
    epic_failure_info info;
    CHECK(epic_failure(ctx, &info) == EPIC_OK);
    CHECK(info.operation == (opened ? EPIC_OP_SUM : EPIC_OP_OPEN));
    CHECK(info.result == (uint32_t)result);
    const bool named = opened ? info.num_culprits == 1 && info.culprits[0] == f->victim
                              : names_victim(r, info.sentence);
    if (!CHECK_SAY(named, "%s: the error of rank %d is: %s", f->name, r->rank, info.sentence))
        atomic_fetch_add(&totals->wrong_culprits, 1);
}

/* A rank that comes late to the last gather, when the others have given up, may find all their
 * data. Then its open succeeds, and its first operation returns the error. */
static void check_victim(const rank_of_fault *r, epic_context *ctx, epic_result result)
{
    const fault *f = r->f;
    float one = 1;
    const epic_allreduce_sum_args args = {.data = &one, .count = 1};
    if (f->kind == LATE) {
        CHECK_SAY(result == EPIC_OK, "%s: the victim: %s", f->name, epic_error(ctx));
        return;
    }
    const bool late = f->kind == STOPPED || f->kind == STALLED;
    if (result == EPIC_OK && late) result = epic_allreduce_sum(ctx, &args);
    CHECK_SAY(result != EPIC_OK, "%s: the victim knows nothing", f->name);
}

static epic_result open_seat(epic_context **ctx, const epic_bootstrap *bootstrap,
                             const fault *f, uint32_t timeout_ms)
{
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .timeout_ms = timeout_ms,
                                .max_in_flight = 2,
                                .backend = f->processes ? "shm" : "threads"};
    return epic_open(ctx, bootstrap, &config);
}

static void be_rank(rank_of_fault *r)
{
    const fault *f = r->f;
    epic_context *ctx;
    const epic_bootstrap watched = {
        .rank = r->rank, .num_ranks = f->num_ranks, .gather = gather, .self = r};
    check_seed = f->seed;
    const epic_result result = open_seat(&ctx, &watched, f, kinds[f->kind].timeout_ms);
    /* wait until the process is killed */
    while (r->rank == f->victim && f->kind == AMID) pause();
    if (result == EPIC_OK && f->kind == LATE) {
        CHECK_SAY(step_works(ctx, 1), "%s: the group", f->name);
        atomic_store(&totals->gathers[f->processes], r->num_gathers);
    }
    if (r->rank == f->victim) {
        check_victim(r, ctx, result);
    } else {
        check_report(r, ctx, result);
        atomic_fetch_add(&r->stage->done, 1);
    }
    epic_close(ctx);
    if (!r->left) epic_bootstrap_close(&r->bootstrap);
    if (CHECK_SAY(open_seat(&ctx, &r->again, f, 20000) == EPIC_OK, "%s: again: %s", f->name,
                  epic_error(ctx)))
        CHECK_SAY(step_works(ctx, 1), "%s: the next group", f->name);
    epic_close(ctx);
}

/* --------------------------------------------------------------------------- processes ---- */

/* Returns a port that no other program can use. The socket is first bound without SO_REUSEADDR,
 * so that the port is exclusive. Then the option is set, so that rank 0 can listen there. */
static uint32_t hold_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    const int one = 1, holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(holder, (struct sockaddr *)&at, sizeof at) == 0);
    CHECK(getsockname(holder, (struct sockaddr *)&at, &bytes) == 0);
    setsockopt(holder, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    return ntohs(at.sin_port);
}

static void be_process(const fault *f, stage *stage, int rank, uint32_t port)
{
    rank_of_fault r = {.f = f, .stage = stage, .rank = rank};
    const bool dies = kinds[f->kind].dies;
    const epic_tcp tcp = {.rank = rank,
                          .num_ranks = f->num_ranks,
                          .port = port,
                          .timeout_ms = kinds[f->kind].timeout_ms};
    run_alarm(HANG_S);
    if (CHECK_SAY(epic_bootstrap_tcp(&r.bootstrap, &tcp) == EPIC_OK, "%s: bootstrap: %s",
                  f->name, epic_error(NULL))) {
        if (!dies || rank != f->victim)
            r.again = run_rendezvous_seat(stage->again, rank - (dies && rank > f->victim));
        be_rank(&r);
    }
    fflush(NULL);
    _exit(0);
}

static void lead_victim(const fault *f, stage *stage, pid_t pid)
{
    int status;
    if (f->kind != STOPPED) return;
    while (waitpid(pid, &status, WUNTRACED) < 0 && errno == EINTR) continue;
    if (!CHECK_SAY(WIFSTOPPED(status), "%s: the victim did not stop", f->name)) return;
    wait_for(&stage->done, f->num_ranks - 1);
    kill(pid, SIGCONT);
}

static void run_as_processes(const fault *f, stage *stage)
{
    pid_t pids[MAX_RANKS];
    const uint32_t port = hold_port();
    stage->again = run_rendezvous_new(f->num_ranks - kinds[f->kind].dies);
    for (int i = 0; i < f->num_ranks; i++)
        if ((pids[i] = run_fork()) == 0) be_process(f, stage, i, port);
    lead_victim(f, stage, pids[f->victim]);
    for (int i = 0; i < f->num_ranks; i++) {
        int status = 0;
        while (waitpid(pids[i], &status, 0) < 0 && errno == EINTR) continue;
        const bool killed = i == f->victim && (f->kind == KILLED || f->kind == AMID);
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
            atomic_fetch_add(&totals->hangs, 1);
        CHECK_SAY(killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0,
                  "%s: rank %d ended with status 0x%x", f->name, i, status);
    }
}

/* ----------------------------------------------------------------------------- threads ---- */

static void *be_thread(void *self)
{
    be_rank(self);
    return NULL;
}

static void run_as_threads(const fault *f, stage *stage)
{
    epic_bootstrap first[MAX_RANKS], again[MAX_RANKS];
    rank_of_fault ranks[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    CHECK(epic_bootstrap_threads(first, f->num_ranks, kinds[f->kind].timeout_ms) == EPIC_OK);
    CHECK(epic_bootstrap_threads(again, f->num_ranks, 20000) == EPIC_OK);
    for (int i = 0; i < f->num_ranks; i++) {
        ranks[i] = (rank_of_fault){
            .f = f, .stage = stage, .bootstrap = first[i], .again = again[i], .rank = i};
        pthread_create(&threads[i], NULL, be_thread, &ranks[i]);
    }
    for (int i = 0; i < f->num_ranks; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < f->num_ranks; i++) epic_bootstrap_close(&again[i]);
}

/* --------------------------------------------------------------------------------- all ---- */

/* Chooses each kind of fault before and after each gather, but not after the last one, when the
 * others have finished. */
static void choose(fault *f, uint64_t number, uint64_t seed)
{
    run_random random = {seed};
    *f = (fault){.seed = seed, .kind = (enum kind)(number % NUM_KINDS)};
    f->processes = kinds[f->kind].needs_process || run_chance(&random, 50);
    const uint64_t gathers = (uint64_t)totals->gathers[f->processes];
    const uint64_t when = number / NUM_KINDS % (2 * gathers - 1);
    f->gather = 1 + (int)(when / 2);
    f->after = when % 2;
    f->num_ranks = (int)run_between(&random, 2, MAX_RANKS);
    f->victim = (int)run_below(&random, f->num_ranks);
    snprintf(f->name, sizeof f->name, "%s, %s: %s of rank %d of %d %s gathering %d",
             f->processes ? "shm" : "threads", f->kind == LATE ? "no fault" : "fault",
             kinds[f->kind].name, f->victim, f->num_ranks, f->after ? "after" : "before",
             f->gather);
}

static void begin(const fault *f)
{
    fflush(NULL);
    if (run_fork() != 0) return;
    check_seed = f->seed;
    stage *stage;
    int tries = 0;
    do {
        stage = run_share(sizeof *stage);
        run_alarm(HANG_S + 20);
        if (f->processes)
            run_as_processes(f, stage);
        else
            run_as_threads(f, stage);
    } while (atomic_load(&stage->late) && ++tries < TRIES);
    if (!CHECK_SAY(tries < TRIES, "%s: late %d times: %s", f->name, tries, stage->lateness))
        atomic_fetch_add(&totals->late, 1);
    fflush(NULL);
    _exit(0);
}

static void finish_one(void)
{
    int status;
    if (wait(&status) < 0) return;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) atomic_fetch_add(&totals->hangs, 1);
    CHECK_SAY(status == 0, "a fault's process ended with status 0x%x", status);
}

/* Counts the gathers of an open. */
static void count_gatherings(bool processes)
{
    const fault f = {
        .kind = LATE, .processes = processes, .num_ranks = 2, .gather = 1, .name = "no fault"};
    begin(&f);
    finish_one();
    CHECK(totals->gathers[processes] > 1);
}

int main(void)
{
    check_begin();
    totals = run_share(sizeof *totals);
    count_gatherings(false);
    count_gatherings(true);
    const int count = (int)(NUM_FAULTS * run_scale() + 0.5);
    printf("seed %llu, %d gatherings of threads, %d of shm\n", (unsigned long long)run_seed(),
           totals->gathers[0], totals->gathers[1]);
    for (int i = 0, running = 0; i < count || running > 0;) {
        if (i < count && running < WIDTH) {
            fault f;
            choose(&f, (uint64_t)i, run_mix(run_seed(), (uint64_t)i));
            i++;
            totals->faults++;
            begin(&f);
            running++;
        } else {
            finish_one();
            running--;
        }
    }
    printf("%d faults: %d hangs, %d wrong results, %d wrong culprits, %d too late\n",
           totals->faults, totals->hangs, totals->wrong_results, totals->wrong_culprits,
           totals->late);
    return check_end();
}
