/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_config.flags: which backends accept EPIC_CAN_REGROUP, and the errors. This program
 * does not find libepic_cuda_regroup.so (tests/CMakeLists.txt). */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "run.h"

static const epic_config can_regroup = {
    .max_tokens = 4, .max_row_bytes = 64, .num_ranks = 1, .flags = EPIC_CAN_REGROUP};

static void check_error(epic_result result, epic_result expected, const char *text)
{
    CHECK_SAY(result == expected && strstr(epic_error(NULL), text), "%s instead of %s: %s",
              epic_result_name(result), epic_result_name(expected), epic_error(NULL));
}

static void refuse(const char *backend, const char *text)
{
    epic_context *ctx;
    epic_memory_info info;
    epic_config config = can_regroup;
    config.backend = backend;
    check_error(epic_open(&ctx, NULL, &config), EPIC_ENOTSUP, text);
    epic_close(ctx);
    check_error(epic_memory(&config, NULL, &info), EPIC_ENOTSUP, text);
}

static void check_unsupported(void)
{
    static const char *const never[] = {"self", "mpi", "hosts"};
    for (int i = 0; i < 3; i++) {
        char text[128];
        snprintf(text, sizeof text,
                 "config.flags is EPIC_CAN_REGROUP: must be 0 with backend \"%s\", whose",
                 never[i]);
        refuse(never[i], text);
    }
    refuse("p2p", "backend \"p2p\": libepic_cuda_regroup.so cannot be loaded; groups with "
                  "EPIC_CAN_REGROUP need it: build libepic again with EPIC_GPU_REGROUP=ON (");
    refuse("gpu", "libepic_cuda_regroup.so cannot be loaded");
}

static void check_unknown_bit(void)
{
    epic_context *ctx;
    epic_config config = can_regroup;
    config.flags |= 1;
    check_error(epic_open(&ctx, NULL, &config), EPIC_EINVAL,
                "config.flags is 4097: must be 0 or EPIC_CAN_REGROUP (4096)");
    epic_close(ctx);
}

/* The first backend that connects one rank, self, does not support the flag. */
static void check_one_rank(void)
{
    epic_context *ctx;
    epic_members_info info;
    CHECK_SAY(epic_open(&ctx, NULL, &can_regroup) == EPIC_OK, "%s", epic_error(ctx));
    CHECK(strcmp(epic_backend_name(ctx), "threads") == 0);
    CHECK_SAY(epic_regroup(ctx, &(epic_regroup_args){0}, &info) == EPIC_OK, "%s",
              epic_error(ctx));
    CHECK(info.generation == 1 && info.num_members == 1);
    epic_close(ctx);
}

static void check_without_flag(void)
{
    epic_context *ctx;
    epic_config config = can_regroup;
    config.flags = 0;
    CHECK(epic_open(&ctx, NULL, &config) == EPIC_OK);
    check_error(epic_regroup(ctx, &(epic_regroup_args){0}, NULL), EPIC_ENOTSUP,
                "config.flags is 0, and the backend is \"self\": only groups with "
                "EPIC_CAN_REGROUP, or of the backends shm and threads, can continue");
    epic_close(ctx);
}

static void open_group(const epic_bootstrap *bootstrap, const char *backend,
                       uint32_t flags_of_rank_1)
{
    epic_context *ctx;
    epic_config config = can_regroup;
    config.num_ranks = 0;
    config.backend = backend;
    if (bootstrap->rank == 1) config.flags = flags_of_rank_1;
    const epic_result result = epic_open(&ctx, bootstrap, &config);
    if (flags_of_rank_1)
        CHECK_SAY(result == EPIC_OK, "%s", epic_error(ctx));
    else
        check_error(result, EPIC_EMISMATCH,
                    "open: rank 0 has config.flags 4096, rank 1 has 0; set the same on every "
                    "rank");
    epic_close(ctx);
}

static void open_equal(const epic_bootstrap *bootstrap, void *backend)
{
    open_group(bootstrap, backend, EPIC_CAN_REGROUP);
}

static void open_different(const epic_bootstrap *bootstrap, void *backend)
{
    open_group(bootstrap, backend, 0);
}

int main(void)
{
    static char backend[] = "threads";
    check_begin();
    run_alarm(60);
    check_unsupported();
    check_unknown_bit();
    check_one_rank();
    check_without_flag();
    run_threads(2, open_equal, backend);
    run_threads(2, open_different, backend);
    return check_end();
}
