/* SPDX-License-Identifier: Apache-2.0 */
/* Tests wrong arguments of epic_open and of the size queries, arguments that only some numbers
 * of ranks refuse, and that epic_memory refuses the groups that epic_open refuses. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"

static void refuse_open(const epic_bootstrap *bootstrap, const epic_config *config, size_t size,
                        epic_result expected, const char *name, const char *value)
{
    epic_context *ctx = NULL;
    const epic_result result = epic_open_v1(&ctx, bootstrap, config, size);
    CHECK_SAY(result == expected, "open with %s %s: %s instead of %s", name, value,
              epic_result_name(result), epic_result_name(expected));
    CHECK(ctx != NULL);
    const char *said = epic_error(ctx);
    CHECK_SAY(strstr(said, name) && strstr(said, value), "no %s %s in: %s", name, value, said);
    epic_failure_info info;
    CHECK(epic_failure(ctx, &info) == EPIC_OK);
    CHECK_EQ(info.result, expected);
    CHECK_EQ(info.operation, EPIC_OP_OPEN);
    CHECK(epic_allreduce_sum(ctx, &(epic_allreduce_sum_args){0}) != EPIC_OK);
    CHECK(epic_check(ctx) != EPIC_OK);
    epic_abort(ctx, 0, "nothing to abort");
    epic_close(ctx);
}

static epic_result no_gather(void *self, const void *mine, void *all, int64_t bytes)
{
    (void)self, (void)mine, (void)all, (void)bytes;
    return EPIC_EPEER;
}

#define REFUSE(expected, name, value, ...)                                               \
    refuse_open(NULL, &(epic_config){.max_tokens = 4, .max_row_bytes = 64, __VA_ARGS__}, \
                sizeof(epic_config), expected, name, value)

static void try_open(void)
{
    const epic_config good = {.max_tokens = 4, .max_row_bytes = 64};
    const epic_config no_tokens = {.max_row_bytes = 64}, no_rows = {.max_tokens = 4};
    struct {
        epic_config config;
        char more[8];
    } longer = {good, {0, 1}};
    refuse_open(NULL, NULL, sizeof good, EPIC_EINVAL, "config", "NULL");
    refuse_open(NULL, &good, 0, EPIC_EINVAL, "config", "0");
    refuse_open(NULL, &longer.config, sizeof longer, EPIC_EINVAL, "config", "newer");
    refuse_open(NULL, &no_tokens, sizeof good, EPIC_EINVAL, "max_tokens", "0");
    refuse_open(NULL, &no_rows, sizeof good, EPIC_EINVAL, "max_row_bytes", "0");
    REFUSE(EPIC_EINVAL, "staging_bytes", "-5", .staging_bytes = -5);
    REFUSE(EPIC_EINVAL, "max_in_flight", "65", .max_in_flight = 65);
    REFUSE(EPIC_EINVAL, "max_top_k", "65", .max_top_k = 65);
    REFUSE(EPIC_EINVAL, "flags", "1", .flags = 1);
    REFUSE(EPIC_EINVAL, "num_ranks", "3", .num_ranks = 3);
    REFUSE(EPIC_EINVAL, "backend", "nonsense", .backend = "nonsense");
    REFUSE(EPIC_EINVAL, "name", "0123456789",
           .name = "0123456789012345678901234567890123456789012345678901234567890123456789");
    epic_bootstrap bootstrap = {.rank = 2, .num_ranks = 2, .gather = no_gather};
    refuse_open(&bootstrap, &good, sizeof good, EPIC_EINVAL, "bootstrap.rank", "2");
    bootstrap = (epic_bootstrap){.rank = 0, .num_ranks = 0, .gather = no_gather};
    refuse_open(&bootstrap, &good, sizeof good, EPIC_EINVAL, "bootstrap.num_ranks", "0");
    bootstrap = (epic_bootstrap){.rank = 0, .num_ranks = 2};
    refuse_open(&bootstrap, &good, sizeof good, EPIC_EINVAL, "bootstrap.gather", "NULL");
    bootstrap = (epic_bootstrap){.rank = 0, .num_ranks = 2, .gather = no_gather};
    refuse_open(&bootstrap, &good, sizeof good, EPIC_EPEER, "", "");
    CHECK(epic_open(NULL, NULL, &good) == EPIC_EINVAL);
}

static void refuse_sizes(const epic_config *config, const epic_layer *layer, const char *name)
{
    int64_t size = -1;
    CHECK(epic_plan_bytes(config, layer, &size) == EPIC_EINVAL && size == 0);
    CHECK_SAY(strstr(epic_error(NULL), name) != NULL, "no %s in: %s", name, epic_error(NULL));
    size = -1;
    CHECK(epic_capacity_bound(config, layer, &size) == EPIC_EINVAL && size == 0);
    CHECK_SAY(strstr(epic_error(NULL), name) != NULL, "no %s in: %s", name, epic_error(NULL));
    epic_memory_info info;
    CHECK(epic_memory(config, layer, &info) == EPIC_EINVAL || layer == NULL);
}

static void try_queries(void)
{
    const epic_config config = {.max_tokens = 4, .max_row_bytes = 64, .num_ranks = 2};
    const epic_config no_ranks = {.max_tokens = 4, .max_row_bytes = 64};
    const epic_config huge = {.max_tokens = 1 << 30, .max_row_bytes = 64, .num_ranks = 4};
    const epic_layer layer = {.num_experts = 8, .top_k = 2};
    const epic_layer nothing = {.num_experts = 8};
    epic_memory_info memory;
    refuse_sizes(&no_ranks, &layer, "num_ranks");
    refuse_sizes(&config, &nothing, "top_k");
    refuse_sizes(&config, NULL, "layer");
    refuse_sizes(NULL, &layer, "config");
    int64_t size;
    CHECK(epic_plan_bytes(&huge, &layer, &size) == EPIC_EINVAL);
    CHECK(epic_plan_bytes(&config, &layer, NULL) == EPIC_EINVAL);
    CHECK(epic_capacity_bound(&config, &layer, NULL) == EPIC_EINVAL);
    CHECK(epic_memory(&config, NULL, &memory) == EPIC_OK);
    CHECK(memory.plan_bytes == 0 && memory.host_bytes > 0 && memory.shared_bytes > 0);
    CHECK(epic_memory_v1(&config, sizeof config, &layer, sizeof layer, NULL, 8) == EPIC_EINVAL);
    epic_plan_info info;
    _Alignas(16) unsigned char bytes[64] = {0};
    CHECK(epic_plan_read(NULL, 64, &info) == EPIC_EINVAL);
    CHECK(epic_plan_read(bytes + 1, 32, &info) == EPIC_EINVAL);
    CHECK(epic_plan_read(bytes, 64, &info) == EPIC_EINVAL);
    CHECK(epic_plan_read(bytes, 0, &info) == EPIC_EINVAL);
    CHECK(epic_plan_read(bytes, 64, NULL) == EPIC_EINVAL);
    CHECK(epic_failure_v1(NULL, &(epic_failure_info){0}, 8) == EPIC_EINVAL);
    CHECK(epic_check(NULL) == EPIC_EINVAL);
    CHECK(epic_allreduce_sum_v1(NULL, &(epic_allreduce_sum_args){0}, 8) == EPIC_EINVAL);
    CHECK(epic_plan_v1(NULL, &(epic_plan_args){0}, 8) == EPIC_EINVAL);
    epic_close(NULL);
    epic_abort(NULL, 0, NULL);
    epic_bootstrap_close(NULL);
    CHECK(epic_rank(NULL) == -1 && epic_num_ranks(NULL) == 0);
    CHECK(strcmp(epic_result_name(EPIC_EPEER), "EPIC_EPEER") == 0);
    CHECK(epic_result_name((epic_result)77) != NULL);
    CHECK(epic_version() == EPIC_VERSION);
    epic_bootstrap bootstrap;
    CHECK(epic_bootstrap_threads(NULL, 2, 0) == EPIC_EINVAL);
    CHECK(epic_bootstrap_threads(&bootstrap, 0, 0) == EPIC_EINVAL);
    CHECK(epic_bootstrap_nccl(NULL, NULL, 0) == EPIC_EINVAL);
    CHECK(epic_bootstrap_nccl(&bootstrap, NULL, 0) == EPIC_EINVAL);
    CHECK(strstr(epic_error(NULL), "comm is NULL: must be an initialized NCCL communicator"));
    epic_bootstrap_close(&bootstrap); /* allowed after a failure */
    CHECK(epic_bootstrap_tcp_v1(&bootstrap, NULL, 8) == EPIC_EINVAL);
    CHECK(epic_bootstrap_env(NULL) == EPIC_EINVAL);
}

