/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that wrong arguments of the layer are refused with a sentence that names the
 * argument and its value. Nothing is written or sent, so the peers' next correct call
 * succeeds. */
#include <pthread.h>

#include "unit/moe_layer.h"

#define TOKENS 4
#define HIDDEN 6

/* The structs of one call. Tests set one field of them to a wrong value. */
typedef struct call {
    epic_config config;
    epic_moe_args forward;
    epic_moe_backward_args backward;
    epic_moe moe;
    epic_layer layer;
    epic_router router;
    epic_experts experts, shared;
    epic_moe_weights weights;
} call;

enum { MEMORY = 1, FORWARD = 2, BACKWARD = 4, CALLS = FORWARD | BACKWARD, ALL = 7 };

/* One wrong argument: the field at this offset gets `value`, and the error must contain both
 * words. */
typedef struct wrong {
    int of; /* bit mask of the calls that have this field */
    size_t at, bytes;
    uint64_t value;
    const char *word, *other;
} wrong;

#define FIELD(member) offsetof(call, member), sizeof(((call *)0)->member)
#define NAN_BITS 0x7ff8000000000000u
#define MINUS_TWO_BITS 0xc000000000000000u

static const wrong table[] = {
    {MEMORY, FIELD(config.num_ranks), 0, "config.num_ranks", "0"},
    {MEMORY, FIELD(config.max_tokens), (uint64_t)-1, "config.max_tokens", "-1"},
    {MEMORY, FIELD(config.max_row_bytes), 8, "moe.experts.hidden is 6", "8"},
    {ALL, FIELD(moe.layer), 0, "layer", "NULL"},
    {ALL, FIELD(moe.router), 0, "moe.router", "NULL"},
    {ALL, FIELD(moe.experts), 0, "moe.experts", "NULL"},
    {FORWARD, FIELD(moe.capacity), 0, "moe.capacity is 0", "epic_moe_plan"},
    {ALL, FIELD(moe.capacity), (uint64_t)-5, "moe.capacity", "-5"},
    {ALL, FIELD(moe.capacity), 1ull << 31, "moe.capacity", "2147483648"},
    {ALL, FIELD(moe.balance_coeff), NAN_BITS, "moe.balance_coeff", "nan"},
    {ALL, FIELD(moe.z_coeff), NAN_BITS, "moe.z_coeff", "nan"},
    {ALL, FIELD(moe.balance_coeff), MINUS_TWO_BITS, "moe.balance_coeff is -2",
     "0 (no loss) or more"},
    {ALL, FIELD(moe.z_coeff), MINUS_TWO_BITS, "moe.z_coeff is -2", "0 (no loss) or more"},
    {ALL, FIELD(moe.sequence_tokens), (uint64_t)-2, "moe.sequence_tokens", "-2"},
    {ALL, FIELD(moe.flags), 6, "moe.flags", "0x6"},
    {ALL, FIELD(moe.reserved), 9, "moe.reserved", "9"},
    {ALL, FIELD(layer.layout), EPIC_FLAT, "moe.layer.layout", "1"},
    {ALL, FIELD(layer.num_logical), 3, "moe.router.num_experts is 4", "num_logical is 3"},
    {ALL, FIELD(layer.num_experts), 0, "layer.num_experts", "0"},
    {ALL, FIELD(layer.top_k), 65, "layer.top_k", "65"},
    {ALL, FIELD(layer.leaves), 4, "layer.leaves", "4"},
    {ALL, FIELD(layer.sum_order), 7, "layer.sum_order", "7"},
    {ALL, FIELD(router.num_experts), 5, "moe.router.num_experts is 5", "4"},
    {ALL, FIELD(router.top_k), 3, "moe.router.top_k is 3", "2"},
    {ALL, FIELD(router.score), 77, "score", "77"},
    {ALL, FIELD(experts.hidden), 0, "moe.experts: experts.hidden", "0"},
    {ALL, FIELD(experts.inner), 0, "moe.experts: experts.inner", "0"},
    {ALL, FIELD(experts.row_type), EPIC_I32, "moe.experts: experts.row_type", "7"},
    {ALL, FIELD(experts.weight_type), EPIC_F64, "moe.experts: experts.row_type is F32", "F64"},
    {ALL, FIELD(experts.weighting), 3, "moe.experts: experts.weighting", "3"},
    {ALL, FIELD(experts.activation), 9, "moe.experts: experts.activation", "9"},
    {ALL, FIELD(experts.flags), 1, "moe.experts.flags", "1"},
    {ALL, FIELD(shared.num_local_experts), 2, "moe.shared.num_local_experts", "2"},
    {ALL, FIELD(shared.hidden), 7, "moe.shared.hidden is 7", "6"},
    {ALL, FIELD(experts.weight_type), EPIC_E4M3, "moe.experts.weight_type", "E4M3"},
    {ALL, FIELD(shared.weight_type), EPIC_E4M3, "moe.shared.weight_type", "E4M3"},
    {ALL, FIELD(shared.row_type), EPIC_BF16, "moe.shared.row_type is 2", "1"},
    {ALL, FIELD(shared.weighting), EPIC_WEIGHT_EARLY, "moe.shared.weighting", "1"},
    {ALL, FIELD(shared.inner), 0, "moe.shared: experts.inner", "0"},
    {FORWARD, FIELD(forward.moe), 0, "moe", "NULL"},
    {FORWARD, FIELD(forward.weights), 0, "weights", "NULL"},
    {FORWARD, FIELD(forward.x.num_rows), (uint64_t)-1, "x.num_rows", "-1"},
    {FORWARD, FIELD(forward.x.num_rows), 1000, "x.num_rows", "1000"},
    {FORWARD, FIELD(forward.x.row_bytes), 20, "x.row_bytes", "20"},
    {FORWARD, FIELD(forward.x.data), 0, "x.data", "NULL"},
    {FORWARD, FIELD(forward.out.num_rows), 3, "out.num_rows", "3"},
    {FORWARD, FIELD(forward.out.row_bytes), 12, "out.row_bytes", "12"},
    {FORWARD, FIELD(forward.out.data), 0, "out.data", "NULL"},
    {FORWARD, FIELD(forward.saved), 0, "saved", "nil"},
    {FORWARD, FIELD(forward.saved), 0x1010, "saved", "0x1010"},
    {FORWARD, FIELD(forward.saved_bytes), 63, "saved_bytes", "63"},
    {FORWARD, FIELD(forward.workspace), 0, "workspace", "nil"},
    {FORWARD, FIELD(forward.workspace_bytes), 0, "workspace_bytes", "0"},
    {FORWARD, FIELD(forward.token_id_type), EPIC_F32, "token_id_type", "1"},
    {FORWARD, FIELD(forward.flags), 4, "flags", "0x4"},
    {FORWARD, FIELD(forward.flags), EPIC_SUM_DENSE, "flags", "0x4"},
    {FORWARD, FIELD(forward.loss), 0x1002, "loss", "0x1002"},
    {FORWARD, FIELD(forward.balance_loss), 0x1002, "balance_loss", "0x1002"},
    {FORWARD, FIELD(forward.z_loss), 0x1002, "z_loss", "0x1002"},
    {FORWARD, FIELD(forward.load), 0x1002, "load", "0x1002"},
    {FORWARD, FIELD(forward.topk_idx_in), 0x1002, "topk_idx_in", "0x1002"},
    {FORWARD, FIELD(forward.topk_weights_in), 0x1004, "topk_weights_in is not NULL",
     "topk_idx_in is NULL"},
    {FORWARD, FIELD(forward.topk_idx_out), 0x1002, "topk_idx_out", "0x1002"},
    {FORWARD, FIELD(forward.topk_weights_out), 0x1002, "topk_weights_out", "0x1002"},
    {FORWARD, FIELD(forward.capacity_limit), 0x1002, "capacity_limit", "0x1002"},
    {BACKWARD, FIELD(backward.d_topk_weights_in), 0x1004, "d_topk_weights_in is not NULL",
     "EPIC_FORCED_WEIGHTS"},
    {FORWARD, FIELD(forward.rank_of_expert), 0x1002, "rank_of_expert", "0x1002"},
    {CALLS, FIELD(weights.w_gate), 0x1002, "weights.w_gate", "0x1002"},
    {CALLS, FIELD(weights.bias), 0x1001, "weights.bias", "0x1001"},
    {CALLS, FIELD(weights.shared_down), 0x1002, "weights.shared_down", "0x1002"},
    {BACKWARD, FIELD(backward.d_loss), 0x1001, "d_loss", "0x1001"},
    {BACKWARD, FIELD(backward.d_balance_loss), 0x1001, "d_balance_loss", "0x1001"},
    {BACKWARD, FIELD(backward.d_z_loss), 0x1001, "d_z_loss", "0x1001"},
    {BACKWARD, FIELD(backward.flags), EPIC_ZERO_TAIL, "flags", "0x1"},
    {CALLS, FIELD(weights.w_gate), 0, "weights.w_gate", "NULL"},
    {CALLS, FIELD(weights.w_gate_up), 0, "weights.w_gate_up", "NULL"},
    {CALLS, FIELD(weights.w_down), 0, "weights.w_down", "NULL"},
    {CALLS, FIELD(weights.shared_gate_up), 0, "weights.shared_gate_up", "NULL"},
    {CALLS, FIELD(weights.shared_down), 0, "weights.shared_down", "NULL"},
    {CALLS, FIELD(moe.sequence_tokens), 3, "moe.sequence_tokens", "3"},
    {FORWARD, FIELD(experts.num_local_experts), 1, "moe.experts.num_local_experts", "1"},
    {BACKWARD, FIELD(backward.moe), 0, "moe", "NULL"},
    {BACKWARD, FIELD(backward.x.data), 0, "x.data", "NULL"},
    {BACKWARD, FIELD(backward.d_out.num_rows), 5, "d_out.num_rows", "5"},
    {BACKWARD, FIELD(backward.d_out.row_bytes), 4, "d_out.row_bytes", "4"},
    {BACKWARD, FIELD(backward.d_out.data), 0, "d_out.data", "NULL"},
    {BACKWARD, FIELD(backward.d_x.num_rows), 0, "d_x.num_rows", "0"},
    {BACKWARD, FIELD(backward.d_x.row_bytes), 4, "d_x.row_bytes", "4"},
    {BACKWARD, FIELD(backward.saved), 0x1010, "saved", "0x1010"},
    {BACKWARD, FIELD(backward.saved_bytes), 63, "saved_bytes", "63"},
    {BACKWARD, FIELD(backward.workspace), 0x1010, "workspace", "0x1010"},
    {BACKWARD, FIELD(backward.workspace_bytes), 64, "workspace_bytes", "64"},
    {BACKWARD, FIELD(backward.flags), 5, "flags", "0x5"},
    {BACKWARD, FIELD(backward.loss_type), EPIC_F64, "loss_type", "4"},
    {BACKWARD, FIELD(backward.grad_type), EPIC_BF16, "grad_type", "2"},
    {BACKWARD, FIELD(backward.reserved), 3, "reserved", "3"},
    {FORWARD, FIELD(forward.loss_type), EPIC_F64, "loss_type", "4"},
    {FORWARD, FIELD(forward.loss_type), EPIC_BF16, "loss_type", "2"},
    {FORWARD, FIELD(forward.reserved), 3, "reserved", "3"},
};

