/* SPDX-License-Identifier: Apache-2.0 */
/* Tests groups with vacant seats. Each computation runs in a group that has shrunk to its
 * members, and in a fresh group that has only the members. Both must give the same bits. */
#include "context/context.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* Makes the next generation, after the ranks on vacant seats have died. */
static void shrink(epic_context *ctx, const seat_set *members)
{
    epic_members_info info;
    const epic_regroup_args args = {.step = 1};
    const bool made =
        CHECK_SAY(epic_regroup(ctx, &args, &info) == EPIC_OK, "%s", epic_error(ctx));
    for (int w = 0; w < SEAT_SET_WORDS && made; w++)
        CHECK_EQ(info.members[w], members->words[w]);
}

/* Runs one rank. Ranks on vacant seats close their contexts at once, or their processes end. */
static void run_rank(const epic_bootstrap *bootstrap, void *self)
{
    const job *j = self;
    const int member = j->is_fresh ? bootstrap->rank : find_member(&j->seats, bootstrap->rank);
    epic_context *ctx = open_context(bootstrap, j->backend);
    const seat_set members = set_of(&j->seats);
    seats fresh = j->seats;
    for (int m = 0; m < fresh.num_members; m++) fresh.of[m] = m;
    if (member >= 0) {
        if (!j->is_fresh) shrink(ctx, &members);
        j->run(ctx, j->is_fresh ? &fresh : &j->seats, member,
               j->out + (size_t)member * j->bytes);
    } else if (strcmp(j->backend, "shm") == 0 && bootstrap->rank % 2) {
        _exit(0);
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

/* ----------------------------------------------------------------------------- layers ---- */

enum { TOKENS = 12, TOP_K = 4, HIDDEN = 300, SLOTS = 1024, MOST_EXPERTS = 64 };

/* The experts of a layer. Those on vacant seats exist only in a group with vacant seats. */
typedef struct experts {
    int32_t rank_of[MOST_EXPERTS], logical_of[MOST_EXPERTS];
    int num_experts;
} experts;

static bool is_fresh(const seats *s)
{
    return s->of[s->num_members - 1] == s->num_members - 1;
}

static int vacant_seat(const seats *s)
{
    int seat = 0;
    while (find_member(s, seat) >= 0) seat++;
    return seat;
}

/* Places the experts on random members, with EPIC_TREE in blocks. If the layer has replicas,
 * every third expert is a further replica on a vacant seat. */
static experts place_experts(const seats *s, const epic_layer *layer, run_random *random)
{
    experts e = {.num_experts = 0};
    const int num = (int)layer->num_experts, block = num / s->num_members;
    for (int i = 0; i < num; i++) {
        const int member = layer->sum_order == EPIC_TREE
                               ? s->num_members - 1 - i / block
                               : (int)run_below(random, s->num_members);
        if (layer->num_logical && layer->sum_order != EPIC_TREE && i % 3 == 0 && !is_fresh(s)) {
            e.rank_of[e.num_experts] = vacant_seat(s);
            e.logical_of[e.num_experts++] = i % (int)layer->num_logical;
        }
        e.rank_of[e.num_experts] = s->of[member];
        e.logical_of[e.num_experts++] =
            i * 5 % (int)(layer->num_logical ? layer->num_logical : 1);
    }
    return e;
}

/* The memory of one layer's calls, all of which is compared. */
typedef struct arrays {
    int32_t demand, load[MOST_EXPERTS], logical_load[MOST_EXPERTS];
    int32_t expert_rows[MOST_EXPERTS], expert_tokens[MOST_EXPERTS];
    int32_t fate[TOKENS * TOP_K], rank_to[TOKENS * TOP_K];
    float recv[SLOTS * HIDDEN], slot_weights[SLOTS], out[TOKENS * HIDDEN];
    float d_rows[SLOTS * HIDDEN], d_slot_weights[SLOTS], d_tokens[TOKENS * HIDDEN];
    float d_weights[TOKENS * TOP_K], replicas[MOST_EXPERTS * HIDDEN];
} arrays;

typedef struct layer_run {
    epic_context *ctx;
    const seats *seats;
    epic_layer layer;
    experts experts;
    int num_tokens;
    int32_t ids[TOKENS * TOP_K];
    float tokens[TOKENS * HIDDEN], weights[TOKENS * TOP_K], workspace[HIDDEN];
    void *plan;
    int64_t plan_bytes;
    arrays *a;
} layer_run;

static void check_ok(const layer_run *r, epic_result result)
{
    CHECK_SAY(result == EPIC_OK, "%s", epic_error(r->ctx));
}

/* Copies the loads of the experts on members to the front, and replaces the seats in rank_to by
 * the numbers of the members. */
static void drop_vacant(layer_run *r)
{
    int count = 0;
    for (int e = 0; e < r->experts.num_experts; e++)
        if (find_member(r->seats, r->experts.rank_of[e]) >= 0)
            r->a->load[count++] = r->a->load[e];
        else
            CHECK_EQ(r->a->load[e], 0);
    memset(r->a->load + count, 0, (size_t)(MOST_EXPERTS - count) * sizeof *r->a->load);
    for (int i = 0; i < r->num_tokens * TOP_K; i++)
        if (r->a->rank_to[i] >= 0) r->a->rank_to[i] = find_member(r->seats, r->a->rank_to[i]);
}

static void make_plan(layer_run *r)
{
    epic_plan_info info;
    const epic_plan_args args = {
        .layer = &r->layer,
        .plan = r->plan,
        .plan_bytes = r->plan_bytes,
        .topk_idx = r->ids,
        .num_tokens = r->num_tokens,
        .rank_of_expert = r->experts.rank_of,
        .logical_of_expert = r->layer.num_logical ? r->experts.logical_of : NULL,
        .capacity = r->layer.overflow == EPIC_OVERFLOW_DROP ? 20 : SLOTS,
        .expert_rows = r->a->expert_rows,
        .expert_tokens = r->a->expert_tokens,
        .load = r->a->load,
        .logical_load = r->layer.num_logical ? r->a->logical_load : NULL,
        .demand = &r->a->demand};
    check_ok(r, epic_plan(r->ctx, &args));
    check_ok(r, epic_plan_read(r->plan, r->plan_bytes, &info));
    const size_t bytes = (size_t)(r->num_tokens * TOP_K) * sizeof(int32_t);
    memcpy(r->a->fate, (const char *)r->plan + info.fate_offset, bytes);
    memcpy(r->a->rank_to, (const char *)r->plan + info.rank_offset, bytes);
    drop_vacant(r);
}

static epic_rows rows_of(float *data, int64_t num_rows)
{
    return (epic_rows){data, num_rows, HIDDEN * sizeof(float)};
}

static void run_forward(layer_run *r)
{
    const bool flat = r->layer.layout == EPIC_FLAT;
    const epic_dispatch_args dispatch = {
        .layer = &r->layer,
        .plan = r->plan,
        .plan_bytes = r->plan_bytes,
        .type = EPIC_F32,
        .tokens = epic_rows_as_const(rows_of(r->tokens, r->num_tokens)),
        .recv = rows_of(r->a->recv, SLOTS),
        .weights = flat ? NULL : r->weights,
        .slot_weights = flat ? NULL : r->a->slot_weights};
    const epic_combine_args combine = {.layer = &r->layer,
                                       .plan = r->plan,
                                       .plan_bytes = r->plan_bytes,
                                       .type = EPIC_F32,
                                       .rows = epic_rows_as_const(rows_of(r->a->recv, SLOTS)),
                                       .slot_weights = dispatch.slot_weights,
                                       .out = rows_of(r->a->out, r->num_tokens)};
    check_ok(r, epic_dispatch(r->ctx, &dispatch));
    check_ok(r, epic_combine(r->ctx, &combine));
}

static void run_backward(layer_run *r)
{
    const bool flat = r->layer.layout == EPIC_FLAT;
    const epic_combine_backward_args combine = {
        .layer = &r->layer,
        .plan = r->plan,
        .plan_bytes = r->plan_bytes,
        .type = EPIC_F32,
        .d_out = epic_rows_as_const(rows_of(r->tokens, r->num_tokens)),
        .rows = flat ? (epic_const_rows){0} : epic_rows_as_const(rows_of(r->a->recv, SLOTS)),
        .slot_weights = flat ? NULL : r->a->slot_weights,
        .d_rows = rows_of(r->a->d_rows, SLOTS),
        .d_slot_weights = flat ? NULL : r->a->d_slot_weights};
    const epic_dispatch_backward_args dispatch = {
        .layer = &r->layer,
        .plan = r->plan,
        .plan_bytes = r->plan_bytes,
        .type = EPIC_F32,
        .d_recv = epic_rows_as_const(rows_of(r->a->d_rows, SLOTS)),
        .d_slot_weights = combine.d_slot_weights,
        .d_tokens = rows_of(r->a->d_tokens, r->num_tokens),
        .d_weights = flat ? NULL : r->a->d_weights};
    check_ok(r, epic_combine_backward(r->ctx, &combine));
    check_ok(r, epic_dispatch_backward(r->ctx, &dispatch));
}

static void sum_replicas(layer_run *r)
{
    epic_plan_info info;
    check_ok(r, epic_plan_read(r->plan, r->plan_bytes, &info));
    for (int i = 0; i < MOST_EXPERTS * HIDDEN; i++)
        r->a->replicas[i] = i % 7 ? (float)(i % 1000) / 3 : -0.0f;
    const epic_sum_replicas_args args = {
        .plan = r->plan,
        .plan_bytes = r->plan_bytes,
        .data = {r->a->replicas, info.num_local_experts, HIDDEN * sizeof(float)},
        .workspace = r->workspace};
    check_ok(r, epic_sum_replicas(r->ctx, &args));
}

static void run_layer(epic_context *ctx, const seats *s, int member, const epic_layer *layer,
                      uint64_t seed, arrays *a)
{
    run_random common = {run_mix(seed, 1)}, own = {run_mix(seed, 100 + (uint64_t)member)};
    layer_run *r = calloc(1, sizeof *r);
    epic_layer_info info;
    *r = (layer_run){.ctx = ctx, .seats = s, .layer = *layer, .a = a};
    r->experts = place_experts(s, layer, &common);
    r->layer.num_experts = (uint32_t)r->experts.num_experts;
    check_ok(r, epic_layer_sizes(ctx, &r->layer, &info));
    r->plan_bytes = info.plan_bytes;
    r->plan = aligned_alloc(64, ((size_t)info.plan_bytes + 63) / 64 * 64);
    r->num_tokens = (int)run_below(&own, TOKENS + 1);
    const int64_t num_ids = layer->num_logical ? layer->num_logical : layer->num_experts;
    for (int i = 0; i < TOKENS * TOP_K; i++)
        r->ids[i] = (int32_t)run_below(&own, num_ids + 1) - 1;
    fill(&own, r->tokens, TOKENS * HIDDEN);
    fill(&own, r->weights, TOKENS * TOP_K);
    make_plan(r);
    run_forward(r);
    run_backward(r);
    if (layer->num_logical) sum_replicas(r);
    free(r->plan);
    free(r);
}

static const epic_layer kinds[] = {
    {.num_experts = 40, .top_k = TOP_K, .alignment = 8},
    {.num_experts = 40, .top_k = TOP_K, .layout = EPIC_FLAT},
    {.num_experts = 40,
     .top_k = TOP_K,
     .overflow = EPIC_OVERFLOW_DROP,
     .priority = EPIC_BY_K,
     .expert_capacity = 3},
    {.num_experts = 21, .num_logical = 8, .top_k = TOP_K},
    {.num_experts = 21,
     .num_logical = 8,
     .top_k = TOP_K,
     .overflow = EPIC_OVERFLOW_DROP,
     .expert_capacity = 5},
    {.num_experts = 32, .top_k = TOP_K, .sum_order = EPIC_TREE, .leaves = 16},
    {.num_experts = 32, .top_k = TOP_K, .sum_order = EPIC_TREE},
    {.num_experts = 32, .num_logical = 8, .top_k = TOP_K, .sum_order = EPIC_TREE},
};
enum { NUM_KINDS = sizeof kinds / sizeof *kinds };

static void layers(epic_context *ctx, const seats *s, int member, unsigned char *out)
{
    const bool has_tree = (s->num_members & (s->num_members - 1)) == 0;
    for (int k = 0; k < NUM_KINDS; k++) {
        if (kinds[k].sum_order == EPIC_TREE && !has_tree) continue;
        run_layer(ctx, s, member, &kinds[k], (uint64_t)k, (arrays *)(void *)out + k);
    }
}

/* ----------------------------------------------------------------------- whole layers ---- */

enum { LAYER_EXPERTS = 8, WIDTH = 12, INNER = 6 };

/* The parameters and results of a whole layer. All members know all experts. */
typedef struct whole_layer {
    float x[TOKENS * WIDTH], d_out[TOKENS * WIDTH], w_gate[WIDTH * LAYER_EXPERTS];
    float gate_up[LAYER_EXPERTS][WIDTH * 2 * INNER], down[LAYER_EXPERTS][INNER * WIDTH];
} whole_layer;

typedef struct whole_results {
    float out[TOKENS * WIDTH], d_x[TOKENS * WIDTH], loss, d_gate[WIDTH * LAYER_EXPERTS];
    float d_gate_up[LAYER_EXPERTS][WIDTH * 2 * INNER], d_down[LAYER_EXPERTS][INNER * WIDTH];
    int32_t load[LAYER_EXPERTS];
} whole_results;

static void *allocate_lines(int64_t bytes)
{
    return aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64);
}

/* Runs a layer forward and backward. Losses and dense gradients are summed over the members. */
static void run_whole_layer(epic_context *ctx, const seats *s, int member, uint32_t order,
                            whole_results *r)
{
    run_random common = {run_mix(9, order)}, own = {run_mix(10, (uint64_t)member)};
    const epic_layer layer = {.num_experts = LAYER_EXPERTS,
                              .top_k = 2,
                              .sum_order = order,
                              .leaves = order == EPIC_TREE ? LAYER_EXPERTS : 0};
    const epic_router router = {
        .num_experts = LAYER_EXPERTS, .top_k = 2, .normalize = EPIC_NORMALIZE_SUM};
    const epic_experts experts = {.num_local_experts = LAYER_EXPERTS,
                                  .hidden = WIDTH,
                                  .inner = INNER,
                                  .row_type = EPIC_F32,
                                  .weight_type = EPIC_F32};
    const epic_moe moe = {.layer = &layer,
                          .router = &router,
                          .experts = &experts,
                          .balance_coeff = 0.1,
                          .z_coeff = 0.01,
                          .capacity = 256,
                          .flags = EPIC_SUM_DENSE};
    whole_layer *w = calloc(1, sizeof *w), *mine = calloc(1, sizeof *mine);
    const struct experts places = place_experts(s, &layer, &common);
    fill(&common, w->w_gate, WIDTH * LAYER_EXPERTS);
    fill(&common, w->gate_up[0], LAYER_EXPERTS * WIDTH * 2 * INNER);
    fill(&common, w->down[0], LAYER_EXPERTS * INNER * WIDTH);
    fill(&own, w->x, TOKENS * WIDTH);
    fill(&own, w->d_out, TOKENS * WIDTH);
    for (int e = 0, local = 0; e < LAYER_EXPERTS; e++) {
        if (places.rank_of[e] != s->of[member]) continue;
        memcpy(mine->gate_up[local], w->gate_up[e], sizeof w->gate_up[e]);
        memcpy(mine->down[local++], w->down[e], sizeof w->down[e]);
    }
    const int64_t num_tokens = order == EPIC_TREE ? 8 : run_below(&own, TOKENS + 1);
    const epic_const_rows x = {w->x, num_tokens, WIDTH * sizeof(float)};
    epic_moe_memory_info memory;
    CHECK_SAY(epic_moe_memory(ctx, NULL, &moe, &memory) == EPIC_OK, "%s", epic_error(ctx));
    const int64_t most = memory.forward_bytes > memory.backward_bytes ? memory.forward_bytes
                                                                      : memory.backward_bytes;
    void *saved = allocate_lines(memory.saved_bytes), *workspace = allocate_lines(most);
    const epic_moe_weights weights = {
        .w_gate = w->w_gate, .w_gate_up = mine->gate_up, .w_down = mine->down};
    const epic_moe_args forward = {.moe = &moe,
                                   .weights = &weights,
                                   .x = x,
                                   .out = {r->out, num_tokens, x.row_bytes},
                                   .rank_of_expert = places.rank_of,
                                   .saved = saved,
                                   .saved_bytes = memory.saved_bytes,
                                   .workspace = workspace,
                                   .workspace_bytes = most,
                                   .loss = &r->loss,
                                   .load = r->load};
    CHECK_SAY(epic_moe_forward(ctx, &forward) == EPIC_OK, "%s", epic_error(ctx));
    const epic_moe_gradients gradients = {
        .w_gate = r->d_gate, .w_gate_up = r->d_gate_up, .w_down = r->d_down};
    const epic_moe_backward_args backward = {.moe = &moe,
                                             .weights = &weights,
                                             .x = x,
                                             .d_out = {w->d_out, num_tokens, x.row_bytes},
                                             .d_x = {r->d_x, num_tokens, x.row_bytes},
                                             .gradients = &gradients,
                                             .saved = saved,
                                             .saved_bytes = memory.saved_bytes,
                                             .workspace = workspace,
                                             .workspace_bytes = most};
    CHECK_SAY(epic_moe_backward(ctx, &backward) == EPIC_OK, "%s", epic_error(ctx));
    free(saved);
    free(workspace);
    free(mine);
    free(w);
}

static void whole_layers(epic_context *ctx, const seats *s, int member, unsigned char *out)
{
    whole_results *results = (whole_results *)(void *)out;
    run_whole_layer(ctx, s, member, EPIC_BY_RANK, &results[0]);
    if ((s->num_members & (s->num_members - 1)) == 0)
        run_whole_layer(ctx, s, member, EPIC_TREE, &results[1]);
}

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

static epic_result plan_of(epic_context *ctx, const epic_layer *layer, const int32_t *rank_of,
                           const int32_t *logical_of)
{
    epic_layer_info info = {0};
    const int32_t ids[TOP_K] = {0, 1, 2, 3};
    const epic_result result = epic_layer_sizes(ctx, layer, &info);
    if (result != EPIC_OK) return result;
    void *plan = aligned_alloc(64, ((size_t)info.plan_bytes + 63) / 64 * 64);
    const epic_plan_args args = {.layer = layer,
                                 .plan = plan,
                                 .plan_bytes = info.plan_bytes,
                                 .topk_idx = ids,
                                 .num_tokens = 1,
                                 .rank_of_expert = rank_of,
                                 .logical_of_expert = logical_of};
    const epic_result made = epic_plan(ctx, &args);
    free(plan);
    return made;
}

/* Seat 1 of four is vacant, so it cannot own an expert whose choices must not be dropped. */
static void wrong_places(epic_context *ctx, const seats *s, int member, unsigned char *out)
{
    static const int32_t on_vacant[] = {0, 2, 3, 1, 0, 0, 0, 0},
                         beyond[] = {0, 4, 0, 0, 0, 0, 0, 0};
    static const int32_t on_members[] = {0, 2, 3, 3, 0, 0, 0, 0};
    static const int32_t some[] = {0, 1, 2, 3, 0, 1, 2, 2}, lost[] = {0, 1, 2, 3, 0, 1, 2, 0};
    const epic_layer layer = {.num_experts = 8, .top_k = TOP_K};
    const epic_layer replicas = {.num_experts = 8, .num_logical = 4, .top_k = TOP_K};
    const epic_layer tree = {.num_experts = 8, .top_k = TOP_K, .sum_order = EPIC_TREE};
    (void)member, (void)out;
    if (is_fresh(s)) return;
    check_refused(ctx, plan_of(ctx, &layer, on_vacant, NULL), EPIC_EINVAL,
                  "rank 0, expert 3 has owner 1: must be a member of the group, but this seat");
    check_refused(ctx, plan_of(ctx, &layer, NULL, NULL), EPIC_EINVAL,
                  "rank 0, expert 2 has owner 1: must be a member");
    check_refused(ctx, plan_of(ctx, &layer, beyond, NULL), EPIC_EINVAL,
                  "rank 0, expert 1 has owner 4: must be a rank, 0 to 3");
    check_refused(ctx, plan_of(ctx, &tree, NULL, NULL), EPIC_EINVAL, "layer.leaves is 3");
    check_refused(ctx, plan_of(ctx, &replicas, on_vacant, some), EPIC_EINVAL,
                  "rank 0 has no replica of logical expert 3");
    CHECK_EQ(plan_of(ctx, &replicas, on_vacant, lost), EPIC_EINVAL);
    CHECK_SAY(plan_of(ctx, &layer, on_members, NULL) == EPIC_OK, "%s", epic_error(ctx));
}

/* With EPIC_TREE, each of two members of four seats owns one half of the experts. */
static void wrong_trees(epic_context *ctx, const seats *s, int member, unsigned char *out)
{
    static const int32_t good[] = {2, 2, 2, 2, 0, 0, 0, 0}, vacant[] = {0, 0, 0, 0, 1, 1, 1, 1};
    const epic_layer tree = {.num_experts = 8, .top_k = TOP_K, .sum_order = EPIC_TREE};
    (void)member, (void)out;
    if (is_fresh(s)) return;
    check_refused(ctx, plan_of(ctx, &tree, NULL, NULL), EPIC_EINVAL,
                  "expert 2 has owner 1: with EPIC_TREE each rank must own one of the 2 equal");
    check_refused(ctx, plan_of(ctx, &tree, vacant, NULL), EPIC_EINVAL,
                  "expert 4 has owner 1: with EPIC_TREE");
    CHECK_SAY(plan_of(ctx, &tree, good, NULL) == EPIC_OK, "%s", epic_error(ctx));
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
    static const seats groups[] = {{2, 1, {1}},
                                   {3, 2, {0, 2}},
                                   {4, 3, {0, 2, 3}},
                                   {8, 4, {1, 3, 4, 7}},
                                   {8, 7, {0, 1, 2, 3, 4, 6, 7}},
                                   {70, 4, {2, 63, 64, 69}}};
    static const char *const backends[] = {"threads", "shm"};
    check_begin();
    run_alarm(200);
    for (int b = 0; b < 2; b++) {
        for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
            compare(backends[b], &groups[g], sums, SUM_BYTES);
            compare(backends[b], &groups[g], layers, NUM_KINDS * sizeof(arrays));
            compare(backends[b], &groups[g], whole_layers, 2 * sizeof(whole_results));
        }
        compare(backends[b], &groups[2], no_tree, 1);
        compare(backends[b], &groups[2], wrong_places, 1);
        compare(backends[b], &(seats){4, 2, {0, 2}}, wrong_trees, 1);
        compare(backends[b], &groups[2], late, 1);
    }
    run_threads(3, wrong_members, (void *)"threads");
    run_threads(1, wrong_backend, NULL);
    return check_end();
}
