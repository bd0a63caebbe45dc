/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_regroup and epic_members: after ranks have closed their contexts or are lost,
 * after a planned leave, with the members of an authority, and without any change. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "context/context.h"
#include "run.h"

#define COUNT 3000        /* more floats than fit into an op header */
#define PATIENCE_MS 20000 /* of a call that passes none */

static const char *backend; /* of all groups that are opened now */

static epic_context *open_context(const epic_bootstrap *bootstrap)
{
    const epic_config config = {.max_tokens = 8,
                                .max_row_bytes = 64,
                                .max_in_flight = 2,
                                .timeout_ms = PATIENCE_MS,
                                .backend = backend};
    epic_context *ctx;
    CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(NULL));
    return ctx;
}

static void run_group(int num_ranks, run_body *body, void *self)
{
    if (strcmp(backend, "shm") == 0)
        run_processes(num_ranks, body, self, 60);
    else
        run_threads(num_ranks, body, self);
}

/* Checks that the set has these ranks, and no rank above 63. */
static void check_set(const uint64_t *set, uint64_t ranks)
{
    CHECK_SAY(set[0] == ranks, "the set is %llx, not %llx", (unsigned long long)set[0],
              (unsigned long long)ranks);
    for (int w = 1; w < EPIC_RANK_WORDS; w++) CHECK_EQ(set[w], 0);
}

/* Returns the members now. */
static epic_members_info members_of(const epic_context *ctx)
{
    epic_members_info info;
    CHECK_SAY(epic_members(ctx, &info) == EPIC_OK, "%s", epic_error(ctx));
    return info;
}

/* Checks a call that must fail, and that its sentence contains `part`. */
static void check_failed(const epic_context *ctx, epic_result result, epic_result want,
                         const char *part)
{
    CHECK_SAY(result == want && strstr(epic_error(ctx), part), "%s: %s, not %s: %s",
              epic_result_name(result), epic_error(ctx), epic_result_name(want), part);
}

/* Adds 2^rank over the members, so that the sum shows the members. */
static void check_sum(epic_context *ctx, uint64_t members)
{
    float data[COUNT];
    for (int i = 0; i < COUNT; i++) data[i] = (float)(1 << epic_rank(ctx));
    for (int count = 1; count <= COUNT; count += COUNT - 1) {
        const epic_allreduce_sum_args args = {.call.tag = 7, .data = data, .count = count};
        if (count > 1) data[0] = (float)(1 << epic_rank(ctx));
        CHECK_SAY(epic_allreduce_sum(ctx, &args) == EPIC_OK, "%s", epic_error(ctx));
        CHECK_EQ((long long)data[count - 1], (long long)members);
    }
}

/* Makes the next generation and checks its members. */
static void check_regroup(epic_context *ctx, uint64_t members, uint64_t generation)
{
    const epic_members_info before = members_of(ctx);
    const epic_regroup_args args = {.step = 100 + epic_rank(ctx)};
    epic_members_info info, again;
    memset(&info, 0xee, sizeof info);
    CHECK_SAY(epic_regroup(ctx, &args, &info) == EPIC_OK, "rank %d: %s", epic_rank(ctx),
              epic_error(ctx));
    again = members_of(ctx);
    CHECK(memcmp(&info, &again, sizeof info) == 0);
    check_set(info.members, members);
    check_set(info.gone, before.members[0] & ~members);
    CHECK(info.group_id != before.group_id);
    CHECK_EQ(info.generation, generation);
    CHECK_EQ(info.num_ranks, epic_num_ranks(ctx));
    CHECK_EQ(info.num_members, __builtin_popcountll(members));
    CHECK_EQ(info.least_step, 100 + __builtin_ctzll(members));
    CHECK_EQ(info.greatest_step, 100 + 63 - __builtin_clzll(members));
}

/* Waits until a sum fails with EPIC_EPEER. */
static void check_broken(epic_context *ctx, const char *why)
{
    float number = 1;
    const epic_allreduce_sum_args args = {.call.tag = 9, .data = &number, .count = 1};
    epic_result result = EPIC_OK;
    while (result == EPIC_OK) result = epic_allreduce_sum(ctx, &args);
    check_failed(ctx, result, EPIC_EPEER, why);
}

