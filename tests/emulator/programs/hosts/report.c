/* SPDX-License-Identifier: Apache-2.0 */
/* Tests what a group of several hosts reports about itself: the number of hosts, how its rows
 * cross between them (also in epic-info), and, before it opens, its memory in bytes. Also tests
 * which order EPIC_BY_HOSTS selects, and that open does not gather more often than necessary.
 *
 *   report RANKS HOSTS WORDS-OF-THE-NET EPIC-INFO GATHERS [full]
 * full: the last rank has a GPU of its own, without space for the inbox and outbox of the net.
 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator.h"
#include "epic/epic.h"

enum { MAX_RANKS = 8, PAGES = 16 * 4096, OWN = 256 * 1024 }; /* blocks are whole pages */

static int num_ranks, num_hosts, num_gathers;
static const char *words, *program;
static bool on_gpu, full;
static char group[64];
static epic_bootstrap bootstraps[MAX_RANKS];

typedef struct counting { /* counts the gathers of a bootstrap */
    const epic_bootstrap *of;
    int gathers;
} counting;
static pthread_barrier_t barrier;

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                               \
        }                                                                           \
    } while (0)

static epic_config config_of(void)
{
    return (epic_config){.max_tokens = 96,
                         .max_row_bytes = 5000,
                         .num_ranks = (uint32_t)num_ranks,
                         .backend = "hosts",
                         .name = group,
                         .max_top_k = 3};
}

/* Checks what epic-info prints about the group. */
static void check_info(void)
{
    static char output[65536];
    char command[4096];
    snprintf(command, sizeof command, "'%s' --group '%s' 2>&1", program, group);
    FILE *pipe = popen(command, "r");
    CHECK(pipe);
    output[fread(output, 1, sizeof output - 1, pipe)] = 0;
    CHECK(pclose(pipe) == 0);
    snprintf(command, sizeof command, "\n  to other hosts by %s", words);
    if (strstr(output, command) && strstr(output, "\n  operations on GPUs are not recorded"))
        return;
    fprintf(stderr, "\"%s\" is not in:\n%s", command, output);
    _exit(1);
}

/* Returns whether all ranks have the bytes that were reported for one rank, less at most
 * `least`. */
static bool is_close(const char *what, uint64_t bytes, int64_t reported, int64_t least)
{
    const int64_t each = (int64_t)bytes / num_ranks;
    const bool good = each <= reported + PAGES && each >= reported - least - PAGES;
    if (!good)
        fprintf(stderr, "each rank has %lld bytes of %s, but %lld were reported\n",
                (long long)each, what, (long long)reported);
    return good;
}

/* Returns the reported memory with EPIC_NET_MEMORY set to `where`, and restores the variable.
 */
static epic_memory_info memory_of(const char *where, uint32_t max_top_k)
{
    epic_memory_info reported;
    epic_config config = config_of();
    const char *was = getenv("EPIC_NET_MEMORY");
    char *kept = strdup(was ? was : "");
    config.max_top_k = max_top_k;
    CHECK(kept && setenv("EPIC_NET_MEMORY", where, 1) == 0);
    CHECK(epic_memory(&config, NULL, &reported) == EPIC_OK);
    CHECK(setenv("EPIC_NET_MEMORY", kept, 1) == 0);
    free(kept);
    CHECK(reported.shared_bytes == 0 && reported.host_bytes > 1 << 18 &&
          reported.device_bytes > 1 << 20);
    return reported;
}

/* If EPIC_NET_MEMORY is not set, each kind of memory is reported as if it contained everything.
 * In addition to pinned memory a rank has some ordinary host memory. */
static void check_memory(void)
{
    const epic_memory_info host = memory_of("host", 3), gpu = memory_of("gpu", 3);
    const epic_memory_info reported = on_gpu ? gpu : host, unasked = memory_of("", 3);
    /* inbox and outbox: a record of 8 bytes per choice, twice, and a float */
    const int64_t spared = 2 * 96ll * (64 - 4) * (16 * num_ranks + 8 * (num_ranks - 1));
    const int64_t more = memory_of("host", 0).host_bytes - host.host_bytes;
    CHECK(llabs(more - spared) < 8192); /* parts are whole pages */
    CHECK(host.host_bytes > gpu.host_bytes + (1 << 20) && gpu.device_bytes > host.device_bytes);
    CHECK(unasked.host_bytes == host.host_bytes && unasked.device_bytes == gpu.device_bytes);
    CHECK(is_close("pinned memory", emulator_bytes(true), reported.host_bytes, OWN));
    CHECK(is_close("device memory", emulator_bytes(false), reported.device_bytes, 0));
}

enum { EXPERTS = 24 };

/* Returns whether the sum order of a plan with EPIC_BY_HOSTS is a tree. */
static bool in_tree(epic_context *ctx, epic_plan_args args)
{
    epic_plan_info plan;
    CHECK(epic_plan(ctx, &args) == EPIC_OK);
    CHECK(cudaStreamSynchronize(args.call.stream) == cudaSuccess);
    CHECK(epic_check(ctx) == EPIC_OK);
    CHECK(epic_plan_read(args.plan, args.plan_bytes, &plan) == EPIC_OK);
    return plan.num_leaves > 0;
}

/* Ranks share a GPU, so each uses a stream of its own, and frees nothing while others wait for
 * it. */
