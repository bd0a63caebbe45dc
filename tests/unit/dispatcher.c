/* SPDX-License-Identifier: Apache-2.0 */
/* Tests how an epic_dispatcher opens and what it refuses. The conformance suite tests its
 * values on every backend. */
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"

enum { TOKENS = 7, EXPERTS = 12, HIDDEN = 9, RANKS = 3 };

static const epic_dispatcher_config good = {.max_tokens = TOKENS,
                                            .num_experts = EXPERTS,
                                            .top_k = 1,
                                            .hidden = HIDDEN,
                                            .type = EPIC_F32,
                                            .gradients = 1};

static void refuse(epic_dispatcher_config config, epic_context *ctx, const char *word)
{
    epic_dispatcher *dispatcher = (epic_dispatcher *)&config;
    config.ctx = ctx;
    CHECK(epic_dispatcher_open(&dispatcher, &config) == EPIC_EINVAL && dispatcher == NULL);
    CHECK(strstr(epic_error(NULL), word) != NULL);
}

static void check_refusals(epic_context *ctx)
{
    epic_dispatcher_config bad = good;
    bad.type = EPIC_I32;
    refuse(bad, ctx, "config.type is 7");
    bad = good;
    bad.hidden = 0;
    refuse(bad, ctx, "config.hidden is 0");
    bad = good;
    bad.num_experts = EXPERTS + 1;
    refuse(bad, ctx, "config.num_experts is 13");
    bad = good;
    bad.gradients = 2;
    refuse(bad, ctx, "config.gradients is 2");
    CHECK(epic_dispatcher_open(NULL, &good) == EPIC_EINVAL);
    CHECK(epic_dispatcher_dispatch(NULL, NULL, NULL, NULL, 0, NULL) == EPIC_EINVAL);
    epic_dispatcher_close(NULL);
}

static void refuse_backward(epic_dispatcher *dispatcher, const char *first)
{
    float d_tokens[TOKENS][HIDDEN];
    CHECK(epic_dispatcher_dispatch_backward(dispatcher, d_tokens, NULL) == EPIC_EINVAL);
    CHECK_SAY(strstr(epic_error(NULL), first) != NULL, "%s", epic_error(NULL));
}

/* Sends every token to expert 5, which returns its rows and gradients unchanged. Old contents
 * of the slots must not appear as gradients. */
static void check_round(epic_dispatcher *dispatcher)
{
    float tokens[TOKENS][HIDDEN], out[TOKENS][HIDDEN];
    int32_t chosen[TOKENS];
    epic_slots slots;
    for (int t = 0; t < TOKENS; t++) {
        chosen[t] = 5;
        for (int h = 0; h < HIDDEN; h++) tokens[t][h] = (float)(t * 10 + h);
    }
    CHECK(epic_dispatcher_dispatch(dispatcher, tokens, chosen, NULL, TOKENS, &slots) ==
          EPIC_OK);
    CHECK(slots.weights == NULL);
    refuse_backward(dispatcher, "call epic_dispatcher_combine_backward first");
    memcpy(slots.results, slots.rows, (size_t)slots.capacity * sizeof *tokens);
    CHECK(epic_dispatcher_combine(dispatcher, out) == EPIC_OK);
    CHECK(!memcmp(tokens, out, sizeof out));
    refuse_backward(dispatcher, "call epic_dispatcher_combine_backward first");
    CHECK(epic_dispatcher_combine_backward(dispatcher, tokens, &slots) == EPIC_OK &&
          slots.weights != NULL);
    memset(out, 0, sizeof out);
    CHECK(epic_dispatcher_dispatch_backward(dispatcher, out, NULL) == EPIC_OK);
    CHECK(!memcmp(tokens, out, sizeof out));
}

static void work(epic_context *ctx)
{
    epic_dispatcher *dispatcher;
    epic_dispatcher_config config = good;
    config.ctx = ctx;
    if (!CHECK(epic_dispatcher_open(&dispatcher, &config) == EPIC_OK)) return;
    CHECK(epic_dispatcher_context(dispatcher) == ctx);
    if (epic_rank(ctx) == 0) check_refusals(ctx);
    /* no dispatch has been made */
    CHECK(epic_dispatcher_combine(dispatcher, NULL) == EPIC_EINVAL);
    CHECK(strstr(epic_error(NULL), "call epic_dispatcher_dispatch first") != NULL);
    refuse_backward(dispatcher, "call epic_dispatcher_dispatch first");
    check_round(dispatcher);
    check_round(dispatcher);
    epic_dispatcher_close(dispatcher);
}

static void seat(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx;
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = HIDDEN * sizeof(float)};
    (void)self;
    if (CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) work(ctx);
    epic_close(ctx);
}

/* Tests the default without a context: the environment describes the ranks, and an empty
 * environment is a group of one rank. */
static void check_alone(void)
{
    epic_dispatcher *dispatcher;
    if (!CHECK(epic_dispatcher_open(&dispatcher, &good) == EPIC_OK)) return;
    CHECK(epic_num_ranks(epic_dispatcher_context(dispatcher)) == 1);
    check_round(dispatcher);
    epic_dispatcher_close(dispatcher);
}

int main(void)
{
    check_begin();
    run_alarm(50);
    check_alone();
    run_threads(RANKS, seat, NULL);
    run_processes(2, seat, NULL, 40);
    return check_end();
}