/* Checks that this rank can only close its context. */
static void check_out(epic_context *ctx, const char *why)
{
    float number = 1;
    const epic_allreduce_sum_args sum = {.data = &number, .count = 1};
    const epic_regroup_args again = {.step = 1};
    epic_failure_info failure;
    check_failed(ctx, epic_allreduce_sum(ctx, &sum), EPIC_EEVICTED, why);
    check_failed(ctx, epic_check(ctx), EPIC_EEVICTED, why);
    check_failed(ctx, epic_regroup(ctx, &again, NULL), EPIC_EEVICTED, why);
    CHECK_EQ(epic_failure(ctx, &failure), EPIC_OK);
    CHECK_EQ(failure.result, EPIC_EEVICTED);
}

/* Waits until all ranks have called it. */
static void meet(const epic_bootstrap *bootstrap)
{
    char mine = 0, all[8];
    CHECK_EQ(bootstrap->gather(bootstrap->self, &mine, all, 1), EPIC_OK);
}

/* Ranks 2, 0 and 4 of five close their contexts one after the other. A rank closes only after
 * all calls have returned, because the first rank that notices it breaks the group for all. */
static void deaths(const epic_bootstrap *bootstrap, void *self)
{
    static const int order[] = {2, 0, 4};
    epic_context *ctx = open_context(bootstrap);
    epic_failure_info failure;
    uint64_t members = 31;
    (void)self;
    check_sum(ctx, members);
    for (int i = 0; i < 3; i++) {
        members &= ~(UINT64_C(1) << order[i]);
        meet(bootstrap);
        if (order[i] == bootstrap->rank) {
            epic_close(ctx);
            ctx = NULL;
        }
        if (!ctx) continue;
        check_broken(ctx, "closed the context; call epic_regroup");
        CHECK_EQ(epic_failure(ctx, &failure), EPIC_OK);
        CHECK_EQ(failure.sequence >> 32, i); /* the number of the generation */
        check_regroup(ctx, members, (uint64_t)i + 1);
        check_sum(ctx, members);
        check_sum(ctx, members);
    }
    epic_close(ctx);
}

/* Rank 1 of four leaves. No call of the others fails, also if the rank closes late. */
static void leave(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    const epic_regroup_args leaving = {.leaving = true};
    check_sum(ctx, 15);
    if (bootstrap->rank == 1) {
        CHECK_SAY(epic_regroup(ctx, &leaving, NULL) == EPIC_OK, "%s", epic_error(ctx));
        check_out(ctx, "rank 1 has left");
        check_set(members_of(ctx).members, 15);
        if (self) run_nap_us(20000);
    } else {
        check_regroup(ctx, 13, 1);
        for (int i = 0; i < 50; i++) check_sum(ctx, 13);
        check_regroup(ctx, 13, 2);
    }
    epic_close(ctx);
}

/* Rank 2 of three does not come, so the others have a quorum and go on without it. If `self` is
 * set, it has broken the group before by epic_abort. */
static void evicted(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    const epic_regroup_args args = {.patience_ms = 500};
    epic_members_info info;
    if (self && bootstrap->rank == 2) epic_abort(ctx, 9, "no more data");
    if (self) check_broken(ctx, "no more data");
    if (bootstrap->rank == 2) {
        meet(bootstrap);
        if (!self) check_broken(ctx, "have made the next generation");
        check_failed(ctx, epic_regroup(ctx, &args, NULL), EPIC_EEVICTED, "without rank 2");
        check_out(ctx, "without rank 2");
    } else {
        CHECK_SAY(epic_regroup(ctx, &args, &info) == EPIC_OK, "%s", epic_error(ctx));
        check_set(info.members, 3);
        check_set(info.gone, 4);
        meet(bootstrap);
        CHECK_EQ(epic_check(ctx), EPIC_OK);
        check_sum(ctx, 3);
    }
    epic_close(ctx);
}

