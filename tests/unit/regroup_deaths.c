/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_regroup while processes die and stop: in each step of the decision, at random
 * times, and with SIGSTOP and SIGCONT. No two members may be in one generation with different
 * members, and nothing of a group may remain in a process. */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/transport.h"
#include "check.h"
#include "context/context.h"
#include "run.h"
#include "step.h"

#define MOST_RANKS 64
#define FEW_RANKS 16 /* most ranks of a group, unless the test has many ranks */
#define CHUNK 16     /* bits of members in one float of a sum */
#define MOST_GENERATIONS 64
#define TEST_S 60

/* The actions of a rank other than its sums. A call is one of epic_regroup. */
enum action { STAYS, DIES, DIES_IN_CALL, CLOSES, LEAVES, STOPS, STOPS_IN_CALL, KILLED };

typedef struct part {
    enum action action;
    int when; /* number of sums before the action, or of calls before the call. KILLED: time in
                 microseconds after the opening of the group, or after the kill before */
    int step; /* the step of the call */
} part;

/* A generation, as the first rank that enters it has written it. */
typedef struct generation {
    _Atomic uint64_t group_id;
    _Atomic uint64_t members;
} generation;

/* A group, in memory that its ranks and their parent share. */
typedef struct trial {
    int num_ranks;
    part parts[MOST_RANKS];
    uint64_t stays;       /* the ranks that stay to the end */
    int num_sums;         /* with stops: the number of sums of all ranks; else 0 */
    uint32_t timeout_ms;  /* deadline of operations */
    uint32_t patience_ms; /* of epic_regroup */
    run_rendezvous *rendezvous;
    generation generations[MOST_GENERATIONS];
    bool has_steps; /* true: the ranks run all operations of a step until one fails */
    _Atomic int num_open, num_done, num_evicted;
    _Atomic int num_hits; /* actions that have happened in a step of a call */
} trial;

/* --------------------------------------------------------------------- steps of a call ---- */

static const epic_regroup_transport *real;
static trial *group; /* the trial of this process */
static part mine;    /* the part of this process */
static int calls;    /* calls before this one */
static int steps;    /* steps of this call so far */

/* Counts a step of this call, and dies or stops in it. */
static void pass_step(void)
{
    const bool acts = mine.action == DIES_IN_CALL || mine.action == STOPS_IN_CALL;
    if (!acts || calls != mine.when || steps++ != mine.step) return;
    atomic_fetch_add(&group->num_hits, 1);
    raise(mine.action == DIES_IN_CALL ? SIGKILL : SIGSTOP);
}

static void send_stepwise(epic_group *g, int to, const void *message, size_t bytes, uint64_t id)
{
    pass_step();
    real->send(g, to, message, bytes, id);
}

static bool receive_stepwise(epic_group *g, int *from, void *message, size_t bytes, uint32_t ms)
{
    if (!real->receive(g, from, message, bytes, ms)) return false;
    pass_step();
    return true;
}

static epic_result create_stepwise(epic_group *g, uint64_t id)
{
    const epic_result result = real->create(g, id);
    pass_step();
    return result;
}

static epic_result prepare_stepwise(epic_group *g, uint64_t id)
{
    const epic_result result = real->prepare(g, id);
    pass_step();
    return result;
}

static epic_result enter_stepwise(epic_group *g, const seat_set *members)
{
    pass_step();
    const epic_result result = real->enter(g, members);
    pass_step();
    return result;
}

/* Lets the calls of this process pass their steps. */
static void count_steps(epic_context *ctx)
{
    static epic_backend backend;
    static epic_transport transport;
    static epic_regroup_transport regroup;
    real = ctx->backend->transport->regroup;
    backend = *ctx->backend;
    transport = *ctx->backend->transport;
    regroup = (epic_regroup_transport){.send = send_stepwise,
                                       .receive = receive_stepwise,
                                       .is_gone = real->is_gone,
                                       .create = create_stepwise,
                                       .prepare = prepare_stepwise,
                                       .enter = enter_stepwise};
    transport.regroup = &regroup;
    backend.transport = &transport;
    ctx->backend = &backend;
}