#define NUM_WRONG (sizeof table / sizeof *table)

/* Makes copies of all structs that point at each other. */
static void copy_call(call *c, const part *t, const epic_config *config)
{
    *c = (call){.config = *config,
                .forward = t->forward,
                .backward = t->backward,
                .moe = t->moe,
                .layer = t->p->layer,
                .router = t->p->router,
                .experts = t->experts,
                .shared = t->p->shared,
                .weights = t->weights};
    c->moe.layer = &c->layer;
    c->moe.router = &c->router;
    c->moe.experts = &c->experts;
    c->moe.shared = &c->shared;
    c->forward.moe = c->backward.moe = &c->moe;
    c->forward.weights = c->backward.weights = &c->weights;
}

static epic_result make_call(const call *c, int which, epic_context *ctx)
{
    epic_moe_memory_info info;
    if (which == MEMORY) return epic_moe_memory(NULL, &c->config, &c->moe, &info);
    if (which == FORWARD) return epic_moe_forward(ctx, &c->forward);
    return epic_moe_backward(ctx, &c->backward);
}

static void refuse(epic_result result, int which, const char *word, const char *other)
{
    const char *said = epic_error(NULL);
    CHECK(result == EPIC_EINVAL && strstr(said, word) && strstr(said, other),
          "call %d gave %s, \"%s\", where %s and %s were to be named", which,
          epic_result_name(result), said, word, other);
}

