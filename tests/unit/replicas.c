/* SPDX-License-Identifier: Apache-2.0 */
/* Tests replicas against values computed by hand: which copy gets each choice on any number of
 * ranks, which choices are dropped, and sums of replicas. Also tests invalid tables, and ranks
 * with different tables. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"

enum { TOKENS = 12, TOP_K = 2, EXPERTS = 7, LOGICAL = 3, COUNT = 70 };

/* Logical expert 0 has four replicas, 1 has one, 2 has two. */
static const int32_t table[EXPERTS] = {0, 2, 0, 1, 0, 2, 0};

static const int32_t ids[TOKENS][TOP_K] = {{0, 1}, {0, 2}, {0, 0}, {1, 2}, {-1, 0}, {2, 1},
                                           {0, 2}, {0, 2}, {1, 0}, {0, 1}, {2, 0},  {0, 0}};

/* Choices go to the copies in turn: 0, 2, 4, 6 for logical expert 0, and 1, 5 for 2. */
static const int32_t takers[TOKENS][TOP_K] = {{0, 3}, {2, 1}, {4, 6}, {3, 5}, {-1, 0}, {1, 3},
                                              {2, 5}, {4, 1}, {3, 6}, {0, 3}, {5, 2},  {4, 6}};

/* The number of experts is not divisible by the number of ranks. With two ranks, both choices
 * of token 2 go to one rank. */
static const int32_t places[EXPERTS] = {0, 2, 0, 1, 1, 2, 1};

typedef struct seat {
    epic_context *ctx;
    epic_layer layer;
    void *plan;
    int64_t plan_bytes, capacity;
    int first, num_tokens;
    int32_t ranks[EXPERTS];
    const int32_t *table;
    int32_t load[EXPERTS], logical_load[LOGICAL], expert_tokens[EXPERTS], expert_rows[EXPERTS];
} seat;

static seat open_seat(const epic_bootstrap *bootstrap)
{
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = 4};
    seat s = {.layer = {.num_experts = EXPERTS, .num_logical = LOGICAL, .top_k = TOP_K},
              .table = table};
    epic_layer_info info;
    CHECK_SAY(epic_open(&s.ctx, bootstrap, &config) == EPIC_OK, "%s", epic_error(NULL));
    CHECK_SAY(epic_layer_sizes(s.ctx, &s.layer, &info) == EPIC_OK, "%s", epic_error(s.ctx));
    s.plan_bytes = info.plan_bytes;
    s.plan = aligned_alloc(64, ((size_t)s.plan_bytes + 63) / 64 * 64);
    s.num_tokens = TOKENS / bootstrap->num_ranks;
    s.first = bootstrap->rank * s.num_tokens;
    for (int e = 0; e < EXPERTS; e++) s.ranks[e] = places[e] % bootstrap->num_ranks;
    return s;
}

static void close_seat(seat *s)
{
    free(s->plan);
    epic_close(s->ctx);
}

static epic_result plan_of(seat *s, const int32_t *topk_idx)
{
    const epic_plan_args args = {.layer = &s->layer,
                                 .plan = s->plan,
                                 .plan_bytes = s->plan_bytes,
                                 .topk_idx = topk_idx,
                                 .num_tokens = s->num_tokens,
                                 .rank_of_expert = s->ranks,
                                 .logical_of_expert = s->table,
                                 .capacity = s->capacity,
                                 .expert_rows = s->expert_rows,
                                 .expert_tokens = s->expert_tokens,
                                 .load = s->load,
                                 .logical_load = s->layer.num_logical ? s->logical_load : NULL};
    return epic_plan(s->ctx, &args);
}

static epic_result plan(seat *s)
{
    return plan_of(s, ids[s->first]);
}

/* Returns how many choices of expert e come before choice (token, k), or all of them. */
static int count_of(int32_t e, int token, int k)
{
    int count = 0;
    for (int i = 0; i < token * TOP_K + k; i++) count += takers[i / TOP_K][i % TOP_K] == e;
    return count;
}

static int all_of(int32_t e)
{
    return count_of(e, TOKENS, 0);
}

/* Returns where the slab of expert e begins if each expert keeps at most quota[e]. */
static int slab_of(const seat *s, int32_t e, const int *quota)
{
    int begin = 0;
    for (int f = 0; f < e; f++)
        if (s->ranks[f] == s->ranks[e]) begin += all_of(f) < quota[f] ? all_of(f) : quota[f];
    return begin;
}