/* ------------------------------------------------------------------------- one process ---- */

/* Returns how many entries of a folder have names that contain `part`. */
static int count_entries(const char *folder, const char *part)
{
    int count = 0;
    DIR *open = opendir(folder);
    for (struct dirent *e; open && (e = readdir(open));)
        count += strstr(e->d_name, part) != NULL;
    if (open) closedir(open);
    return count;
}

/* Returns how many mappings of shared memory of groups this process has. */
static int count_mappings(void)
{
    char line[512];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) count += strstr(line, "epic-shm") != NULL;
    if (maps) fclose(maps);
    return count;
}

/* Checks that all ranks that have entered a generation have entered the same one. */
static void check_generation(trial *t, const epic_members_info *info)
{
    if (!CHECK(info->generation < MOST_GENERATIONS)) return;
    generation *g = &t->generations[info->generation];
    uint64_t id = 0, members = 0;
    atomic_compare_exchange_strong(&g->group_id, &id, info->group_id);
    atomic_compare_exchange_strong(&g->members, &members, info->members[0]);
    CHECK_SAY((!id || id == info->group_id) && (!members || members == info->members[0]),
              "generation %llu has the members %llx, and %llx on another rank",
              (unsigned long long)info->generation, (unsigned long long)info->members[0],
              (unsigned long long)members);
}

/* Makes the next generation and returns the result. If ranks stop, repeats a failed call. */
static epic_result regroup(trial *t, epic_context *ctx, const epic_regroup_args *args,
                           epic_members_info *info)
{
    epic_result result;
    do {
        steps = 0;
        result = epic_regroup(ctx, args, info);
        calls++;
    } while (t->num_sums && (result == EPIC_EPEER || result == EPIC_ETIMEOUT));
    if (result == EPIC_EEVICTED && t->num_sums) return result;
    CHECK_SAY(result == EPIC_OK, "rank %d: %s: %s", epic_rank(ctx), epic_result_name(result),
              epic_error(ctx));
    if (result == EPIC_OK && !args->leaving) check_generation(t, info);
    return result;
}

/* Dies or stops before a sum if it is time. Returns whether to close the context now. */
static bool act(int num_sums)
{
    const bool is_due = num_sums >= mine.when;
    if (mine.action == DIES && is_due) raise(SIGKILL);
    if (mine.action == DIES_IN_CALL && calls > mine.when) raise(SIGKILL);
    if (mine.action == STOPS && num_sums == mine.when) raise(SIGSTOP);
    return mine.action == CLOSES && is_due;
}

/* Makes a sum of the bits of the members. Returns whether it has succeeded. */
static bool add_bits(epic_context *ctx, const epic_members_info *info)
{
    float data[MOST_RANKS / CHUNK] = {0};
    data[epic_rank(ctx) / CHUNK] = (float)(1 << epic_rank(ctx) % CHUNK);
    const epic_allreduce_sum_args args = {.data = data, .count = MOST_RANKS / CHUNK};
    const epic_result result = epic_allreduce_sum(ctx, &args);
    uint64_t sum = 0;
    CHECK_SAY(result == EPIC_OK || result == EPIC_EPEER || result == EPIC_ETIMEOUT, "%s",
              epic_error(ctx));
    for (int i = 0; i < MOST_RANKS / CHUNK; i++) sum |= (uint64_t)data[i] << i * CHUNK;
    if (result == EPIC_OK) CHECK_EQ(sum, info->members[0]);
    return result == EPIC_OK;
}

/* Returns whether this rank must make another sum. Without stops, sums go on until all ranks
 * that do not stay are gone. */
static bool goes_on(const trial *t, const epic_members_info *info, int64_t done)
{
    return t->num_sums ? done < t->num_sums : info->members[0] != t->stays;
}

