/* SPDX-License-Identifier: Apache-2.0 */
/* Tests which backend "gpu" selects: p2p if all ranks are on one host or in one NVLink domain,
 * and hosts otherwise.
 *
 *   named RANKS WANTED [REASON]      EPIC_HOST sets the hosts; prints an error and exits with 1
 *
 * REASON: a part of the error text that ranks get if they request p2p and WANTED is hosts. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "run.h"

static int num_hosts; /* number of hosts of the first group */

static epic_config config_of(const char *backend)
{
    return (epic_config){
        .max_tokens = 16, .max_row_bytes = 64, .num_ranks = 1, .backend = backend};
}

/* Selects the GPU of a rank. If there are as many GPUs as ranks, each rank has its own. */
static void choose_gpu(int rank)
{
    int num_gpus;
    CHECK(cudaGetDeviceCount(&num_gpus) == cudaSuccess &&
          cudaSetDevice(rank % num_gpus) == cudaSuccess);
}

/* Checks that backend p2p refuses windows if the ranks are on several hosts. */
static void check_windows(epic_context *ctx)
{
    epic_window_info window;
    const epic_window_args args = {.bytes = 4096};
    const bool is_p2p = strcmp(epic_backend_name(ctx), "p2p") == 0;
    if (!is_p2p || epic_num_hosts(ctx) == 1) return;
    CHECK(epic_window_alloc(ctx, &args, &window) == EPIC_ENOTSUP);
    CHECK_SAY(strstr(epic_error(ctx), "ctx has ranks on several hosts: windows") != NULL, "%s",
              epic_error(ctx));
}

/* Checks that a group without EPIC_CAN_REGROUP cannot change its members. */
static void check_regroup(epic_context *ctx)
{
    const epic_regroup_args args = {.patience_ms = 100};
    CHECK(epic_regroup(ctx, &args, NULL) == EPIC_ENOTSUP);
    CHECK_SAY(strstr(epic_error(ctx), "config.flags is 0, and the backend is") != NULL, "%s",
              epic_error(ctx));
}

/* Checks that up to 32 ranks of one host can open a group with EPIC_CAN_REGROUP, and that other
 * groups get an error. A rank of another host that cannot be reached may still run. */
static void ask_for_regroup(const epic_bootstrap *bootstrap, void *wanted)
{
    epic_context *ctx;
    epic_config config = config_of("gpu");
    const bool is_p2p = strcmp(wanted, "p2p") == 0, is_many = bootstrap->num_ranks > 32;
    config.num_ranks = (uint32_t)bootstrap->num_ranks;
    config.flags = EPIC_CAN_REGROUP;
    choose_gpu(bootstrap->rank);
    epic_memory_info memory;
    const char *too_many = "must be at most 32 in backend p2p with EPIC_CAN_REGROUP; open";
    CHECK(epic_memory(&config, NULL, &memory) == (is_many ? EPIC_ENOTSUP : EPIC_OK));
    if (is_many) CHECK_SAY(strstr(epic_error(NULL), too_many), "%s", epic_error(NULL));
    const epic_result result = epic_open(&ctx, bootstrap, &config);
    const bool is_open = is_p2p && !is_many && num_hosts == 1;
    CHECK_SAY(result == (is_open ? EPIC_OK : EPIC_ENOTSUP), "%s", epic_error(ctx));
    if (is_open) CHECK(strcmp(epic_backend_name(ctx), "p2p") == 0);
    if (!is_open)
        CHECK_SAY(strstr(epic_error(ctx),
                         is_many  ? too_many
                         : is_p2p ? "config.flags is EPIC_CAN_REGROUP: must be 0 for ranks on "
                                    "several hosts; ranks 0 and"
                                  : "config.flags is EPIC_CAN_REGROUP: must be 0 with backend "
                                    "\"hosts\""),
                  "%s", epic_error(ctx));
    epic_close(ctx);
}

/* Prints once why the ranks cannot open a group, and ends them. */
static void open_as(const epic_bootstrap *bootstrap, const char *backend, const char *wanted)
{
    epic_context *ctx;
    epic_config config = config_of(backend);
    config.num_ranks = (uint32_t)bootstrap->num_ranks;
    choose_gpu(bootstrap->rank);
    if (epic_open(&ctx, bootstrap, &config) != EPIC_OK) {
        if (bootstrap->rank == 0) fprintf(stderr, "%s\n", epic_error(ctx));
        if (bootstrap->rank == 0) _exit(1);
        for (;;) pause();
    }
    CHECK_SAY(strcmp(epic_backend_name(ctx), wanted) == 0, "rank %d took %s", bootstrap->rank,
              epic_backend_name(ctx));
    if (bootstrap->rank == 0) num_hosts = epic_num_hosts(ctx);
    check_windows(ctx);
    check_regroup(ctx);
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

/* Checks the error of ranks that request p2p although they are on several hosts and not in one
 * NVLink domain. The error names the alternative. */
static void ask_for_p2p(const epic_bootstrap *bootstrap, void *reason)
{
    epic_context *ctx;
    epic_config config = config_of("p2p");
    config.num_ranks = (uint32_t)bootstrap->num_ranks;
    choose_gpu(bootstrap->rank);
    CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_ENOTSUP);
    CHECK_SAY(strstr(epic_error(ctx), "different hosts") &&
                  strstr(epic_error(ctx), ": backend hosts, or gpu,") &&
                  strstr(epic_error(ctx), reason),
              "%s", epic_error(ctx));
    epic_close(ctx);
}

/* The number of hosts is not known before open. */
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
    if (argc != 3 && argc != 4) return 2;
    const int ranks = atoi(argv[1]);
    check_begin();
    run_threads(ranks, ask_by_name, argv[2]);
    run_threads(ranks, ask_for_regroup, argv[2]);
    check_memory();
    if (strcmp(argv[2], "hosts") == 0)
        run_threads(ranks, ask_for_p2p, argc > 3 ? argv[3] : "different hosts:");
    setenv("EPIC_BACKEND", "gpu", 1);
    run_threads(ranks, ask_by_variable, argv[2]);
    return check_end();
}