static void check_fates(const seat *s, const int *quota)
{
    epic_plan_info info;
    CHECK(epic_plan_read(s->plan, s->plan_bytes, &info) == EPIC_OK);
    const int32_t *fate =
        (const int32_t *)(const void *)((const char *)s->plan + info.fate_offset);
    const int32_t *rank =
        (const int32_t *)(const void *)((const char *)s->plan + info.rank_offset);
    for (int i = 0; i < s->num_tokens * TOP_K; i++) {
        const int token = s->first + i / TOP_K, k = i % TOP_K;
        const int32_t e = takers[token][k];
        const int nth = e < 0 ? 0 : count_of(e, token, k);
        const int want = e < 0             ? EPIC_FATE_NONE
                         : nth >= quota[e] ? EPIC_FATE_EXPERT_FULL
                                           : slab_of(s, e, quota) + nth;
        CHECK_SAY(fate[i] == want, "token %d, k %d: fate %d, not %d", token, k, fate[i], want);
        CHECK_SAY(rank[i] == (e < 0 ? -1 : s->ranks[e]), "token %d, k %d: rank %d", token, k,
                  rank[i]);
    }
}

static void check_says(const seat *s, epic_result result, epic_result right, const char *what)
{
    CHECK_SAY(result == right && strstr(epic_error(s->ctx), what), "%s: %s",
              epic_result_name(result), epic_error(s->ctx));
}

static void replicas_in_order(const epic_bootstrap *bootstrap, void *self)
{
    static const int no_quota[EXPERTS] = {99, 99, 99, 99, 99, 99, 99};
    static const int32_t logical_load[LOGICAL] = {12, 5, 6};
    seat s = open_seat(bootstrap);
    (void)self;
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    check_fates(&s, no_quota);
    for (int e = 0; e < EXPERTS; e++) CHECK_EQ(s.load[e], all_of(e));
    for (int l = 0; l < LOGICAL; l++) CHECK_EQ(s.logical_load[l], logical_load[l]);
    close_seat(&s);
}

/* The replicas of logical expert 0 keep 2, 2, 1 and 1 of 6 choices: the first 6 of the group.
 */
static void drops(const epic_bootstrap *bootstrap, void *self)
{
    static const int quota[EXPERTS] = {2, 3, 2, 6, 1, 3, 1};
    static const int32_t logical_load[LOGICAL] = {12, 5, 6};
    seat s = open_seat(bootstrap);
    (void)self;
    s.layer.overflow = EPIC_OVERFLOW_DROP;
    s.layer.expert_capacity = 6;
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    check_fates(&s, quota);
    for (int l = 0; l < LOGICAL; l++) CHECK_EQ(s.logical_load[l], logical_load[l]);
    int before = 0;
    for (int i = 0; i < TOKENS * TOP_K; i++) {
        const int32_t e = takers[i / TOP_K][i % TOP_K];
        if (e < 0 || table[e]) continue;
        CHECK((count_of(e, i / TOP_K, i % TOP_K) < quota[e]) == (before++ < 6));
    }
    close_seat(&s);
}

/* An expert_capacity that no number of choices reaches drops nothing. */
static void drops_nothing(const epic_bootstrap *bootstrap, void *self)
{
    static const int quota[EXPERTS] = {99, 99, 99, 99, 99, 99, 99};
    static const uint32_t large[] = {INT32_MAX, (uint32_t)INT32_MAX + 1, UINT32_MAX - 1,
                                     UINT32_MAX};
    (void)self;
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        seat s = open_seat(bootstrap);
        s.layer.overflow = EPIC_OVERFLOW_DROP;
        s.layer.expert_capacity = large[i];
        CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
        check_fates(&s, quota);
        close_seat(&s);
    }
}

/* Experts 1, 3 and 6 are replicas of no logical expert, so logical expert 1 is absent. The
 * other choices go to the replicas that are left, as if only these existed. */
