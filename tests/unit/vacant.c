/* SPDX-License-Identifier: Apache-2.0 */
/* Tests groups with vacant seats. Each computation runs in a group in which some seats are vacant,
 * and in a fresh group that has only the members. Both must give the same bits. */
#include "context/context.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "run.h"

#define MOST_ELEMENTS 5000
#define MAX_IN_FLIGHT 2

/* The seats of the members, in ascending order. */
typedef struct seats {
    int num_seats, num_members;
    int of[RUN_MAX_RANKS]; /* [num_members] */
} seats;

/* A computation of one member. Writes its results to `out`, which has the bytes of the job. */
typedef void computation(epic_context *ctx, const seats *seats, int member, unsigned char *out);

typedef struct job {
    const char *backend;
    seats seats;
    bool is_fresh; /* the group has only the members */
    computation *run;
    size_t bytes;       /* number of bytes of the results of one member */
    unsigned char *out; /* [num_members, bytes] */
} job;

static epic_context *open_context(const epic_bootstrap *bootstrap, const char *backend)
{
    const epic_config config = {.max_tokens = 16,
                                .max_row_bytes = 4096,
                                .max_in_flight = MAX_IN_FLIGHT,
                                .timeout_ms = 60000,
                                .backend = backend};
    epic_context *ctx;
    CHECK_SAY(epic_open(&ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(NULL));
    return ctx;
}

static int find_member(const seats *s, int seat)
{
    for (int m = 0; m < s->num_members; m++)
        if (s->of[m] == seat) return m;
    return -1;
}

static seat_set set_of(const seats *s)
{
    seat_set set = {{0}};
    for (int m = 0; m < s->num_members; m++) seat_set_add(&set, s->of[m]);
    return set;
}

/* Runs one rank. The ranks on vacant seats close their contexts at once. */
static void run_rank(const epic_bootstrap *bootstrap, void *self)
{
    const job *j = self;
    const int member = j->is_fresh ? bootstrap->rank : find_member(&j->seats, bootstrap->rank);
    epic_context *ctx = open_context(bootstrap, j->backend);
    const seat_set members = set_of(&j->seats);
    seats fresh = j->seats;
    for (int m = 0; m < fresh.num_members; m++) fresh.of[m] = m;
    if (member >= 0) {
        if (!j->is_fresh)
            CHECK_SAY(context_set_members(ctx, &members) == EPIC_OK, "%s", epic_error(ctx));
        j->run(ctx, j->is_fresh ? &fresh : &j->seats, member,
               j->out + (size_t)member * j->bytes);
    }
    epic_close(ctx);
}

static void run_group(const job *j, int num_ranks)
{
    if (strcmp(j->backend, "shm") == 0)
        run_processes(num_ranks, run_rank, (void *)j, 100);
    else
        run_threads(num_ranks, run_rank, (void *)j);
}

/* Runs a computation in both groups and compares the results. */
static void compare(const char *backend, const seats *seats, computation *run, size_t bytes)
{
    const size_t size = (size_t)seats->num_members * bytes;
    unsigned char *memory = run_share(2 * size);
    job j = {.backend = backend, .seats = *seats, .run = run, .bytes = bytes, .out = memory};
    run_group(&j, seats->num_seats);
    j.out += size;
    j.is_fresh = true;
    run_group(&j, seats->num_members);
    for (int m = 0; m < seats->num_members; m++)
        CHECK_SAY(memcmp(memory + (size_t)m * bytes, j.out + (size_t)m * bytes, bytes) == 0,
                  "%s: seat %d of %d, with %d members, has other results", backend,
                  seats->of[m], seats->num_seats, seats->num_members);
    run_unshare(memory, 2 * size);
}

/* ------------------------------------------------------------------------------- sums ---- */

static void fill(run_random *random, float *data, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        data[i] = run_chance(random, 10) ? -0.0f : (float)run_between(random, -999, 999) / 7;
}

/* Adds short and long arrays. There are more sums than op slots, so that slots are reused. */
static void sums(epic_context *ctx, const seats *s, int member, unsigned char *out)
{
    static const int64_t counts[] = {0, 1, 60, 65, MOST_ELEMENTS};
    run_random random = {run_mix(5, (uint64_t)member)};
    float data[MOST_ELEMENTS];
    const bool has_tree = (s->num_members & (s->num_members - 1)) == 0;
    for (int i = 0; i < 20; i++) {
        const epic_allreduce_sum_args args = {.call.tag = (uint64_t)(i % 3),
                                              .data = data,
                                              .count = counts[i % 5],
                                              .order = has_tree && i / 5 % 2 ? EPIC_TREE
                                                                             : EPIC_BY_RANK};
        fill(&random, data, args.count);
        CHECK_SAY(epic_allreduce_sum(ctx, &args) == EPIC_OK, "%s", epic_error(ctx));
        memcpy(out, data, (size_t)args.count * sizeof *data);
        out += (size_t)args.count * sizeof *data;
    }
}

#define SUM_BYTES (4 * (1 + 60 + 65 + MOST_ELEMENTS) * sizeof(float))

/* ----------------------------------------------------------------------------- errors ---- */

static void check_refused(epic_context *ctx, epic_result result, epic_result right,
                          const char *text)
{
    CHECK_SAY(result == right && strstr(epic_error(ctx), text), "%s: %s",
              epic_result_name(result), epic_error(ctx));
}

static void wrong_members(const epic_bootstrap *bootstrap, void *self)
{
    const char *backend = self;
    epic_context *ctx = open_context(bootstrap, backend);
    const seat_set none = {{0}}, beyond = {{15}}, all = {{7}};
    check_refused(ctx, context_set_members(ctx, &none), EPIC_EINVAL, "members has 0 seats");
    check_refused(ctx, context_set_members(ctx, &beyond), EPIC_EINVAL, "num_ranks 3");
    CHECK_EQ(context_set_members(ctx, &all), EPIC_OK);
    epic_close(ctx);
}

static void wrong_backend(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap, "self");
    const seat_set all = {{1}};
    (void)self;
    check_refused(ctx, context_set_members(ctx, &all), EPIC_ENOTSUP, "backend self");
    epic_close(ctx);
}

