/* SPDX-License-Identifier: Apache-2.0 */
/* Tests what the layer does about invalid data: every rank returns the same error and
 * sentence, outputs are zeros, and the group stays usable. */
#include <pthread.h>

#include "api/config.h"
#include "moe/moe.h"
#include "unit/moe_layer.h"

#define RANKS 3
#define TOKENS 6

typedef struct failing {
    problem p;
    char said[RANKS][512];
    uint32_t result[RANKS];
} failing;

static bool zeros(const void *memory, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++)
        if (((const unsigned char *)memory)[i]) return false;
    return true;
}

static void note(failing *f, int rank, epic_result result)
{
    f->result[rank] = result;
    snprintf(f->said[rank], sizeof f->said[rank], "%s", epic_error(NULL));
}

static void check_forward(failing *f, part *t, epic_context *ctx)
{
    note(f, t->rank, part_forward(t, ctx));
    CHECK(zeros(t->out, t->forward.out.num_rows * t->forward.out.row_bytes), "out of rank %d",
          t->rank);
    CHECK(get(&f->p.loss, t->rank) == 0, "the loss of rank %d is %g", t->rank,
          get(&f->p.loss, t->rank));
    CHECK(part_backward(t, ctx) == EPIC_EINVAL && strstr(epic_error(ctx), "saved"), "%s",
          epic_error(ctx));
}

/* Runs correct forward and backward calls on the same context. */
static void go_on(const problem *p, int rank, epic_context *ctx, const epic_config *config)
{
    part *t = part_make(p, rank, config, 1);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    part_free(t);
}

/* -------------------------------------------------------------------------- what fails ---- */

static void too_small(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    failing *f = what;
    part *t = part_make(&f->p, rank, config, 1);
    if (rank == 1) t->moe.capacity = 2;
    check_forward(f, t, ctx);
    int64_t load = 0, demand = f->p.demand[rank];
    for (uint32_t e = 0; e < f->p.layer.num_experts; e++)
        load += f->p.load[rank * (int64_t)f->p.layer.num_experts + e];
    CHECK(load == f->p.total * f->p.layer.top_k, "the load of rank %d is %lld", rank,
          (long long)load);
    CHECK(rank != 1 || demand > 2, "the demand of rank 1 is %lld", (long long)demand);
    part_free(t);
    go_on(&f->p, rank, ctx, config);
}

/* The limit of rank 1 is too small for a layer that may not drop choices. With a larger limit
 * the next call succeeds. */
static void limited(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    failing *f = what;
    int32_t limit = rank == 1 ? 2 : 60;
    part *t = part_make(&f->p, rank, config, 1);
    t->forward.capacity_limit = &limit;
    check_forward(f, t, ctx);
    limit = 60;
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    part_free(t);
    go_on(&f->p, rank, ctx, config);
}

static void no_such_rank(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    failing *f = what;
    int32_t owners[64];
    part *t = part_make(&f->p, rank, config, 1);
    for (uint32_t e = 0; e < f->p.layer.num_experts; e++) owners[e] = owner_of(&f->p, e);
    if (rank == 2) owners[3] = 7;
    t->forward.rank_of_expert = owners;
    check_forward(f, t, ctx);
    part_free(t);
    go_on(&f->p, rank, ctx, config);
}

/* Returns the address in `saved` of the number of all ranks' tokens; -1 there: forward
 * failed. */