static void try_table(const part *t, int which, epic_context *ctx, const epic_config *config)
{
    for (size_t i = 0; i < NUM_WRONG; i++) {
        call c;
        if (!(table[i].of & which)) continue;
        copy_call(&c, t, config);
        memcpy((char *)&c + table[i].at, &table[i].value, table[i].bytes); /* little-endian */
        refuse(make_call(&c, which, ctx), which, table[i].word, table[i].other);
    }
}

/* Tests wrong arguments that the table cannot describe. */
static void try_others(part *t, epic_context *ctx, const epic_config *config)
{
    call c;
    copy_call(&c, t, config);
    refuse(epic_moe_forward(NULL, &c.forward), FORWARD, "ctx", "NULL");
    refuse(epic_moe_forward(ctx, NULL), FORWARD, "args", "NULL");
    refuse(epic_moe_forward_v1(ctx, &c.forward, 0), FORWARD, "args", "0");
    epic_moe_memory_info open, closed;
    CHECK(epic_moe_memory(ctx, NULL, &c.moe, &open) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(epic_moe_memory(NULL, config, &c.moe, &closed) == EPIC_OK, "%s", epic_error(NULL));
    CHECK(!memcmp(&open, &closed, sizeof open), "context and configuration differ");
    refuse(
        epic_moe_memory_v1(NULL, NULL, 0, &c.moe, sizeof c.moe, &t->memory, sizeof t->memory),
        MEMORY, "config", "");
    refuse(
        epic_moe_memory_v1(NULL, config, sizeof *config, NULL, 0, &t->memory, sizeof t->memory),
        MEMORY, "moe", "");
    refuse(epic_moe_memory_v1(NULL, config, sizeof *config, &c.moe, sizeof c.moe, NULL, 0),
           MEMORY, "out", "NULL");
    c.forward.out.data = (void *)(uintptr_t)c.forward.x.data;
    refuse(make_call(&c, FORWARD, ctx), FORWARD, "out.data", "x.data");
    c.forward.out.data = (char *)(uintptr_t)c.forward.x.data + HIDDEN * sizeof(float);
    refuse(make_call(&c, FORWARD, ctx), FORWARD, "out.data", "x.data");
    copy_call(&c, t, config);
    c.forward.loss = (float *)c.forward.workspace + 1;
    refuse(make_call(&c, FORWARD, ctx), FORWARD, "loss", "workspace");
    copy_call(&c, t, config);
    c.layer.num_experts = c.router.num_experts = 3;
    refuse(make_call(&c, FORWARD, ctx), FORWARD, "rank_of_expert is NULL", "3");
    static const int32_t crowded[] = {1, 1, 0, 1};
    copy_call(&c, t, config);
    c.forward.rank_of_expert = crowded;
    refuse(make_call(&c, FORWARD, ctx), FORWARD, "num_local_experts is 2", "3");
    static const int32_t ids[TOKENS] = {0, 1, 2, 0};
    copy_call(&c, t, config);
    c.forward.token_ids = ids;
    refuse(make_call(&c, FORWARD, ctx), FORWARD, "token_ids is not NULL", "table is NULL");
    c.forward.topk_idx_in = c.forward.topk_idx_out;
    refuse(make_call(&c, FORWARD, ctx), FORWARD, "topk_idx_in is not NULL",
           "token_ids is not NULL");
    c.forward.token_ids = NULL;
    refuse(make_call(&c, FORWARD, ctx), FORWARD, "topk_idx_in", "topk_idx_out");
    c.forward.topk_idx_out = NULL;
    c.forward.table = c.forward.topk_idx_in;
    refuse(make_call(&c, FORWARD, ctx), FORWARD, "topk_idx_in is not NULL",
           "table is not NULL");
}

/* Passes a gate of the shared expert to a layer without one. */
static void try_shared_gate(part *t, epic_context *ctx, const epic_config *config)
{
    call c;
    copy_call(&c, t, config);
    c.moe.shared = NULL;
    c.weights.w_shared_gate = c.weights.w_gate;
    refuse(make_call(&c, FORWARD, ctx), FORWARD, "weights.w_shared_gate", "NULL");
}

static void try_backward(part *t, epic_context *ctx, const epic_config *config)
{
    call c;
    double room[16];
    epic_moe_gradients gradients = {.scale_of_expert = room};
    copy_call(&c, t, config);
    c.backward.gradients = &gradients;
    refuse(make_call(&c, BACKWARD, ctx), BACKWARD, "gradients.scale_of_expert", "is NULL");
    copy_call(&c, t, config);
    c.backward.d_x.data = (void *)(uintptr_t)c.backward.d_out.data;
    refuse(make_call(&c, BACKWARD, ctx), BACKWARD, "d_x.data", "d_out.data");
    c.backward.d_x.data = (void *)(uintptr_t)c.backward.x.data;
    refuse(make_call(&c, BACKWARD, ctx), BACKWARD, "d_x.data", "x.data");
    copy_call(&c, t, config);
    c.backward.x.num_rows = c.backward.d_out.num_rows = c.backward.d_x.num_rows = 2;
    refuse(make_call(&c, BACKWARD, ctx), BACKWARD, "x.num_rows is 2", "must be 4");
}

static bool untouched(const void *memory, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)memory)[i] != 0xff) return false;
    return true;
}

