/* SPDX-License-Identifier: Apache-2.0 */
/* The backend that GPUs take which say "gpu" and no more: of one host p2p, of several hosts.
 *   named RANKS WANTED      the hosts are EPIC_HOST's; what goes wrong is said, and ends it with 1 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "run.h"

static epic_config config_of(const char *backend)
{
    return (epic_config){
        .max_tokens = 16, .max_row_bytes = 64, .num_ranks = 1, .backend = backend};
}

/* Says what keeps the ranks from opening, once, and ends them. */
static void open_as(const epic_bootstrap *bootstrap, const char *backend, const char *wanted)
{
    epic_context *ctx;
    epic_config config = config_of(backend);
    config.num_ranks = (uint32_t)bootstrap->num_ranks;
    if (epic_open(&ctx, bootstrap, &config) != EPIC_OK) {
        if (bootstrap->rank == 0) fprintf(stderr, "%s\n", epic_error(ctx));
        if (bootstrap->rank == 0) _exit(1);
        for (;;) pause();
    }
    CHECK_SAY(strcmp(epic_backend_name(ctx), wanted) == 0, "rank %d took %s", bootstrap->rank,
              epic_backend_name(ctx));
    epic_close(ctx);
}

static void ask_by_name(const epic_bootstrap *bootstrap, void *wanted)
{
    open_as(bootstrap, "gpu", wanted);
}

static void ask_by_variable(const epic_bootstrap *bootstrap, void *wanted)
{
    open_as(bootstrap, NULL, wanted);
}

/* p2p is for one host; who asks for it on several is told of what is for them. */
static void ask_for_p2p(const epic_bootstrap *bootstrap, void *wanted)
{
    (void)wanted;
    epic_context *ctx;
    epic_config config = config_of("p2p");
    config.num_ranks = (uint32_t)bootstrap->num_ranks;
    CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_ENOTSUP);
    CHECK_SAY(strstr(epic_error(ctx), "different hosts: backend hosts, or gpu,") != NULL, "%s",
              epic_error(ctx));
    epic_close(ctx);
}

/* How many hosts there will be is not known beforehand. */
static void check_memory(void)
{
    epic_memory_info p2p, gpu;
    const epic_config named = config_of("p2p"), left = config_of("gpu");
    CHECK(epic_memory(&named, NULL, &p2p) == EPIC_OK);
    CHECK(epic_memory(&left, NULL, &gpu) == EPIC_OK);
    CHECK(gpu.device_bytes == p2p.device_bytes && gpu.host_bytes == p2p.host_bytes);
}

int main(int argc, char **argv)
{
    if (argc != 3) return 2;
    const int ranks = atoi(argv[1]);
    check_begin();
    run_threads(ranks, ask_by_name, argv[2]);
    check_memory();
    if (strcmp(argv[2], "hosts") == 0) run_threads(ranks, ask_for_p2p, NULL);
    setenv("EPIC_BACKEND", "gpu", 1);
    run_threads(ranks, ask_by_variable, argv[2]);
    return check_end();
}
