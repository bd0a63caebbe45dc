/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's part of a layer, and teams of ranks that run it. A rank's buffers come from
 * malloc, have exactly the necessary size, and are filled with NaNs. */
#ifndef MOE_LAYER_H
#define MOE_LAYER_H

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "run.h"
#include "unit/moe_problem.h"

/* --------------------------------------------------------------------- one rank's part ---- */

typedef struct part {
    const problem *p;
    int rank;
    /* this rank's number of tokens, and the index of its first token among all tokens */
    int64_t tokens, first;
    epic_experts experts;
    epic_moe moe;
    epic_config config;
    epic_moe_memory_info memory;
    uint32_t mine[64], num_mine; /* ids of this rank's experts */
    void *given[NUM_GIVEN], *gradient[NUM_GIVEN], *d_out, *out, *token_ids;
    void *topk_idx_in, *topk_idx, *topk_weights;
    void *saved, *workspace;
    array d_losses;
    epic_moe_weights weights;
    epic_moe_gradients gradients;
    epic_moe_args forward;
    epic_moe_backward_args backward;
} part;

static inline void *poisoned(size_t bytes)
{
    void *memory = malloc(bytes);
    if (bytes) memset(memory, 0xff, bytes);
    return memory;
}

static inline void *poisoned_lines(int64_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (size_t)bytes)) abort();
    memset(memory, 0xff, (size_t)bytes);
    return memory;
}

static inline epic_config config_of(const problem *p)
{
    int64_t most = 1;
    const int64_t row = p->experts.hidden * convert_bytes(row_type(p));
    const int64_t weights = real_type(p) == EPIC_F64 ? p->layer.top_k * 8 : 0;
    for (int r = 0; r < p->num_ranks; r++)
        if (p->tokens_of[r] > most) most = p->tokens_of[r];
    return (epic_config){.max_tokens = most,
                         .max_row_bytes = row > weights ? row : weights,
                         .num_ranks = (uint32_t)p->num_ranks,
                         .timeout_ms = 60000,
                         .max_in_flight = 4};
}

/* Copies this rank's experts from an array with all experts, or back to it if `back` is set. */
static inline void move_experts(const part *t, array *whole, void *mine, int which, bool back)
{
    const size_t bytes = (size_t)(numbers_of(t->p, which) * convert_bytes(whole->type));
    for (uint32_t l = 0; l < t->num_mine; l++) {
        char *there = (char *)whole->data + t->mine[l] * bytes,
             *here = (char *)mine + l * bytes;
        if (back)
            memcpy(there, here, bytes);
        else
            memcpy(here, there, bytes);
    }
}

/* Returns how many elements of an array this rank has. */
static inline int64_t numbers_here(const part *t, int which)
{
    if (which == X) return t->tokens * t->p->experts.hidden;
    if (which == TOPK_WEIGHTS)
        return numbers_of(t->p, which) ? t->tokens * t->p->layer.top_k : 0;
    return numbers_of(t->p, which) * (is_per_expert(which) ? t->experts.num_local_experts : 1);
}

/* Copies this rank's tokens of an array with `row` bytes per token. */
static inline void *tokens_here(const part *t, const void *whole, size_t row)
{
    void *rows = malloc((size_t)t->tokens * row);
    if (t->tokens)
        memcpy(rows, (const char *)whole + (size_t)t->first * row, (size_t)t->tokens * row);
    return rows;
}

static inline void *rows_here(const part *t, const array *whole, int64_t columns)
{
    return tokens_here(t, whole->data, (size_t)(columns * convert_bytes(whole->type)));
}

static inline void *ids_here(const part *t)
{
    int64_t *wide = malloc((size_t)t->tokens * 8);
    int32_t *narrow = (int32_t *)(void *)wide;
    for (int64_t i = 0; i < t->tokens; i++)
        if (t->p->wide_ids)
            wide[i] = t->p->token_ids[t->first + i];
        else
            narrow[i] = t->p->token_ids[t->first + i];
    return wide;
}

