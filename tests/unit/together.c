/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_plan_dispatch. If all ranks call it with equal options, it needs one exchange,
 * otherwise it works like its two calls. The other ranks make these two calls, pass other row
 * sizes, or pass an invalid id. A rank that makes its peers wait for rows is named. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "context/context.h"
#include "epic/epic.h"
#include "exchange/exchange.h"
#include "run.h"

#define RANKS 3
#define TOP_K 2
#define EXPERTS 6
/* largest number of tokens; their ids do not fit into an op header, those of FEW tokens do */
#define MOST 40
#define FEW 4
#define HIDDEN 16
#define SLOTS (RANKS * MOST * TOP_K)

/* ------------------------------------------------------------ a transport that watches ---- */

static _Thread_local int own_rank, bootstraps, flows;
static const epic_transport *real;
static atomic_int stuck, given_up; /* the rank that never sends its rows, or -1 */
static atomic_bool late_flow;      /* the late rank has started to send */

static void announce(epic_group *group, int op_slot, uint64_t tag, uint64_t sequence,
                     const epic_op_header *header)
{
    bootstraps++;
    real->announce(group, op_slot, tag, sequence, header);
}

static void shape(epic_group *group, int op_slot, const epic_flow *flow)
{
    flows++;
    if (own_rank == atomic_load(&stuck)) {
        atomic_store(&late_flow, true);
        while (atomic_load(&given_up) < RANKS - 1) run_nap_us(1000);
    }
    real->shape(group, op_slot, flow);
}

/* Reads the status of peers under the sequence number of the shared exchange. */
static void look(epic_group *group, int peer, uint64_t tag, uint64_t sequence,
                 epic_peer_status *out)
{
    if (atomic_load(&stuck) >= 0) CHECK_EQ(sequence, 0);
    real->look(group, peer, tag, sequence, out);
}

/* ---------------------------------------------------------------------------- a rank ---- */

typedef struct seat {
    epic_context *ctx;
    epic_transport watched;
    int rank, num_tokens;
    epic_layer layer;
    void *plan;
    int64_t plan_bytes;
    int32_t ids[MOST * TOP_K];
    float x[MOST][HIDDEN], weights[MOST * TOP_K], out[MOST][HIDDEN];
    float recv[SLOTS][HIDDEN], slot_weights[SLOTS];
} seat;

static seat *open_seat(const epic_bootstrap *bootstrap, int num_tokens, uint32_t timeout_ms)
{
    seat *s = calloc(1, sizeof *s);
    const epic_config config = {.max_tokens = MOST,
                                .max_row_bytes = HIDDEN * sizeof(float),
                                .num_ranks = RANKS,
                                .timeout_ms = timeout_ms};
    s->layer = (epic_layer){.num_experts = EXPERTS, .top_k = TOP_K};
    s->rank = own_rank = bootstrap->rank;
    s->num_tokens = num_tokens;
    CHECK_EQ(epic_open(&s->ctx, bootstrap, &config), EPIC_OK);
    CHECK(epic_plan_bytes(&config, &s->layer, &s->plan_bytes) == EPIC_OK);
    s->plan = aligned_alloc(64, (size_t)(s->plan_bytes + 63) / 64 * 64);
    s->watched = *s->ctx->backend->transport;
    s->watched.announce = announce;
    s->watched.shape = shape;
    s->watched.look = look;
    for (uint32_t i = 0; i < s->ctx->config.max_in_flight; i++)
        s->ctx->exchanges[i].transport = &s->watched;
    for (int i = 0; i < num_tokens * TOP_K; i++) {
        s->ids[i] = (7 * i + s->rank) % EXPERTS;
        s->weights[i] = 0.5f;
    }
    for (int t = 0; t < num_tokens; t++)
        for (int h = 0; h < HIDDEN; h++) s->x[t][h] = (float)(100 * s->rank + t + h);
    bootstraps = flows = 0;
    return s;
}

static void close_seat(seat *s)
{
    epic_close(s->ctx);
    free(s->plan);
    free(s);
}

static epic_plan_args plan_args(seat *s)
{
    return (epic_plan_args){.layer = &s->layer,
                            .plan = s->plan,
                            .plan_bytes = s->plan_bytes,
                            .topk_idx = s->ids,
                            .num_tokens = s->num_tokens,
                            .capacity = SLOTS};
}

static epic_dispatch_args dispatch_args(seat *s)
{
    return (epic_dispatch_args){.layer = &s->layer,
                                .plan = s->plan,
                                .plan_bytes = s->plan_bytes,
                                .tokens = {s->x, s->num_tokens, sizeof s->x[0]},
                                .recv = {s->recv, SLOTS, sizeof s->recv[0]},
                                .weights = s->weights,
                                .slot_weights = s->slot_weights};
}

static epic_result plan_dispatch(seat *s)
{
    const epic_plan_args plan = plan_args(s);
    const epic_dispatch_args dispatch = dispatch_args(s);
    return epic_plan_dispatch(s->ctx, &plan, &dispatch);
}

