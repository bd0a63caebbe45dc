/* SPDX-License-Identifier: Apache-2.0 */
/* Tests ranks that request GPU memory for the net and cannot get it, and ranks that request
 * different kinds of memory. Every rank gets the same error at once, which names the variable
 * and the rank. Without the variable the same ranks can open a group. Also tests rows that are too
 * long. The net is chaos. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "emulator.h"
#include "run.h"

enum { RANKS = 2, PATIENCE_MS = 600000 }; /* the deadline, which no rank may reach */

typedef struct wish {
    const char *memory[RANKS]; /* value of the variable on each rank; ranks are processes */
    int full;                  /* the rank whose GPU has only space for a heap; -1: none */
    epic_result result;
    const char *said[2];
} wish;

static epic_config config_of(void)
{
    return (epic_config){.max_tokens = 96,
                         .max_row_bytes = 5000,
                         .num_ranks = RANKS,
                         .timeout_ms = PATIENCE_MS,
                         .backend = "hosts"};
}

static void leave_room_for_a_heap(void)
{
    const epic_config config = config_of();
    epic_memory_info sizes;
    setenv("EPIC_NET_MEMORY", "host", 1);
    CHECK(epic_memory(&config, NULL, &sizes) == EPIC_OK);
    emulator_limit(0, (uint64_t)sizes.device_bytes + 65536);
}

static void expect_refusal(const epic_bootstrap *bootstrap, epic_result result,
                           const char *const said[2])
{
    epic_context *ctx;
    const epic_config config = config_of();
    const epic_result got = epic_open(&ctx, bootstrap, &config);
    const char *error = epic_error(ctx);
    CHECK_SAY(got == result && strstr(error, said[0]) && strstr(error, said[1]),
              "rank %d: %s: %s", bootstrap->rank, epic_result_name(got), error);
    epic_close(ctx);
}

static void open_with_wish(const epic_bootstrap *bootstrap, void *self)
{
    const wish *w = self;
    if (w->full == bootstrap->rank) leave_room_for_a_heap();
    setenv("EPIC_NET_MEMORY", w->memory[bootstrap->rank], 1);
    expect_refusal(bootstrap, w->result, w->said);
    CHECK(emulator_bytes(true) == 0 && emulator_bytes(false) == 0);
}

static void ask_out_of_reach(const epic_bootstrap *bootstrap, void *self)
{
    static const char *const said[2] = {"rank 1: EPIC_NET_MEMORY=gpu: chaos: host 1 reaches no",
                                        "without it rows go by way of host memory"};
    (void)self;
    expect_refusal(bootstrap, EPIC_ENOTSUP, said);
}

/* One entry of the proxy ring must describe a row, so rows of 1 MiB are refused. */
static void open_with_long_rows(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx;
    epic_config config = config_of();
    (void)self;
    config.max_row_bytes = 1 << 20;
    epic_memory_info memory;
    char text[512];
    CHECK(epic_memory(&config, NULL, &memory) == EPIC_ENOTSUP);
    snprintf(text, sizeof text, "%s", epic_error(NULL));
    CHECK_SAY(
        strstr(text, "config.max_row_bytes is 1048576: must be at most 1048560 in groups"),
        "%s", text);
    CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_ENOTSUP);
    CHECK_SAY(strstr(epic_error(ctx), text), "rank %d: %s", bootstrap->rank, epic_error(ctx));
    epic_close(ctx);
    CHECK(emulator_bytes(true) == 0 && emulator_bytes(false) == 0);
}

int main(void)
{
    wish wishes[] = {
        {{"gpu", "host"},
         -1,
         EPIC_EMISMATCH,
         {"rank 1: EPIC_NET_MEMORY=host, and =gpu on rank 0", "on every rank, or unset it"}},
        {{"host", "gpu"}, -1, EPIC_EMISMATCH, {"rank 0: EPIC_NET_MEMORY=host", "rank 1"}},
        {{"", "gpu"},
         0,
         EPIC_ENOTSUP,
         {"rank 0: memory of the device", "; EPIC_NET_MEMORY=gpu on rank 1: without it"}},
        {{"", "gpu"},
         1,
         EPIC_ENOMEM,
         {"rank 1: EPIC_NET_MEMORY=gpu: memory of the device", "without it rows go"}},
    };
    check_begin();
    for (size_t i = 0; i < sizeof wishes / sizeof *wishes; i++)
        run_processes(RANKS, open_with_wish, &wishes[i], 150);
    /* The net chaos does not connect processes, so it cannot be used here. */
    setenv("EPIC_NET_MEMORY", "gpu", 1);
    setenv("EPIC_CHAOS_OUT_OF_REACH", "1", 1);
    run_threads(RANKS, ask_out_of_reach, NULL);
    run_threads(RANKS, open_with_long_rows, NULL);
    return check_end();
}