/* One of four members comes first and alone. It gets an error and may call again. */
static void no_quorum(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    const epic_regroup_args hasty = {.patience_ms = 100};
    (void)self;
    if (bootstrap->rank == 0) {
        const epic_result result = epic_regroup(ctx, &hasty, NULL);
        check_failed(ctx, result, EPIC_EPEER, "did not come and may live");
    } else if (bootstrap->rank == 3) {
        const epic_result result = epic_regroup(ctx, &hasty, NULL);
        CHECK_SAY(result == EPIC_EPEER || result == EPIC_ETIMEOUT, "%s", epic_error(ctx));
    }
    meet(bootstrap);
    check_set(members_of(ctx).members, 15);
    check_regroup(ctx, 15, 1);
    check_sum(ctx, 15);
    epic_close(ctx);
}

/* Ranks 0 and 1 of four would remain, but at least three must. An authority then names them,
 * which are no majority, and at last only rank 0. */
static void authority(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    const uint64_t pair[] = {3}, one[] = {1};
    const epic_regroup_args strict = {.min_members = 3, .leaving = bootstrap->rank >= 2};
    const epic_regroup_args first = {.patience_ms = 500, .authority = 7, .only = pair};
    const epic_regroup_args second = {.patience_ms = 5000, .authority = 8, .only = one};
    epic_members_info info;
    (void)self;
    check_failed(ctx, epic_regroup(ctx, &strict, NULL), EPIC_EPEER, "min_members is 3");
    if (bootstrap->rank >= 2) {
        meet(bootstrap);
        check_failed(ctx, epic_regroup(ctx, &second, NULL), EPIC_EEVICTED, "without rank");
    } else {
        CHECK_SAY(epic_regroup(ctx, &first, &info) == EPIC_OK, "%s", epic_error(ctx));
        meet(bootstrap);
        check_set(info.members, 3);
        check_sum(ctx, 3);
        const epic_result result = epic_regroup(ctx, &second, &info);
        if (bootstrap->rank == 0) {
            CHECK_SAY(result == EPIC_OK, "%s", epic_error(ctx));
            check_set(info.members, 1);
            check_sum(ctx, 1);
        } else {
            check_failed(ctx, result, EPIC_EEVICTED, "without rank 1");
        }
    }
    epic_close(ctx);
}

/* A plan of the generation before is refused on all members, and the group stays whole. */
static void old_plan(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    const epic_layer layer = {.num_experts = 4, .top_k = 1};
    const int32_t ids[2] = {0, 3}, ranks[4] = {0, 0, 1, 1};
    char tokens[2][64] = {{1}}, recv[8][64];
    epic_layer_info info;
    (void)self;
    CHECK(epic_layer_sizes(ctx, &layer, &info) == EPIC_OK);
    void *plan = aligned_alloc(64, ((size_t)info.plan_bytes + 63) / 64 * 64);
    const epic_plan_args args = {.layer = &layer,
                                 .plan = plan,
                                 .plan_bytes = info.plan_bytes,
                                 .topk_idx = ids,
                                 .num_tokens = 2,
                                 .rank_of_expert = ranks};
    const epic_dispatch_args dispatch = {.layer = &layer,
                                         .plan = plan,
                                         .plan_bytes = info.plan_bytes,
                                         .tokens = {tokens, 2, 64},
                                         .recv = {recv, 8, 64}};
    CHECK_SAY(epic_plan(ctx, &args) == EPIC_OK, "%s", epic_error(ctx));
    CHECK_SAY(epic_dispatch(ctx, &dispatch) == EPIC_OK, "%s", epic_error(ctx));
    check_regroup(ctx, 3, 1);
    CHECK_EQ(epic_dispatch(ctx, &dispatch), EPIC_EINVAL);
    CHECK_SAY(strstr(epic_error(ctx), "another group"), "%s", epic_error(ctx));
    CHECK_SAY(epic_plan(ctx, &args) == EPIC_OK, "%s", epic_error(ctx));
    CHECK_SAY(epic_dispatch(ctx, &dispatch) == EPIC_OK, "%s", epic_error(ctx));
    free(plan);
    epic_close(ctx);
}