/* The experts return their rows unchanged and the weights add up to one, so every token must
 * get its own row. */
static void check_home(seat *s)
{
    const epic_combine_args combine = {.layer = &s->layer,
                                       .plan = s->plan,
                                       .plan_bytes = s->plan_bytes,
                                       .rows = {s->recv, SLOTS, sizeof s->recv[0]},
                                       .out = {s->out, s->num_tokens, sizeof s->out[0]},
                                       .slot_weights = s->slot_weights,
                                       .type = EPIC_F32};
    CHECK_EQ(epic_combine(s->ctx, &combine), EPIC_OK);
    CHECK(memcmp(s->x, s->out, (size_t)s->num_tokens * sizeof s->x[0]) == 0);
}

/* --------------------------------------------------------------------------- the cases ---- */

static void alike(const epic_bootstrap *bootstrap, void *self)
{
    seat *s = open_seat(bootstrap, *(int *)self, 20000);
    CHECK_EQ(plan_dispatch(s), EPIC_OK);
    CHECK_EQ(bootstraps, 1);
    CHECK_EQ(flows, s->num_tokens * TOP_K > 64 ? 2 : 1);
    CHECK_EQ(s->ctx->exchanges[0].sequence,
             1); /* the dispatch has a sequence number of its own */
    check_home(s);
    CHECK_EQ(plan_dispatch(s), EPIC_OK);
    check_home(s);
    close_seat(s);
}

static void run_with_two_calls(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    seat *s = open_seat(bootstrap, MOST, 20000);
    const epic_plan_args plan = plan_args(s);
    const epic_dispatch_args dispatch = dispatch_args(s);
    if (s->rank == 1) {
        CHECK_EQ(epic_plan(s->ctx, &plan), EPIC_OK);
        CHECK_EQ(epic_dispatch(s->ctx, &dispatch), EPIC_OK);
    } else {
        CHECK_EQ(epic_plan_dispatch(s->ctx, &plan, &dispatch), EPIC_OK);
    }
    CHECK_EQ(bootstraps, 2);
    check_home(s);
    close_seat(s);
}

static void other_rows(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    seat *s = open_seat(bootstrap, FEW, 20000);
    const epic_plan_args plan = plan_args(s);
    epic_dispatch_args dispatch = dispatch_args(s);
    if (s->rank == 2) dispatch.tokens.row_bytes = dispatch.recv.row_bytes = 32;
    CHECK_EQ(epic_plan_dispatch(s->ctx, &plan, &dispatch), EPIC_EMISMATCH);
    epic_failure_info failure;
    CHECK_EQ(epic_failure(s->ctx, &failure), EPIC_OK);
    CHECK_EQ(failure.operation, EPIC_OP_DISPATCH);
    CHECK_EQ(failure.sequence, 1);
    CHECK_SAY(strstr(failure.sentence, "row_bytes") != NULL, "%s", failure.sentence);
    close_seat(s);
}

static void wrong_id(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    seat *s = open_seat(bootstrap, FEW, 20000);
    const int32_t right = s->ids[0];
    if (s->rank == 1) s->ids[0] = EXPERTS;
    CHECK_EQ(plan_dispatch(s), EPIC_EINVAL);
    s->ids[0] = right;
    CHECK_EQ(plan_dispatch(s), EPIC_OK);
    check_home(s);
    close_seat(s);
}

static void stays_away(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    seat *s = open_seat(bootstrap, FEW, 500);
    /* all rows of rank 1 have arrived, but too late */
    const epic_result result = plan_dispatch(s);
    if (s->rank != 1) CHECK_EQ(result, EPIC_ETIMEOUT);
    atomic_fetch_add(&given_up, s->rank != 1);
    epic_failure_info failure;
    CHECK_EQ(epic_failure(s->ctx, &failure), EPIC_OK);
    CHECK_EQ(failure.operation, EPIC_OP_DISPATCH);
    CHECK_EQ(failure.sequence, 1);
    CHECK(failure.num_culprits == 1 && failure.culprits[0] == 1);
    CHECK_SAY(strstr(failure.sentence, "rank 1 was last seen in plan (tag 0, sequence 0)") !=
                  NULL,
              "%s", failure.sentence);
    close_seat(s);
}

static const epic_transport *find_transport(void)
{
    for (const epic_backend *const *b = epic_backends; *b; b++)
        if (!strcmp((*b)->name, "threads")) return (*b)->transport;
    return NULL;
}

int main(void)
{
    int few = FEW, most = MOST;
    check_begin();
    run_alarm(100);
    real = find_transport();
    atomic_store(&stuck, -1);
    run_threads(RANKS, alike, &few);
    run_threads(RANKS, alike, &most);
    run_threads(RANKS, run_with_two_calls, NULL);
    run_threads(RANKS, other_rows, NULL);
    run_threads(RANKS, wrong_id, NULL);
    atomic_store(&stuck, 1);
    run_threads(RANKS, stays_away, NULL);
    CHECK(atomic_load(&late_flow));
    return check_end();
}