/* Makes sums until this rank is done. Makes the next generation after every third sum, and
 * after a sum that has failed. Returns false if this rank is evicted. */
static bool run_sums(trial *t, epic_context *ctx)
{
    epic_members_info info;
    int64_t done = 0;
    CHECK_EQ(epic_members(ctx, &info), EPIC_OK);
    check_generation(t, &info);
    for (int num_sums = 0; goes_on(t, &info, done); num_sums++) {
        if (act(num_sums)) return true;
        if (add_bits(ctx, &info) && ++done % 3) continue;
        const epic_regroup_args args = {.patience_ms = t->patience_ms,
                                        .step = done,
                                        .leaving =
                                            mine.action == LEAVES && num_sums >= mine.when};
        if (regroup(t, ctx, &args, &info) != EPIC_OK) return false;
        if (args.leaving) return true;
        done = info.least_step;
    }
    return true;
}

/* Runs all operations of a step in turn, until one fails because a rank has died. */
static void run_step(epic_context *ctx)
{
    static const uint32_t operations[] = {EPIC_OP_PLAN,
                                          EPIC_OP_DISPATCH,
                                          EPIC_OP_COMBINE,
                                          EPIC_OP_COMBINE_BACKWARD,
                                          EPIC_OP_DISPATCH_BACKWARD,
                                          EPIC_OP_SUM};
    const epic_call call = {.tag = 3};
    epic_result result = EPIC_OK;
    step s;
    const bool is_many = epic_num_ranks(ctx) > FEW_RANKS;
    step_open(&s, ctx, is_many ? 4 : STEP_MAX_TOKENS, is_many ? 32 : 512);
    for (int i = 0; result == EPIC_OK; i++)
        result = step_call(&s, operations[i % 6], &call, STEP_SAME);
    CHECK_SAY(result == EPIC_EPEER, "%s", epic_error(ctx));
    step_close(&s);
}

static void be_rank(trial *t, int rank)
{
    const epic_config config = {.max_tokens = STEP_MAX_TOKENS,
                                .max_row_bytes = STEP_MAX_ROW_BYTES,
                                .max_in_flight = 2,
                                .timeout_ms = t->timeout_ms,
                                .backend = "shm"};
    const epic_bootstrap bootstrap = run_rendezvous_seat(t->rendezvous, rank);
    const int descriptors = count_entries("/proc/self/fd", "");
    epic_context *ctx;
    run_alarm(TEST_S);
    group = t;
    mine = t->parts[rank];
    if (!CHECK_SAY(epic_open(&ctx, &bootstrap, &config) == EPIC_OK, "%s", epic_error(ctx)))
        _exit(1);
    count_steps(ctx);
    atomic_fetch_add(&t->num_open, 1);
    if (t->has_steps) run_step(ctx);
    atomic_fetch_add(run_sums(t, ctx) ? &t->num_done : &t->num_evicted, 1);
    epic_close(ctx);
    CHECK_EQ(count_entries("/proc/self/fd", ""), descriptors);
    CHECK_EQ(count_mappings(), 0);
    fflush(NULL);
    _exit(0);
}

/* --------------------------------------------------------------------------- one group ---- */

/* Waits for the end of a rank. Continues it `pause_us` after it has stopped. */
static void await_rank(pid_t pid, bool may_die, long pause_us)
{
    int status;
    for (;;) {
        if (waitpid(pid, &status, WUNTRACED) < 0 && errno == EINTR) continue;
        if (!WIFSTOPPED(status)) break;
        run_nap_us(pause_us);
        kill(pid, SIGCONT);
    }
    const bool died = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    CHECK_SAY((may_die && died) || (WIFEXITED(status) && WEXITSTATUS(status) == 0),
              "a rank %s (status 0x%x)",
              WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? "hung" : "ended", status);
}