static bool has_operation(epic_context *ctx)
{
    pthread_mutex_lock(&ctx->tags.mutex);
    const bool any = ctx->tags.in_flight > 0;
    pthread_mutex_unlock(&ctx->tags.mutex);
    return any;
}

static void *sum_in_thread(void *self)
{
    check_sum(self, 3);
    return NULL;
}

/* While an operation of a rank is running, its call is refused, and may be repeated later. */
static void in_flight(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    const epic_regroup_args args = {.step = 1};
    pthread_t thread;
    (void)self;
    if (bootstrap->rank == 0) {
        pthread_create(&thread, NULL, sum_in_thread, ctx);
        while (!has_operation(ctx)) run_nap_us(1000);
        check_failed(ctx, epic_regroup(ctx, &args, NULL), EPIC_EINVAL, "in flight");
        meet(bootstrap);
        pthread_join(thread, NULL);
    } else {
        meet(bootstrap);
        check_sum(ctx, 3);
    }
    check_regroup(ctx, 3, 1);
    check_sum(ctx, 3);
    epic_close(ctx);
}

/* The rank that leads has too few descriptors for new memory. All calls fail, and succeed when
 * it has more. A forked child cannot make the call. */
static void few_descriptors(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap);
    const epic_regroup_args args = {.patience_ms = 2000};
    struct rlimit limit, few;
    (void)self;
    getrlimit(RLIMIT_NOFILE, &limit);
    const int next = dup(0);
    few = (struct rlimit){(rlim_t)next, limit.rlim_max};
    close(next);
    if (bootstrap->rank == 0) setrlimit(RLIMIT_NOFILE, &few);
    const epic_result result = epic_regroup(ctx, &args, NULL);
    if (bootstrap->rank == 0) check_failed(ctx, result, EPIC_ENOMEM, "ulimit -n");
    if (bootstrap->rank != 0) check_failed(ctx, result, EPIC_EDEVICE, "did not arrive");
    setrlimit(RLIMIT_NOFILE, &limit);
    meet(bootstrap);
    check_regroup(ctx, 7, 1);
    check_sum(ctx, 7);
    const pid_t child = run_fork();
    if (child == 0) {
        check_failed(ctx, epic_regroup(ctx, &args, NULL), EPIC_ECLOSED, "fork");
        epic_close(ctx);
        _exit(0);
    }
    CHECK_EQ(waitpid(child, NULL, 0), child);
    check_sum(ctx, 7);
    epic_close(ctx);
}

/* Rank 4 of six dies, and a child that it has forked keeps its connections open. Ranks 1
 * to 3, which watch the process of rank 4, die after they have reported its end. The others do
 * not wait for the child. `self` is memory that all ranks share. */
static void forked_before_death(const epic_bootstrap *bootstrap, void *self)
{
    _Atomic pid_t *child = self;
    epic_context *ctx = open_context(bootstrap);
    if (bootstrap->rank == 4) {
        const pid_t pid = fork();
        if (pid == 0) pause();
        *child = pid;
        _exit(0);
    }
    check_broken(ctx, "rank 4, whose process ended");
    if (bootstrap->rank >= 1 && bootstrap->rank <= 3) _exit(0);
    const uint64_t begin = run_now_ns();
    check_regroup(ctx, 33, 1);
    CHECK(run_now_ns() - begin < PATIENCE_MS / 2 * 1000000ull);
    check_sum(ctx, 33);
    if (bootstrap->rank == 0) kill(*child, SIGKILL);
    epic_close(ctx);
}

/* Each rank dies or leaves after a random number of calls. All others make the next generation
 * if a call fails, and after every third sum of a generation. */