static void absent(const epic_bootstrap *bootstrap, void *self)
{
    static const int32_t left[EXPERTS] = {0, EPIC_ABSENT, 0, EPIC_ABSENT, 0, 2, EPIC_ABSENT};
    static const int32_t turns[LOGICAL][3] = {{0, 2, 4}, {-1, -1, -1}, {5, 5, 5}};
    static const int32_t logical_load[LOGICAL] = {12, 5, 6};
    int chosen[LOGICAL] = {0}, num_absent = 0;
    seat s = open_seat(bootstrap);
    epic_plan_info info;
    (void)self;
    s.table = left;
    check_says(&s, plan(&s), EPIC_EINVAL, "rank 0 has no replica of logical expert 1:");
    s.layer.flags = EPIC_DROP_ABSENT;
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    CHECK(epic_plan_read(s.plan, s.plan_bytes, &info) == EPIC_OK);
    const int32_t *fate =
        (const int32_t *)(const void *)((const char *)s.plan + info.fate_offset);
    const int32_t *rank =
        (const int32_t *)(const void *)((const char *)s.plan + info.rank_offset);
    for (int i = 0; i < TOKENS * TOP_K; i++) {
        const int32_t id = ids[i / TOP_K][i % TOP_K];
        const int own = i - s.first * TOP_K;
        const int32_t taker = id < 0 ? -1 : turns[id][chosen[id]++ % 3];
        if (own < 0 || own >= s.num_tokens * TOP_K) continue;
        num_absent += id == 1;
        CHECK_EQ(rank[own], taker < 0 ? -1 : s.ranks[taker]);
        if (taker < 0) CHECK_EQ(fate[own], id < 0 ? EPIC_FATE_NONE : EPIC_FATE_ABSENT);
        if (taker >= 0) CHECK(fate[own] >= 0);
    }
    CHECK_EQ(info.num_absent, num_absent);
    CHECK_EQ(info.num_kept + info.num_none + info.num_absent, s.num_tokens * TOP_K);
    CHECK_EQ(s.load[0] + s.load[2] + s.load[4], 12);
    CHECK_EQ(s.load[1] + s.load[3] + s.load[6], 0);
    CHECK_EQ(s.load[5], 6);
    for (int l = 0; l < LOGICAL; l++) CHECK_EQ(s.logical_load[l], logical_load[l]);
    close_seat(&s);
}

/* A rank that is full drops by replica, and every rank computes this. */
static void rank_is_full(const epic_bootstrap *bootstrap, void *self)
{
    seat s = open_seat(bootstrap);
    epic_plan_info info;
    (void)self;
    s.layer.overflow = EPIC_OVERFLOW_DROP;
    s.capacity = 2;
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    CHECK(epic_plan_read(s.plan, s.plan_bytes, &info) == EPIC_OK);
    CHECK(info.num_slots <= 2);
    CHECK_EQ(info.num_kept + info.num_none + info.num_rank_full, s.num_tokens * TOP_K);
    close_seat(&s);
}

/* ----------------------------------------------------------------------------- errors ---- */

static void wrong_tables(const epic_bootstrap *bootstrap, void *self)
{
    seat s = open_seat(bootstrap);
    int32_t other[EXPERTS], wild[TOKENS * TOP_K];
    (void)self;
    memcpy(other, table, sizeof other);
    if (bootstrap->rank == 1) other[4] = LOGICAL;
    s.table = other;
    check_says(&s, plan(&s), EPIC_EINVAL, "rank 1, expert 4 has logical expert 3:");
    other[4] = bootstrap->rank == 1 ? -2 : 0;
    check_says(&s, plan(&s), EPIC_EINVAL, "rank 1, expert 4 has logical expert -2:");
    for (int e = 0; e < EXPERTS; e++) other[e] = table[e] == 1 ? 2 : table[e];
    check_says(&s, plan(&s), EPIC_EINVAL, "rank 0 has no replica of logical expert 1:");
    CHECK_EQ(s.logical_load[0] + s.load[0] + s.expert_tokens[0], 0);
    s.table = table;
    memcpy(wild, ids[s.first], (size_t)s.num_tokens * sizeof *ids);
    if (bootstrap->rank == 0) wild[3] = LOGICAL;
    check_says(&s, plan_of(&s, wild), EPIC_EINVAL,
               "rank 0, token 1, k 1 has expert 3: must be below num_logical 3");
    CHECK_SAY(plan(&s) == EPIC_OK, "the group is whole: %s", epic_error(s.ctx));
    close_seat(&s);
}

static void wrong_arguments(const epic_bootstrap *bootstrap, void *self)
{
    seat s = open_seat(bootstrap);
    (void)self;
    s.table = NULL;
    check_says(&s, plan(&s), EPIC_EINVAL, "logical_of_expert is NULL");
    s.table = table;
    s.layer.num_logical = EXPERTS + 1;
    check_says(&s, plan(&s), EPIC_EINVAL, "layer.num_logical is 8");
    s.layer.num_logical = 0;
    check_says(&s, plan(&s), EPIC_EINVAL, "logical_of_expert is given");
    s.layer.num_logical = LOGICAL;
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    close_seat(&s);
}