static inline void make_buffers(part *t)
{
    const problem *p = t->p;
    for (int i = 0; i < NUM_GIVEN; i++) {
        const int64_t n = numbers_here(t, i);
        if (!numbers_of(p, i) && i != X) continue;
        t->gradient[i] = poisoned((size_t)(n * convert_bytes(gradient_type(p, i))));
        array now = {t->gradient[i], gradient_type(p, i), n};
        if (i < X && p->backward_flags & EPIC_ACCUMULATE)
            for (int64_t k = 0; k < n; k++) put(&now, k, BEFORE);
        if (i >= X) {
            t->given[i] =
                rows_here(t, &p->given[i], i == X ? p->experts.hidden : p->layer.top_k);
            continue;
        }
        t->given[i] = poisoned((size_t)(n * convert_bytes(p->given[i].type)));
        if (is_per_expert(i))
            move_experts(t, (array *)&p->given[i], t->given[i], i, false);
        else
            memcpy(t->given[i], p->given[i].data, array_bytes(&p->given[i]));
    }
    t->d_out = rows_here(t, &p->d_out, p->experts.hidden);
    t->out =
        poisoned((size_t)t->tokens * p->experts.hidden * (size_t)convert_bytes(row_type(p)));
    if (p->token_ids) t->token_ids = ids_here(t);
    const size_t choices = (size_t)t->tokens * p->layer.top_k;
    if (p->topk_idx_in) t->topk_idx_in = tokens_here(t, p->topk_idx_in, p->layer.top_k * 4);
    t->topk_idx = poisoned(choices * 4);
    t->topk_weights = poisoned(choices * (size_t)convert_bytes(real_type(p)));
}

static inline void make_calls(part *t, uint64_t tag)
{
    const problem *p = t->p;
    void **g = t->given, **d = t->gradient;
    const int64_t row = p->experts.hidden * convert_bytes(row_type(p));
    const bool none = t->tokens == 0; /* a rank without tokens passes {NULL, 0, 0} */
    const bool parts = p->d_parts_given;
    const array *d_losses = &t->d_losses;
    t->weights = (epic_moe_weights){g[W_GATE],
                                    g[B_GATE],
                                    p->bias_given ? p->bias : NULL,
                                    g[SCALE_OF_EXPERT],
                                    g[W_GATE_UP],
                                    g[W_DOWN],
                                    g[B_GATE_UP],
                                    g[B_DOWN],
                                    g[SHARED_GATE_UP],
                                    g[SHARED_DOWN],
                                    g[SHARED_B_GATE_UP],
                                    g[SHARED_B_DOWN],
                                    g[W_SHARED_GATE],
                                    NULL,
                                    NULL};
    t->gradients = (epic_moe_gradients){
        d[W_GATE],      d[B_GATE],           d[SCALE_OF_EXPERT], d[W_GATE_UP],
        d[W_DOWN],      d[B_GATE_UP],        d[B_DOWN],          d[SHARED_GATE_UP],
        d[SHARED_DOWN], d[SHARED_B_GATE_UP], d[SHARED_B_DOWN],   d[W_SHARED_GATE]};
    t->forward = (epic_moe_args){
        .call.tag = tag,
        .moe = &t->moe,
        .weights = &t->weights,
        .x = {none ? NULL : g[X], t->tokens, none ? 0 : row},
        .out = {none ? NULL : t->out, t->tokens, none ? 0 : row},
        .token_ids = t->token_ids,
        .table = p->table,
        .table_rows = p->table_rows,
        .rank_of_expert = p->placed ? p->rank_of_expert : NULL,
        .logical_of_expert = p->layer.num_logical ? p->logical_of : NULL,
        .saved = t->saved,
        .saved_bytes = t->memory.saved_bytes,
        .workspace = t->workspace,
        .workspace_bytes = t->memory.forward_bytes,
        .loss = number_at(&p->loss, t->rank),
        .balance_loss = number_at(&p->loss, p->num_ranks + t->rank),
        .z_loss = number_at(&p->loss, 2 * p->num_ranks + t->rank),
        .loss_type = loss_type(p),
        .load = p->load + t->rank * (int64_t)p->layer.num_experts,
        .logical_load = p->logical_load + t->rank * (int64_t)p->layer.num_logical,
        .demand = &p->demand[t->rank],
        .token_id_type = p->wide_ids ? EPIC_I64 : EPIC_I32,
        .topk_idx_in = t->topk_idx_in,
        .topk_weights_in = g[TOPK_WEIGHTS],
        .topk_idx_out = t->topk_idx,
        .topk_weights_out = t->topk_weights,
        .capacity_limit = p->is_limited ? &p->limit_of[t->rank] : NULL};
    t->backward =
        (epic_moe_backward_args){.call.tag = tag,
                                 .moe = &t->moe,
                                 .weights = &t->weights,
                                 .x = t->forward.x,
                                 .d_out = {t->d_out, t->tokens, row},
                                 .d_x = {d[X], t->tokens, row},
                                 .d_balance_loss = parts ? number_at(d_losses, 1) : NULL,
                                 .d_z_loss = parts ? number_at(d_losses, 2) : NULL,
                                 .loss_type = loss_type(p),
                                 .gradients = &t->gradients,
                                 .saved = t->saved,
                                 .saved_bytes = t->memory.saved_bytes,
                                 .workspace = t->workspace,
                                 .workspace_bytes = t->memory.backward_bytes,
                                 .d_loss = p->d_loss_given ? number_at(d_losses, 0) : NULL,
                                 .flags = p->backward_flags,
                                 .grad_type = p->narrow_gradients ? row_type(p) : 0,
                                 .d_topk_weights_in = d[TOPK_WEIGHTS]};
    if (p->has_forced_weights) t->backward.flags |= EPIC_FORCED_WEIGHTS;
    if (none) t->backward.d_out = (epic_const_rows){0};
    if (none) t->backward.d_x = (epic_rows){0};
    if (p->wants_no_gradient) t->backward.gradients = NULL;
    if (p->wants_no_d_x) t->backward.d_x = (epic_rows){0};
}