static int64_t *moe_total(const part *t, const epic_config *config)
{
    epic_config whole;
    moe_job j = {0};
    CHECK(config_read(&whole, config, sizeof *config) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(moe_read_config(&j, &whole, (int32_t)whole.num_ranks, &t->moe, sizeof t->moe,
                          t->tokens) == EPIC_OK,
          "%s", epic_error(NULL));
    moe_layout_buffers(&j, t->saved, NULL, false);
    return j.saved.total_tokens;
}

/* Damages a byte of one rank's plan between forward and backward. */
static void damaged(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    failing *f = what;
    part *t = part_make(&f->p, rank, config, 1);
    unsigned char *plan = t->saved;
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    if (rank == 1) plan[40] ^= 1;
    note(f, rank, part_backward(t, ctx));
    CHECK(zeros(t->gradient[X], t->backward.d_x.num_rows * t->backward.d_x.row_bytes),
          "d_x of rank %d", rank);
    for (int i = 0; i < X; i++)
        CHECK(!t->gradient[i] || zeros(t->gradient[i], numbers_here(t, i) * 4),
              "the gradient of %s on rank %d", given_names[i], rank);
    if (rank == 1) plan[40] ^= 1;
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    part_free(t);
    go_on(&f->p, rank, ctx, config);
}

/* With EPIC_PLANNED, `saved` must begin with what epic_moe_plan left there. */
static void not_planned(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    failing *f = what;
    part *t = part_make(&f->p, rank, config, 1);
    int64_t slots = 0;
    CHECK(epic_moe_plan(ctx, &t->forward, &slots) == EPIC_EINVAL, "planned with a capacity");
    CHECK(part_plan(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(epic_moe_plan(ctx, &t->forward, NULL) == EPIC_EINVAL, "planned without slots");

    int64_t *total = moe_total(t, config);
    const int64_t right = *total;
    *total = -1;
    CHECK(epic_moe_forward(ctx, &t->forward) == EPIC_EINVAL &&
              strstr(epic_error(ctx), "EPIC_PLANNED"),
          "%s", epic_error(ctx));
    *total = right;
    ((unsigned char *)t->saved)[40] ^= rank == 1; /* dispatch reports the damage on all ranks */
    note(f, rank, epic_moe_forward(ctx, &t->forward));
    CHECK(zeros(t->out, t->forward.out.num_rows * t->forward.out.row_bytes), "out of rank %d",
          rank);
    ((unsigned char *)t->saved)[40] ^= rank == 1;
    *total = right;
    CHECK(epic_moe_forward(ctx, &t->forward) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    part_free(t);
    go_on(&f->p, rank, ctx, config);
}

/* Passes token ids and a table on all ranks; rank 1 has an invalid id or entry. */
static void bad_route(failing *f, int rank, epic_context *ctx, const epic_config *config,
                      int32_t id, int32_t entry)
{
    int32_t ids[TOKENS] = {0, 1, 2, 3, 2, 1}, entries[4][2] = {{0, 1}, {2, 3}, {4, 5}, {-1, 0}};
    part *t = part_make(&f->p, rank, config, 1);
    if (rank == 1) ids[4] = id;
    if (rank == 1) entries[2][1] = entry;
    t->forward.token_ids = ids;
    t->forward.table = entries[0];
    t->forward.table_rows = 4;
    t->forward.token_id_type = EPIC_I32;
    check_forward(f, t, ctx);
    part_free(t);
    go_on(&f->p, rank, ctx, config);
}

static void bad_token_id(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    bad_route(what, rank, ctx, config, 99, 5);
}

static void negative_token_id(void *what, int rank, epic_context *ctx,
                              const epic_config *config)
{
    bad_route(what, rank, ctx, config, -7, 5);
}

static void bad_table(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    bad_route(what, rank, ctx, config, 2, 6);
}

/* Returns the addresses of the parts of `saved`. */
static moe_saved saved_of(const part *t, const epic_config *config)
{
    epic_config whole;
    moe_job j = {0};
    CHECK(config_read(&whole, config, sizeof *config) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(moe_read_config(&j, &whole, (int32_t)whole.num_ranks, &t->moe, sizeof t->moe,
                          t->tokens) == EPIC_OK,
          "%s", epic_error(NULL));
    moe_layout_buffers(&j, t->saved, NULL, true);
    return j.saved;
}

/* Changes one number in rank 1's saved memory for one backward call. */
static void damage(failing *f, int rank, epic_context *ctx, const epic_config *config,
                   size_t part_at, size_t place, int32_t value)
{
    part *t = part_make(&f->p, rank, config, 1);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    const moe_saved saved = saved_of(t, config);
    int32_t *number;
    memcpy(&number, (const char *)&saved + part_at, sizeof number);
    const int32_t right = number[place];
    if (rank == 1) number[place] = value;
    note(f, rank, part_backward(t, ctx));
    CHECK(zeros(t->gradient[X], t->backward.d_x.num_rows * t->backward.d_x.row_bytes),
          "d_x of rank %d", rank);
    number[place] = right;
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    part_free(t);
    go_on(&f->p, rank, ctx, config);
}

#define DAMAGE(name, part, place, value)                                                 \
    static void name(void *what, int rank, epic_context *ctx, const epic_config *config) \
    {                                                                                    \
        damage(what, rank, ctx, config, offsetof(moe_saved, part), place, value);        \
    }
DAMAGE(damaged_rows, expert_rows, 0, 1000)
DAMAGE(damaged_count, expert_tokens, 1, -3)
DAMAGE(damaged_choice, topk_idx, 3, 77)
DAMAGE(damaged_total, total_tokens, 0, 5)

/* Rank 1 calls backward with memory that forward never wrote. */
static void no_forward(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    failing *f = what;
    part *t = part_make(&f->p, rank, config, 1);
    part *fresh = part_make(&f->p, rank, config, 1);
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    note(f, rank, part_backward(rank == 1 ? fresh : t, ctx));
    part_free(fresh);
    part_free(t);
    go_on(&f->p, rank, ctx, config);
}

/* The ranks' layers have different sizes, so every rank returns an error. */
static void differ(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    failing *f = what;
    part *t = part_make(&f->p, rank, config, 1);
    if (rank == 1) t->moe.flags = 0;
    if (rank == 1) t->experts.weighting = EPIC_WEIGHT_EARLY;
    note(f, rank, part_forward(t, ctx));
    CHECK(part_backward(t, ctx) == EPIC_EMISMATCH, "%s", epic_error(ctx));
    part_free(t);
}

/* ------------------------------------------------------------------------------- tests ---- */

static problem draw(int num_ranks, uint32_t sum_order)
{
    source s = source_of(3);
    problem p = {
        .name = "failures", .num_ranks = num_ranks, .biased = true, .has_shared = true};
    for (int r = 0; r < num_ranks; r++) p.tokens_of[r] = TOKENS;
    p.layer =
        (epic_layer){.num_experts = 6, .top_k = 2, .alignment = 2, .sum_order = sum_order};
    p.router = (epic_router){.num_experts = 6, .top_k = 2, .normalize = EPIC_NORMALIZE_SUM};
    p.experts =
        (epic_experts){.row_type = EPIC_F32, .num_local_experts = 1, .hidden = 5, .inner = 4};
    p.shared = p.experts;
    p.moe =
        (epic_moe){.balance_coeff = 1, .z_coeff = 1, .flags = EPIC_SUM_DENSE, .capacity = 60};
    make_given(&p, &s);
    make_results(&p);
    return p;
}

static void test(const char *name, rank_work *work, int num_ranks, uint32_t sum_order,
                 epic_result expected, const char *word)
{
    failing f = {.p = draw(num_ranks, sum_order)};
    const epic_config config = config_of(&f.p);
    team_threads(work, &f, &config);
    for (int r = 0; r < num_ranks; r++)
        CHECK(f.result[r] == expected && strstr(f.said[r], word) &&
                  (expected == EPIC_EMISMATCH || !strcmp(f.said[r], f.said[0])),
              "%s, rank %d: %s, \"%s\"", name, r, epic_result_name((epic_result)f.result[r]),
              f.said[r]);
    free_results(&f.p);
    free_given(&f.p);
}

int main(void)
{
    failures = share(sizeof *failures);
    test("too small", too_small, RANKS, EPIC_BY_RANK, EPIC_EOVERFLOW, "rank 1 has 2 slots");
    test("limited", limited, RANKS, EPIC_BY_RANK, EPIC_EOVERFLOW, "rank 1 has 2 slots");
    test("no such rank", no_such_rank, RANKS, EPIC_BY_RANK, EPIC_EINVAL, "has owner 7");
    test("damaged", damaged, RANKS, EPIC_BY_RANK, EPIC_EINVAL, "plan of rank 1 cannot be used");
    test("token id", bad_token_id, RANKS, EPIC_BY_RANK, EPIC_EINVAL,
         "token_ids: rank 1, token 4 has id 99: must be below the table's 4 rows");
    test("negative token id", negative_token_id, RANKS, EPIC_BY_RANK, EPIC_EINVAL,
         "token_ids: rank 1, token 4 has id -7");
    test("table", bad_table, RANKS, EPIC_BY_RANK, EPIC_EINVAL,
         "table: rank 1, row 2, k 1 has expert 6");
    test("saved rows", damaged_rows, RANKS, EPIC_BY_RANK, EPIC_EINVAL,
         "saved of rank 1 is damaged (rows of local expert 0: 1000)");
    test("saved count", damaged_count, RANKS, EPIC_BY_RANK, EPIC_EINVAL,
         "saved of rank 1 is damaged (tokens of local expert 1: -3)");
    test("saved choice", damaged_choice, RANKS, EPIC_BY_RANK, EPIC_EINVAL,
         "saved of rank 1 is damaged (choice 3: 77)");
    test("saved total", damaged_total, RANKS, EPIC_BY_RANK, EPIC_EINVAL,
         "saved of rank 1 is damaged (total tokens 0: 5)");
    test("not planned", not_planned, RANKS, EPIC_BY_RANK, EPIC_EINVAL,
         "plan of rank 1 cannot be used");
    test("no forward", no_forward, RANKS, EPIC_BY_RANK, EPIC_EINVAL,
         "saved of rank 1 is from a forward that failed");
    test("differ", differ, RANKS, EPIC_BY_RANK, EPIC_EMISMATCH, "rank 1");
    return atomic_load(failures) ? 1 : 0;
}