/* With three of four members, a tree of ranks is not possible. */
static void no_tree(epic_context *ctx, const seats *s, int member, unsigned char *out)
{
    float number = 1;
    const epic_allreduce_sum_args args = {.data = &number, .count = 1, .order = EPIC_TREE};
    check_refused(ctx, epic_allreduce_sum(ctx, &args), EPIC_EINVAL, "3 is no power of two");
    (void)s, (void)member, (void)out;
}

/* The seat of the late member must be named, and no vacant seat. */
static void late(epic_context *ctx, const seats *s, int member, unsigned char *out)
{
    float data[MOST_ELEMENTS] = {0};
    epic_failure_info info;
    const epic_allreduce_sum_args args = {
        .call.timeout_ms = 300, .data = data, .count = MOST_ELEMENTS};
    (void)out;
    if (member == 1) run_nap_us(1000000);
    check_refused(ctx, epic_allreduce_sum(ctx, &args), EPIC_ETIMEOUT, "for rank ");
    CHECK_EQ(epic_failure(ctx, &info), EPIC_OK);
    CHECK_EQ(info.num_culprits, 1);
    CHECK_EQ(info.culprits[0], s->of[1]);
}

int main(void)
{
    static const seats groups[] = {{2, 1, {1}},          {3, 2, {0, 2}},
                                   {4, 3, {0, 2, 3}},    {8, 4, {1, 3, 4, 7}},
                                   {8, 7, {0, 1, 2, 3, 4, 6, 7}}, {70, 4, {2, 63, 64, 69}}};
    static const char *const backends[] = {"threads", "shm"};
    check_begin();
    run_alarm(200);
    for (int b = 0; b < 2; b++) {
        for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
            compare(backends[b], &groups[g], sums, SUM_BYTES);
        compare(backends[b], &groups[2], no_tree, 1);
        compare(backends[b], &groups[2], late, 1);
    }
    run_threads(3, wrong_members, (void *)"threads");
    run_threads(1, wrong_backend, NULL);
    return check_end();
}