/* Allocates everything that one rank needs. config: configuration of the context, for the size
 * query. */
static inline part *part_make(const problem *p, int rank, const epic_config *config,
                              uint64_t tag)
{
    part *t = calloc(1, sizeof *t);
    *t = (part){.p = p,
                .rank = rank,
                .tokens = p->tokens_of[rank],
                .experts = p->experts,
                .moe = p->moe,
                .config = *config};
    for (int r = 0; r < rank; r++) t->first += p->tokens_of[r];
    for (uint32_t e = 0; e < p->layer.num_experts; e++)
        if (owner_of(p, e) == rank) t->mine[t->num_mine++] = e;
    t->experts.num_local_experts = most_local(p);
    t->moe.layer = &p->layer;
    t->moe.router = &p->router;
    t->moe.experts = &t->experts;
    t->moe.shared = p->has_shared ? &p->shared : NULL;
    CHECK(epic_moe_memory(NULL, config, &t->moe, &t->memory) == EPIC_OK, "%s: %s", p->name,
          epic_error(NULL));
    make_buffers(t);
    t->d_losses = make_array(loss_type(p), 3);
    put(&t->d_losses, 0, p->d_loss);
    put(&t->d_losses, 1, p->d_balance_loss);
    put(&t->d_losses, 2, p->d_z_loss);
    t->saved = poisoned_lines(t->memory.saved_bytes);
    t->workspace = poisoned_lines(t->memory.forward_bytes > t->memory.backward_bytes
                                      ? t->memory.forward_bytes
                                      : t->memory.backward_bytes);
    make_calls(t, tag);
    return t;
}

/* Checks that each flag that makes a layer save less reduces saved_bytes by exactly the
 * parts that it leaves out. backend: where the layer runs. */
static inline void check_saved_on(const problem *p, const epic_config *config,
                                  const char *backend, uint32_t saved_type)
{
    epic_experts experts = p->experts;
    epic_moe moe = p->moe;
    epic_moe_memory_info all, less[3];
    epic_config where = *config;
    where.backend = backend;
    experts.num_local_experts = most_local(p);
    moe.layer = &p->layer;
    moe.router = &p->router;
    moe.experts = &experts;
    moe.shared = p->has_shared ? &p->shared : NULL;
    CHECK(epic_moe_memory(NULL, &where, &moe, &all) == EPIC_OK, "%s", epic_error(NULL));
    for (uint32_t i = 0; i < 3; i++) {
        moe.flags = p->moe.flags | (i + 1) * EPIC_RECOMPUTE;
        CHECK(epic_moe_memory(NULL, &where, &moe, &less[i]) == EPIC_OK, "%s", epic_error(NULL));
    }
    const int64_t row = p->experts.hidden * convert_bytes(row_type(p));
    const int64_t width = width_of(&p->experts), slots = moe.capacity;
    const int64_t rows = (slots * row + 63) / 64 * 64;
    const int64_t computed = slots * width * convert_bytes(saved_type);
    CHECK(all.saved_bytes - less[1].saved_bytes == rows, "%s: rows", p->name);
    CHECK(all.saved_bytes - less[0].saved_bytes >= computed, "%s: gate and up", p->name);
    CHECK(less[2].saved_bytes == less[0].saved_bytes + less[1].saved_bytes - all.saved_bytes,
          "%s: both", p->name);
}