/* A binary tree cannot have three ranks. */
static void three(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    const epic_config config = {.max_tokens = 4, .max_row_bytes = 64, .timeout_ms = 20000};
    epic_context *ctx;
    float data[2] = {1, 2};
    if (!CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_OK)) return;
    const epic_allreduce_sum_args a = {.data = data, .count = 2, .order = EPIC_TREE};
    CHECK(epic_allreduce_sum(ctx, &a) == EPIC_EINVAL);
    CHECK(strstr(epic_error(ctx), "order") && strstr(epic_error(ctx), "3"));
    epic_close(ctx);
}

/* One rank has a different config. All ranks get an error, and no group opens. */
static void unequal(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    const epic_config config = {.max_tokens = 4 + bootstrap->rank / 2, .max_row_bytes = 64};
    epic_context *ctx;
    CHECK(epic_open(&ctx, bootstrap, &config) == EPIC_EMISMATCH);
    CHECK(strstr(epic_error(ctx), "max_tokens") && strstr(epic_error(ctx), "rank 2"));
    epic_close(ctx);
}

/* Groups that epic_open refuses have no memory: epic_memory returns the same error. */
static void refused_alike(const epic_bootstrap *bootstrap, void *self)
{
    static const struct {
        const char *backend;
        int64_t staging_bytes;
        epic_result result;
        const char *text;
    } cases[] = {
        {"self", 0, EPIC_ENOTSUP, "num_ranks is 3: must be 1 in backend self, other backends"},
        {"threads", 1000, EPIC_EINVAL, "config.staging_bytes is 1000: must be 0, or at least "},
        {"shm", 1000, EPIC_EINVAL, "config.staging_bytes is 1000: must be 0, or at least "},
        {NULL, 1000, EPIC_EINVAL, "config.staging_bytes is 1000: must be 0, or at least "}};
    (void)self;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const epic_config config = {.max_tokens = 4,
                                    .max_row_bytes = 64,
                                    .num_ranks = 3,
                                    .staging_bytes = cases[i].staging_bytes,
                                    .backend = cases[i].backend};
        epic_context *ctx;
        epic_memory_info info = {.host_bytes = -1};
        CHECK_EQ(epic_memory(&config, NULL, &info), cases[i].result);
        char text[512];
        snprintf(text, sizeof text, "%s", epic_error(NULL));
        CHECK_SAY(strncmp(text, cases[i].text, strlen(cases[i].text)) == 0, "%s", text);
        CHECK(info.host_bytes == -1);
        CHECK_EQ(epic_open(&ctx, bootstrap, &config), cases[i].result);
        CHECK_SAY(strstr(epic_error(ctx), text), "no %s in: %s", text, epic_error(ctx));
        epic_close(ctx);
    }
}

int main(void)
{
    check_begin();
    run_alarm(200);
    try_open();
    try_queries();
    run_threads(3, three, NULL);
    run_threads(3, unequal, NULL);
    run_threads(3, refused_alike, NULL);
    return check_end();
}