/* Wrong arguments of the sum are refused before the call waits for any rank. */
static void wrong_sums(const epic_bootstrap *bootstrap, void *self)
{
    float data[EXPERTS][COUNT], workspace[COUNT];
    seat s = open_seat(bootstrap);
    (void)self;
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    const epic_sum_replicas_args good = {.plan = s.plan,
                                         .plan_bytes = s.plan_bytes,
                                         .data = {data, EXPERTS, sizeof *data},
                                         .workspace = workspace};
    epic_sum_replicas_args a = good;
    a.plan = NULL;
    check_says(&s, epic_sum_replicas(s.ctx, &a), EPIC_EINVAL, "plan is NULL");
    a = good;
    a.data.row_bytes = 6;
    check_says(&s, epic_sum_replicas(s.ctx, &a), EPIC_EINVAL, "data.row_bytes is 6");
    a.data.row_bytes = -4;
    check_says(&s, epic_sum_replicas(s.ctx, &a), EPIC_EINVAL, "data.row_bytes is -4");
    a = good;
    a.data.num_rows = -1;
    check_says(&s, epic_sum_replicas(s.ctx, &a), EPIC_EINVAL, "data.num_rows is -1");
    a = good;
    a.data.data = NULL;
    check_says(&s, epic_sum_replicas(s.ctx, &a), EPIC_EINVAL, "data.data is NULL");
    a = good;
    a.workspace = NULL;
    check_says(&s, epic_sum_replicas(s.ctx, &a), EPIC_EINVAL, "workspace is NULL");
    a.workspace = data[1];
    check_says(&s, epic_sum_replicas(s.ctx, &a), EPIC_EINVAL, "workspace");
    a = good;
    a.flags = 1;
    check_says(&s, epic_sum_replicas(s.ctx, &a), EPIC_EINVAL, "flags is 0x1");
    a = good;
    a.reserved = 2;
    check_says(&s, epic_sum_replicas(s.ctx, &a), EPIC_EINVAL,
               "reserved fields must be zero: one is 2");
    close_seat(&s);
}

static void tables_differ(const epic_bootstrap *bootstrap, void *self)
{
    static const int32_t other[EXPERTS] = {0, 2, 1, 1, 0, 2, 0};
    seat s = open_seat(bootstrap);
    (void)self;
    if (bootstrap->rank == 1) s.table = other;
    check_says(&s, plan(&s), EPIC_EMISMATCH, "checksum of logical_of_expert");
    close_seat(&s);
}

static void numbers_differ(const epic_bootstrap *bootstrap, void *self)
{
    static const int32_t other[EXPERTS] = {0, 2, 0, 1, 0, 2, 3};
    seat s = open_seat(bootstrap);
    (void)self;
    if (bootstrap->rank == 1) s.table = other;
    if (bootstrap->rank == 1) s.layer.num_logical = LOGICAL + 1;
    int32_t room[LOGICAL + 1];
    const epic_plan_args args = {.layer = &s.layer,
                                 .plan = s.plan,
                                 .plan_bytes = s.plan_bytes,
                                 .topk_idx = ids[s.first],
                                 .num_tokens = s.num_tokens,
                                 .rank_of_expert = s.ranks,
                                 .logical_of_expert = s.table,
                                 .logical_load = room};
    check_says(&s, epic_plan(s.ctx, &args), EPIC_EMISMATCH, "num_logical");
    close_seat(&s);
}

/* ------------------------------------------------------------------------------- sums ---- */

static epic_result sum(const seat *s, float (*data)[COUNT], int64_t num_rows, int64_t count)
{
    float workspace[COUNT];
    const epic_sum_replicas_args args = {.plan = s->plan,
                                         .plan_bytes = s->plan_bytes,
                                         .data = {data, num_rows, count * 4},
                                         .workspace = workspace};
    return epic_sum_replicas(s->ctx, &args);
}

/* Fills all numbers of expert e with 2^e, so that a sum shows which experts are in it. */
static void fill(const seat *s, float (*data)[COUNT])
{
    int local = 0;
    for (int e = 0; e < EXPERTS; e++)
        if (s->ranks[e] == epic_rank(s->ctx)) {
            for (int i = 0; i < COUNT; i++) data[local][i] = (float)(1 << e);
            local++;
        }
}