static void check_order(epic_context *ctx)
{
    const epic_layer layer = {.num_experts = EXPERTS, .top_k = 1, .sum_order = EPIC_BY_HOSTS};
    epic_layer_info sizes;
    unsigned char *plan = NULL;
    int32_t *ids = NULL;
    epic_plan_args args = {.layer = &layer, .num_tokens = 2};
    CHECK(epic_layer_sizes(ctx, &layer, &sizes) == EPIC_OK);
    CHECK(cudaStreamCreateWithFlags((cudaStream_t *)&args.call.stream, cudaStreamNonBlocking) ==
          cudaSuccess);
    CHECK(cudaMalloc((void **)&plan, (size_t)sizes.plan_bytes) == cudaSuccess);
    CHECK(cudaMalloc((void **)&ids, EXPERTS * sizeof *ids) == cudaSuccess);
    for (int e = 0; e < EXPERTS; e++) ids[e] = e * num_ranks / EXPERTS;
    args.plan = plan;
    args.plan_bytes = sizes.plan_bytes;
    args.topk_idx = ids;
    args.capacity = sizes.capacity_any_placement;
    CHECK(in_tree(ctx, args) == (num_ranks != 3)); /* a power of two */
    epic_layer wide = layer;
    wide.top_k = 4;
    args.layer = &wide;
    CHECK(epic_plan(ctx, &args) == EPIC_EINVAL && strstr(epic_error(ctx), "layer.top_k is 4"));
    CHECK(strstr(epic_error(ctx), "config.max_top_k 3"));
    args.layer = &layer;
    args.rank_of_expert = ids;
    CHECK(!in_tree(ctx, args));
    CHECK(cudaFree(plan) == cudaSuccess && cudaFree(ids) == cudaSuccess);
    CHECK(cudaStreamDestroy(args.call.stream) == cudaSuccess);
}

static epic_result count_gathers(void *self, const void *mine, void *all, int64_t bytes)
{
    counting *c = self;
    c->gathers++;
    return c->of->gather(c->of->self, mine, all, bytes);
}

static void *rank_of(void *bootstrap)
{
    epic_context *ctx;
    const epic_config config = config_of();
    counting counted = {.of = bootstrap};
    const epic_bootstrap counting_bootstrap = {counted.of->rank, num_ranks, count_gathers, NULL,
                                               &counted};
    CHECK(cudaSetDevice(full && counted.of->rank == num_ranks - 1) == cudaSuccess);
    const epic_result result = epic_open(&ctx, &counting_bootstrap, &config);
    if (result != EPIC_OK) fprintf(stderr, "%s\n", epic_error(ctx));
    CHECK(result == EPIC_OK);
    CHECK(epic_num_hosts(ctx) == num_hosts && counted.gathers == num_gathers);
    CHECK(strncmp(epic_net_name(ctx), words, strlen(words)) == 0);
    epic_wait_info waits[MAX_RANKS];
    CHECK(epic_waits(ctx, EPIC_OP_NONE, waits, num_ranks) == EPIC_OK && waits[0].wait_ns == 0);
    pthread_barrier_wait(&barrier);
    if (epic_rank(ctx) == 0) check_memory();
    if (epic_rank(ctx) == 0) check_info();
    pthread_barrier_wait(&barrier);
    check_order(ctx);
    epic_close(ctx);
    return NULL;
}

/* An invalid value of a net variable is an error at open that names the variable. */
static void check_variable(const char *name, const char *value)
{
    epic_context *ctx = NULL;
    epic_config config = config_of();
    char said[64];
    const char *was = getenv(name);
    char *kept = strdup(was ? was : "");
    snprintf(said, sizeof said, "%s=%s: must be", name, value);
    config.num_ranks = 1;
    CHECK(kept && setenv(name, value, 1) == 0);
    CHECK(epic_open(&ctx, NULL, &config) == EPIC_EINVAL && strstr(epic_error(NULL), said));
    CHECK(setenv(name, kept, 1) == 0);
    free(kept);
}

int main(int argc, char **argv)
{
    pthread_t threads[MAX_RANKS];
    if (argc < 6) return 2;
    num_ranks = atoi(argv[1]), num_hosts = atoi(argv[2]), num_gathers = atoi(argv[5]);
    words = argv[3], program = argv[4];
    on_gpu = strstr(words, "GPU memory") != NULL;
    full = argc > 6;
    snprintf(group, sizeof group, "report-%d", (int)getpid());
    CHECK(epic_num_hosts(NULL) == 0 && strcmp(epic_net_name(NULL), "") == 0);
    check_variable("EPIC_NET_WINDOW", "many");
    check_variable("EPIC_NET_WINDOW", "-1");
    check_variable("EPIC_NET_THREADS", "two");
    check_variable("EPIC_NET_THREADS", "8");
    check_variable("EPIC_NET_MEMORY", "GPU");
    check_variable("EPIC_NET_RDMA", "never");
    check_variable("EPIC_NET_RDMA", "01");
    check_variable("EPIC_NET_RELAY", "no");
    if (full) emulator_limit(1, (uint64_t)memory_of("host", 3).device_bytes + PAGES);
    CHECK(num_ranks <= MAX_RANKS &&
          epic_bootstrap_threads(bootstraps, num_ranks, 60000) == EPIC_OK);
    CHECK(pthread_barrier_init(&barrier, NULL, (unsigned)num_ranks) == 0);
    for (int r = 0; r < num_ranks; r++)
        CHECK(pthread_create(&threads[r], NULL, rank_of, &bootstraps[r]) == 0);
    for (int r = 0; r < num_ranks; r++) CHECK(pthread_join(threads[r], NULL) == 0);
    for (int r = 0; r < num_ranks; r++) epic_bootstrap_close(&bootstraps[r]);
    CHECK(emulator_bytes(true) == 0 && emulator_bytes(false) == 0);
    return 0;
}