static void work(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    part *t = part_make(what, rank, config, 11);
    const size_t bytes = TOKENS * HIDDEN * sizeof(float);
    if (rank == 0) {
        try_table(t, MEMORY, ctx, config);
        try_table(t, FORWARD, ctx, config);
        try_others(t, ctx, config);
        try_shared_gate(t, ctx, config);
        CHECK(untouched(t->out, bytes), "a refused call has written rows");
    }
    CHECK(part_forward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    if (rank == 0) {
        try_table(t, BACKWARD, ctx, config);
        try_backward(t, ctx, config);
        CHECK(untouched(t->gradient[X], bytes), "a refused call has written gradients");
    }
    CHECK(part_backward(t, ctx) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(!untouched(t->out, 4) && !untouched(t->gradient[X], 4), "nothing was written");
    part_free(t);
}

/* Rank 0 aborts because its call is wrong. Rank 1, which already waits, returns at once with
 * the reason. */
static void abandon(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    part *t = part_make(what, rank, config, 11);
    if (rank == 0) {
        t->forward.x.row_bytes = 20;
        refuse(part_forward(t, ctx), FORWARD, "x.row_bytes", "20");
        epic_abort(ctx, t->forward.call.tag, epic_error(ctx));
    } else {
        const epic_result result = part_forward(t, ctx);
        CHECK(result == EPIC_EPEER && strstr(epic_error(ctx), "x.row_bytes is 20"), "%s: %s",
              epic_result_name(result), epic_error(ctx));
        CHECK(part_backward(t, ctx) == EPIC_EPEER, "%s", epic_error(ctx));
    }
    part_free(t);
}

int main(void)
{
    failures = share(sizeof *failures);
    source s = source_of(1);
    problem p = {.name = "arguments", .num_ranks = 2, .tokens_of = {TOKENS, TOKENS}};
    p.layer = (epic_layer){.num_experts = 4, .top_k = 2};
    p.router = (epic_router){.num_experts = 4, .top_k = 2};
    p.experts = (epic_experts){
        .row_type = EPIC_F32, .num_local_experts = 1, .hidden = HIDDEN, .inner = 5};
    p.shared = p.experts;
    p.has_shared = true;
    p.moe = (epic_moe){.balance_coeff = 1, .flags = EPIC_SUM_DENSE, .capacity = 16};
    make_given(&p, &s);
    make_results(&p);
    const epic_config config = config_of(&p);
    team_threads(work, &p, &config);
    team_threads(abandon, &p, &config);
    free_results(&p);
    free_given(&p);
    return atomic_load(failures) ? 1 : 0;
}