static void storm(const epic_bootstrap *bootstrap, void *self)
{
    const uint64_t *seed = self;
    const int rank = bootstrap->rank;
    run_random own = {run_mix(*seed, (uint64_t)rank)};
    epic_context *ctx = open_context(bootstrap);
    epic_members_info info = members_of(ctx);
    int calls = rank == 0 ? 1000000 : (int)run_between(&own, 1, 16), sums = 0;
    const bool leaves = run_chance(&own, 50);
    while (info.num_members > 1 && (calls-- > 0 || leaves)) {
        float data = (float)(1 << rank);
        const epic_allreduce_sum_args args = {.data = &data, .count = 1};
        const epic_result result = epic_allreduce_sum(ctx, &args);
        CHECK_SAY(result == EPIC_OK || result == EPIC_EPEER, "%s", epic_error(ctx));
        if (result == EPIC_OK) CHECK_EQ((uint64_t)data, info.members[0]);
        if (result == EPIC_OK && ++sums < 3) continue;
        const epic_regroup_args call = {.leaving = calls <= 0};
        const epic_result made = epic_regroup(ctx, &call, &info);
        if (!CHECK_SAY(made == EPIC_OK, "rank %d: %s", rank, epic_error(ctx))) break;
        if (call.leaving) break;
        sums = 0;
    }
    epic_close(ctx);
}

/* The arguments are checked, and a group without epic_regroup has all members. */
static void refused(const epic_bootstrap *bootstrap, void *self)
{
    const epic_config config = {.max_tokens = 1, .max_row_bytes = 4, .backend = self};
    epic_context *ctx;
    const uint64_t none[] = {0}, other[] = {3}, all[] = {1};
    const struct {
        epic_regroup_args args;
        const char *why;
    } bad[] = {
        {{.flags = 1}, "flags is 1"},
        {{.leaving = 2}, "leaving is 2"},
        {{.min_members = 2}, "min_members is 2: must be at most 1"},
        {{.only = all}, "only is a set and authority is 0"},
        {{.authority = 5}, "only is NULL and authority is 5"},
        {{.only = none, .authority = 5}, "only is empty"},
        {{.only = other, .authority = 5}, "only contains rank 1, which is not a member"}};
    CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(NULL));
    const epic_members_info info = members_of(ctx);
    check_set(info.members, 1);
    check_set(info.gone, 0);
    CHECK_EQ(info.generation, 0);
    if (strcmp(self, "self") == 0) {
        const epic_regroup_args args = {.step = 1};
        check_failed(ctx, epic_regroup(ctx, &args, NULL), EPIC_ENOTSUP,
                     "the backend is \"self\"");
    } else {
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
            check_failed(ctx, epic_regroup(ctx, &bad[i].args, NULL), EPIC_EINVAL, bad[i].why);
        const epic_regroup_args leaving = {.leaving = true};
        check_failed(ctx, epic_regroup(ctx, &leaving, NULL), EPIC_EPEER, "close the group");
        CHECK(tags_pause(&ctx->tags) == EPIC_OK); /* as epic_regroup in another thread */
        check_failed(ctx, epic_regroup(ctx, &leaving, NULL), EPIC_EINVAL, "is running");
        tags_restart(&ctx->tags, ctx->config.max_in_flight);
        check_regroup(ctx, 1, 1);
    }
    epic_close(ctx);
    check_failed(NULL, epic_members(NULL, NULL), EPIC_EINVAL, "ctx is NULL");
}

static void run_backend(const char *name)
{
    static int yes = 1;
    backend = name;
    for (int i = 0; i < 20; i++) run_group(5, deaths, NULL);
    for (int i = 0; i < 20; i++) run_group(4, leave, i % 2 ? &yes : NULL);
    run_group(3, evicted, NULL);
    run_group(3, evicted, &yes);
    run_group(4, no_quorum, NULL);
    run_group(4, authority, NULL);
    run_group(2, old_plan, NULL);
    run_group(2, in_flight, NULL);
    if (strcmp(name, "shm") == 0) {
        void *child = run_share(sizeof(pid_t));
        run_group(3, few_descriptors, NULL);
        run_group(6, forked_before_death, child);
        run_unshare(child, sizeof(pid_t));
    }
    for (uint64_t seed = 1; seed <= (uint64_t)run_scaled(40); seed++)
        run_group(16, storm, &(uint64_t){run_mix(run_seed(), seed)});
    run_group(1, refused, (void *)(uintptr_t)name);
}

int main(void)
{
    check_begin();
    run_alarm(100);
    run_backend("shm"); /* first: later this process has more than one thread */
    run_backend("threads");
    run_group(1, refused, "self");
    return check_end();
}