/* Kills the ranks whose part that is, one after the other. */
static void kill_ranks(trial *t, const pid_t *pids)
{
    bool any = false;
    for (int r = 0; r < t->num_ranks; r++) any |= t->parts[r].action == KILLED;
    while (any && t->num_open < t->num_ranks) run_nap_us(100);
    for (int r = 0; r < t->num_ranks; r++) {
        if (t->parts[r].action != KILLED) continue;
        run_nap_us(t->parts[r].when);
        kill(pids[r], SIGKILL);
    }
}

/* Runs the group. Waits first for ranks that stop, because only this process continues them. */
static void run_trial(trial *t, long pause_us)
{
    pid_t pids[MOST_RANKS];
    t->rendezvous = run_rendezvous_new(t->num_ranks);
    for (int r = 0; r < t->num_ranks; r++)
        if (t->parts[r].action == STAYS) t->stays |= UINT64_C(1) << r;
    fflush(NULL);
    for (int r = 0; r < t->num_ranks; r++)
        if ((pids[r] = run_fork()) == 0) be_rank(t, r);
    kill_ranks(t, pids);
    for (int pass = 0; pass < 2; pass++)
        for (int r = 0; r < t->num_ranks; r++) {
            const enum action a = t->parts[r].action;
            const bool stops = a == STOPS || a == STOPS_IN_CALL;
            const bool dies = a == DIES || a == DIES_IN_CALL || a == KILLED;
            if (stops == (pass == 0)) await_rank(pids[r], dies, pause_us);
        }
    run_rendezvous_free(t->rendezvous);
}

static trial *new_trial(int num_ranks)
{
    trial *t = run_share(sizeof *t);
    *t = (trial){.num_ranks = num_ranks, .timeout_ms = 20000, .patience_ms = 20000};
    return t;
}

/* Rank 3 of five dies before the third sum, and `victim` in a step of its call. If the call has
 * fewer steps, the victim dies after it. Returns whether the victim has died in the call. */
static bool die_in_step(int victim, int step)
{
    trial *t = new_trial(5);
    t->parts[3] = (part){.action = DIES, .when = 2};
    t->parts[victim] = (part){.action = DIES_IN_CALL, .step = step};
    run_trial(t, 0);
    CHECK_EQ(t->num_done, 3);
    const bool has_hit = t->num_hits > 0;
    run_unshare(t, sizeof *t);
    return has_hit;
}

/* Rank 0 would lead, and so would rank 1 after its death. */
static void die_in_each_step(void)
{
    static const int victims[] = {0, 1, 4};
    for (int v = 0; v < 3; v++) {
        int step = 0;
        while (step < 200 && die_in_step(victims[v], step)) step++;
        printf("rank %d died in each of the %d steps of its call\n", victims[v], step);
        CHECK(step >= 4 && step < 200);
    }
}

/* Ranks die, close their contexts and leave at random. */
static void die_at_random(uint64_t seed)
{
    static const enum action actions[] = {DIES,   DIES_IN_CALL, CLOSES,
                                          LEAVES, DIES_IN_CALL, DIES};
    run_random random = {seed};
    trial *t = new_trial((int)run_between(&random, 2, FEW_RANKS));
    const int stays = (int)run_below(&random, t->num_ranks);
    int deaths = 0;
    check_seed = seed;
    for (int r = 0; r < t->num_ranks; r++) {
        if (r == stays || run_chance(&random, 30)) continue;
        t->parts[r] = (part){.action = actions[run_below(&random, 6)],
                             .when = (int)run_below(&random, 8),
                             .step = (int)run_below(&random, 30)};
        if (t->parts[r].action == DIES_IN_CALL) t->parts[r].when /= 4;
        deaths += t->parts[r].action == DIES || t->parts[r].action == DIES_IN_CALL;
    }
    run_trial(t, 0);
    CHECK_EQ(t->num_done, t->num_ranks - deaths);
    run_unshare(t, sizeof *t);
}