static void sums(const epic_bootstrap *bootstrap, void *self)
{
    static const float right[LOGICAL] = {1 + 4 + 16 + 64, 8, 2 + 32};
    float data[EXPERTS][COUNT];
    seat s = open_seat(bootstrap);
    (void)self;
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    fill(&s, data);
    check_says(&s, sum(&s, data, 1, COUNT), EPIC_EINVAL, "data.num_rows is 1: the plan has");
    CHECK_SAY(sum(&s, data, EXPERTS, COUNT) == EPIC_OK, "%s", epic_error(s.ctx));
    for (int e = 0, local = 0; e < EXPERTS; e++) {
        if (s.ranks[e] != bootstrap->rank) continue;
        for (int i = 0; i < COUNT; i++)
            CHECK_SAY(data[local][i] == right[table[e]], "expert %d has %g", e,
                      (double)data[local][i]);
        local++;
    }
    close_seat(&s);
}

/* The rows of experts that are replicas of no logical expert stay as they are, and so do those
 * of the only replica that is left of a logical expert. */
static void absent_sums(const epic_bootstrap *bootstrap, void *self)
{
    static const int32_t left[EXPERTS] = {0, 2, 0, 1, EPIC_ABSENT, EPIC_ABSENT, 0};
    static const float right[EXPERTS] = {1 + 4 + 64, 2, 1 + 4 + 64, 8, 16, 32, 1 + 4 + 64};
    float data[EXPERTS][COUNT];
    seat s = open_seat(bootstrap);
    (void)self;
    s.table = left;
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    fill(&s, data);
    CHECK_SAY(sum(&s, data, EXPERTS, COUNT) == EPIC_OK, "%s", epic_error(s.ctx));
    for (int e = 0, local = 0; e < EXPERTS; e++)
        if (s.ranks[e] == bootstrap->rank)
            CHECK_SAY(data[local++][3] == right[e], "expert %d has another sum", e);
    close_seat(&s);
}

static void damaged_plan(const epic_bootstrap *bootstrap, void *self)
{
    float data[EXPERTS][COUNT];
    seat s = open_seat(bootstrap);
    (void)self;
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    fill(&s, data);
    if (bootstrap->rank == 1) ((unsigned char *)s.plan)[40] ^= 1;
    check_says(&s, sum(&s, data, EXPERTS, COUNT), EPIC_EINVAL, "plan of rank 1 cannot be used");
    if (bootstrap->rank == 1) ((unsigned char *)s.plan)[40] ^= 1;
    CHECK_SAY(sum(&s, data, EXPERTS, COUNT) == EPIC_OK, "%s", epic_error(s.ctx));
    close_seat(&s);
}

/* Rank 1 passes the plan of an earlier step, or other rows. */
static void sums_differ(const epic_bootstrap *bootstrap, void *self)
{
    const bool rows = self != NULL;
    float data[EXPERTS][COUNT];
    seat s = open_seat(bootstrap);
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    void *kept = malloc((size_t)s.plan_bytes);
    memcpy(kept, s.plan, (size_t)s.plan_bytes);
    CHECK_SAY(plan(&s) == EPIC_OK, "%s", epic_error(s.ctx));
    if (bootstrap->rank == 1 && !rows) memcpy(s.plan, kept, (size_t)s.plan_bytes);
    fill(&s, data);
    const int64_t count = bootstrap->rank == 1 && rows ? COUNT - 1 : COUNT;
    check_says(&s, sum(&s, data, EXPERTS, count), EPIC_EMISMATCH, rows ? "count" : "plan id");
    free(kept);
    close_seat(&s);
}

int main(void)
{
    static int rows = 1;
    check_begin();
    run_alarm(100);
    for (int ranks = 1; ranks <= 4; ranks++) {
        run_threads(ranks, replicas_in_order, NULL);
        run_threads(ranks, drops, NULL);
        run_threads(ranks, drops_nothing, NULL);
        run_threads(ranks, rank_is_full, NULL);
        run_threads(ranks, absent, NULL);
        run_threads(ranks, sums, NULL);
        run_threads(ranks, absent_sums, NULL);
    }
    run_processes(3, replicas_in_order, NULL, 40);
    run_processes(3, sums, NULL, 40);
    run_threads(2, wrong_tables, NULL);
    run_threads(2, wrong_arguments, NULL);
    run_threads(2, wrong_sums, NULL);
    run_threads(2, tables_differ, NULL);
    run_threads(2, numbers_differ, NULL);
    run_threads(2, damaged_plan, NULL);
    run_threads(2, sums_differ, NULL);
    run_threads(2, sums_differ, &rows);
    return check_end();
}
