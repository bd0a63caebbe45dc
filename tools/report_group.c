/* SPDX-License-Identifier: Apache-2.0 */
/* Sends bytes between the ranks by epic_dispatch, in a group of a host backend. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "info.h"
#include "report.h"

#define ROW_BYTES 4096
#define TIMEOUT_MS 4000

typedef struct group_way {
    epic_context *ctx;
    epic_layer layer; /* one expert per rank */
    epic_layer_info sizes;
    int64_t num_rows; /* number of rows in `rows` and `received` */
    int32_t *chosen;  /* [num_rows]: the expert of each row */
    unsigned char *rows, *received;
    void *plan;
} group_way;

static void group_close(void *way)
{
    group_way *g = way;
    epic_close(g->ctx);
    free(g->plan);
    free(g->received);
    free(g->rows);
    free(g->chosen);
    free(g);
}

/* Unsets variables that do not fit a group of a host backend. Loads the plugin of the backend
 * mpi, so that epic_open() finds it although it is not in the folder of this program. */
static void prepare_process(void)
{
    char path[INFO_PATH];
    const char *backend = getenv("EPIC_BACKEND");
    if (backend &&
        (!strcmp(backend, "gpu") || !strcmp(backend, "p2p") || !strcmp(backend, "hosts")))
        unsetenv("EPIC_BACKEND");
    unsetenv("EPIC_TRACE");
    (void)info_open_plugin(path, "libepic_mpi.so");
}

static bool group_allocate(group_way *g)
{
    const size_t bytes = (size_t)g->num_rows * ROW_BYTES;
    g->chosen = calloc((size_t)g->num_rows, sizeof *g->chosen);
    g->rows = malloc(bytes);
    g->received = malloc(bytes);
    g->plan = aligned_alloc(64, ((size_t)g->sizes.plan_bytes + 63) / 64 * 64);
    if (!g->chosen || !g->rows || !g->received || !g->plan) return false;
    memset(g->rows, 1, bytes);
    memset(g->received, 0, bytes);
    return true;
}

/* Opens the group, and allocates the arrays of its calls. If one rank is out of memory, its
 * peers get an error from their first call. */
static bool group_open(void **out, const epic_bootstrap *bootstrap, int local_rank,
                       size_t bytes, char *why)
{
    (void)local_rank;
    group_way *g = *out = calloc(1, sizeof *g);
    const int64_t num_rows = (int64_t)(bytes / ROW_BYTES);
    const epic_config config = {.max_tokens = num_rows,
                                .max_row_bytes = ROW_BYTES,
                                .staging_bytes = 64 << 20,
                                .max_in_flight = 1,
                                .timeout_ms = TIMEOUT_MS,
                                .name = "epic-info-report"};
    if (!g) return false;
    prepare_process();
    g->num_rows = num_rows;
    g->layer = (epic_layer){.num_experts = (uint32_t)bootstrap->num_ranks, .top_k = 1};
    if (epic_open(&g->ctx, bootstrap, &config) == EPIC_OK &&
        epic_layer_sizes(g->ctx, &g->layer, &g->sizes) == EPIC_OK && group_allocate(g))
        return true;
    snprintf(why, REPORT_WHY, "%s", g->ctx ? epic_error(g->ctx) : "no memory");
    group_close(g);
    return false;
}

/* Dispatches `count` rows. Returns the duration of the call in seconds, or 0 if it failed. */
static double time_dispatch(group_way *g, int64_t count)
{
    const epic_dispatch_args args = {.layer = &g->layer,
                                     .plan = g->plan,
                                     .plan_bytes = g->sizes.plan_bytes,
                                     .tokens = {g->rows, count, ROW_BYTES},
                                     .recv = {g->received, g->num_rows, ROW_BYTES},
                                     .type = EPIC_BYTES};
    const double begin = report_now();
    return epic_dispatch(g->ctx, &args) == EPIC_OK ? report_now() - begin : 0;
}

/* Makes a plan in which all rows go to one rank. Dispatches twice, because after the first
 * dispatch all ranks begin the second one at about the same time. */
static double group_send(void *way, int shift, size_t bytes)
{
    group_way *g = way;
    const int64_t count = (int64_t)(bytes / ROW_BYTES);
    const int32_t to = (epic_rank(g->ctx) + shift) % epic_num_ranks(g->ctx);
    for (int64_t i = 0; i < count; i++) g->chosen[i] = to;
    const epic_plan_args args = {.layer = &g->layer,
                                 .plan = g->plan,
                                 .plan_bytes = g->sizes.plan_bytes,
                                 .topk_idx = g->chosen,
                                 .num_tokens = count,
                                 .capacity = g->num_rows};
    if (epic_plan(g->ctx, &args) != EPIC_OK || time_dispatch(g, count) <= 0) return 0;
    return time_dispatch(g, count);
}

static void group_describe(void *way, char *to)
{
    const group_way *g = way;
    snprintf(to, REPORT_WHY, "epic_dispatch of backend %s", epic_backend_name(g->ctx));
}

const report_way report_way_group = {
    .open = group_open, .send = group_send, .describe = group_describe, .close = group_close};