static inline void check_saved_bytes(const problem *p, const epic_config *config)
{
    check_saved_on(p, config, "self", real_type(p));
    if (real_type(p) != EPIC_F64) check_saved_on(p, config, "p2p", row_type(p));
}

/* Replaces the workspace by another one full of NaNs, because calls must not keep anything
 * there. */
static inline void part_forget(part *t, int64_t bytes)
{
    free(t->workspace);
    t->workspace = poisoned_lines(bytes);
    t->forward.workspace = t->backward.workspace = t->workspace;
}

/* Allocates saved memory and workspace for the current moe.capacity, keeping the first
 * `kept` bytes. */
static inline void part_resize(part *t, int64_t kept)
{
    CHECK(epic_moe_memory(NULL, &t->config, &t->moe, &t->memory) == EPIC_OK, "%s",
          epic_error(NULL));
    void *saved = poisoned_lines(t->memory.saved_bytes);
    memcpy(saved, t->saved, (size_t)kept);
    free(t->saved);
    t->saved = saved;
    t->forward.saved = saved;
    t->backward.saved = saved;
    t->forward.saved_bytes = t->backward.saved_bytes = t->memory.saved_bytes;
    t->forward.workspace_bytes = t->memory.forward_bytes;
    t->backward.workspace_bytes = t->memory.backward_bytes;
    part_forget(t, t->memory.forward_bytes);
}

static inline epic_result part_plan(part *t, epic_context *ctx)
{
    int64_t slots = -1;
    t->moe.capacity = EPIC_CAPACITY_EXACT;
    t->forward.flags = 0;
    part_resize(t, 0);
    const epic_result result = epic_moe_plan(ctx, &t->forward, &slots);
    if (result != EPIC_OK) return result;
    const int64_t demand = *t->forward.demand;
    CHECK(t->p->layer.overflow == EPIC_OVERFLOW_DROP ? slots <= demand : slots == demand,
          "%s: %lld slots for a demand of %lld", t->p->name, (long long)slots,
          (long long)demand);
    t->moe.capacity = slots;
    t->forward.flags = EPIC_PLANNED;
    part_resize(t, t->memory.saved_bytes);
    return EPIC_OK;
}

static inline epic_result part_forward(part *t, epic_context *ctx)
{
    if (t->p->planned) {
        const epic_result result = part_plan(t, ctx);
        if (result != EPIC_OK) return result;
    }
    part_forget(t, t->memory.forward_bytes);
    return epic_moe_forward(ctx, &t->forward);
}

static inline epic_result part_backward(part *t, epic_context *ctx)
{
    part_forget(t, t->memory.backward_bytes);
    return epic_moe_backward(ctx, &t->backward);
}

/* Replaces the gradient of every replica by the sum over the replicas of its logical expert. */
static inline epic_result part_sum_replicas(part *t, epic_context *ctx)
{
    for (int i = W_GATE_UP; i <= B_DOWN; i++) {
        const int64_t bytes = numbers_of(t->p, i) * (int64_t)sizeof(float);
        if (!bytes) continue;
        float *workspace = poisoned((size_t)bytes);
        const epic_sum_replicas_args args = {
            .plan = t->saved,
            .plan_bytes = t->memory.saved_bytes,
            .data = {t->gradient[i], t->experts.num_local_experts, bytes},
            .workspace = workspace};
        const epic_result result = epic_sum_replicas(ctx, &args);
        free(workspace);
        if (result != EPIC_OK) return result;
    }
    return EPIC_OK;
}