/* Some ranks are killed at random times, while they run all operations. */
static void kill_at_random(uint64_t seed)
{
    run_random random = {seed};
    trial *t = new_trial((int)run_between(&random, 2, 12));
    const int stays = (int)run_below(&random, t->num_ranks);
    int deaths = 0;
    check_seed = seed;
    t->has_steps = true;
    for (int r = 0; r < t->num_ranks; r++) {
        if (r == stays || run_chance(&random, 60)) continue;
        t->parts[r] =
            (part){.action = KILLED, .when = (int)run_below(&random, deaths ? 1500 : 20000)};
        deaths++;
    }
    if (!deaths) t->parts[!stays] = (part){.action = KILLED, .when = 1000}, deaths++;
    run_trial(t, 0);
    CHECK_EQ(t->num_done, t->num_ranks - deaths);
    run_unshare(t, sizeof *t);
}

/* One to eight of many ranks die: they are killed while they run all operations, or die in a
 * step of a call. */
static void lose_many(int num_ranks, uint64_t seed)
{
    run_random random = {seed};
    trial *t = new_trial(num_ranks);
    const int most = (int)run_between(&random, 1, 8);
    int deaths = 0;
    check_seed = seed;
    t->has_steps = true;
    for (int i = 0; i < most; i++) {
        part *p = &t->parts[run_below(&random, num_ranks)];
        if (p->action != STAYS) continue;
        const bool in_call = deaths > 0 && run_chance(&random, 60);
        *p = (part){.action = in_call ? DIES_IN_CALL : KILLED,
                    .when = in_call ? 0 : (int)run_below(&random, 40000),
                    .step = (int)run_below(&random, 8)};
        deaths++;
    }
    run_trial(t, 0);
    CHECK_EQ(t->num_done, num_ranks - deaths);
    run_unshare(t, sizeof *t);
}

/* One rank stops at random and continues later. Whether the others go on with or without it, at
 * least one rank finishes, and no rank is left waiting. Returns the number of evicted ranks. */
static int stop_at_random(uint64_t seed)
{
    run_random random = {seed};
    trial *t = new_trial((int)run_between(&random, 3, 5));
    const bool in_call = run_chance(&random, 50);
    check_seed = seed;
    t->num_sums = 12;
    t->timeout_ms = 300;
    t->patience_ms = (uint32_t)run_between(&random, 100, 200);
    t->parts[run_below(&random, t->num_ranks)] =
        (part){.action = in_call ? STOPS_IN_CALL : STOPS,
               .when = (int)run_below(&random, in_call ? 3 : 9),
               .step = (int)run_below(&random, 20)};
    run_trial(t, run_between(&random, 0, 900) * 1000);
    CHECK(t->num_done > 0);
    CHECK_EQ(t->num_done + t->num_evicted, t->num_ranks);
    const int num_evicted = t->num_evicted;
    run_unshare(t, sizeof *t);
    return num_evicted;
}

/* regroup_deaths [RANKS]: with an argument, only groups of RANKS ranks, up to 64. */
int main(int argc, char **argv)
{
    check_begin();
    const int num_ranks = argc > 1 ? atoi(argv[1]) : 0;
    for (int i = 1; num_ranks && i <= run_scaled(10); i++)
        lose_many(num_ranks, run_mix(run_seed(), 3000000 + (uint64_t)i));
    if (num_ranks) return check_end();
    die_in_each_step();
    for (uint64_t i = 1; i <= (uint64_t)run_scaled(40); i++)
        die_at_random(run_mix(run_seed(), i));
    for (uint64_t i = 1; i <= (uint64_t)run_scaled(20); i++)
        kill_at_random(run_mix(run_seed(), 2000000 + i));
    const int num_stops = (int)run_scaled(8);
    int num_evicted = 0;
    for (int i = 1; i <= num_stops; i++)
        num_evicted += stop_at_random(run_mix(run_seed(), 1000000 + (uint64_t)i));
    printf("%d stops, %d evicted\n", num_stops, num_evicted);
    CHECK_EQ(count_entries("/dev/shm", "epic"), 0);
    return check_end();
}