/* Copies the ids and weights of the rank's choices, and the gradients of forced weights. */
static inline void part_print_choices(const part *t)
{
    const problem *p = t->p;
    const size_t first = (size_t)t->first * p->layer.top_k;
    const size_t choices = (size_t)t->tokens * p->layer.top_k;
    const size_t real = (size_t)convert_bytes(real_type(p));
    if (!choices) return;
    memcpy(p->topk_idx + first, t->topk_idx, choices * 4);
    memcpy((char *)p->topk_weights.data + first * real, t->topk_weights, choices * real);
    if (p->has_forced_weights)
        memcpy((char *)p->gradient[TOPK_WEIGHTS].data + first * real, t->gradient[TOPK_WEIGHTS],
               choices * real);
}

/* Copies the rank's results into the results of all ranks. */
static inline void part_print_failure(const part *t)
{
    const problem *p = t->p;
    const size_t row = (size_t)(p->experts.hidden * convert_bytes(row_type(p)));
    if (t->tokens) {
        memcpy((char *)p->out.data + (size_t)t->first * row, t->out, (size_t)t->tokens * row);
        memcpy((char *)p->gradient[X].data + (size_t)t->first * row, t->gradient[X],
               (size_t)t->tokens * row);
    }
    part_print_choices(t);
    for (int i = 0; i < X; i++) {
        const size_t bytes = (size_t)(numbers_of(p, i) * convert_bytes(real_type(p)));
        if (!bytes) continue;
        if (is_per_expert(i))
            move_experts(t, (array *)&p->gradient[i], t->gradient[i], i, true);
        else
            memcpy((char *)p->gradient[i].data + (size_t)t->rank * bytes, t->gradient[i],
                   bytes);
    }
}

static inline void part_free(part *t)
{
    for (int i = 0; i < NUM_GIVEN; i++) {
        free(t->given[i]);
        free(t->gradient[i]);
    }
    free_array(&t->d_losses);
    free(t->d_out);
    free(t->out);
    free(t->token_ids);
    free(t->topk_idx_in);
    free(t->topk_idx);
    free(t->topk_weights);
    free(t->saved);
    free(t->workspace);
    free(t);
}

/* ------------------------------------------------------------------------------- teams ---- */

typedef void rank_work(void *what, int rank, epic_context *ctx, const epic_config *config);

typedef struct seat {
    rank_work *work;
    void *what;
    epic_bootstrap bootstrap;
    epic_config config;
} seat;

static inline void *sit(void *self)
{
    seat *s = self;
    epic_context *ctx = NULL;
    const epic_result result = epic_open(&ctx, &s->bootstrap, &s->config);
    CHECK(result == EPIC_OK, "open: %s", epic_error(ctx));
    if (result == EPIC_OK) s->work(s->what, s->bootstrap.rank, ctx, &s->config);
    epic_close(ctx);
    return NULL;
}

static inline void team_threads(rank_work *work, void *what, const epic_config *config)
{
    const int n = (int)config->num_ranks;
    epic_bootstrap bootstraps[MOST_RANKS];
    seat seats[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    if (epic_bootstrap_threads(bootstraps, n, 0) != EPIC_OK) abort();
    for (int r = 0; r < n; r++) {
        seats[r] = (seat){work, what, bootstraps[r], *config};
        pthread_create(&threads[r], NULL, sit, &seats[r]);
    }
    for (int r = 0; r < n; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < n; r++) epic_bootstrap_close(&bootstraps[r]);
}

/* Runs ranks as processes on backend shm. They write to shared memory only. */
static inline void team_processes(rank_work *work, void *what, const epic_config *config)
{
    const uint32_t port = run_free_port();
    fflush(stdout);
    for (int r = 0; r < (int)config->num_ranks; r++) {
        if (run_fork()) continue;
        seat s = {work, what, {0}, *config};
        const epic_tcp tcp = {.rank = r,
                              .num_ranks = (int32_t)config->num_ranks,
                              .port = port,
                              .timeout_ms = 60000};
        s.config.backend = "shm";
        CHECK(epic_bootstrap_tcp(&s.bootstrap, &tcp) == EPIC_OK, "%s", epic_error(NULL));
        if (s.bootstrap.gather) sit(&s);
        epic_bootstrap_close(&s.bootstrap);
        fflush(stdout);
        _exit(0);
    }
    for (int r = 0, status; r < (int)config->num_ranks; r++)
        CHECK(wait(&status) > 0 && status == 0, "a rank's process ended with %d", status);
}

#endif
