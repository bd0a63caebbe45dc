/* SPDX-License-Identifier: Apache-2.0 */
/* Windows on host contexts: that rows in windows do not pass through staging, the errors of the
 * calls that add windows, and the reuse of a window in many steps. The conformance suite
 * compares all results with the oracle. */
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/transport.h"
#include "check.h"
#include "context/context.h"
#include "epic/epic.h"
#include "run.h"

#define RANKS 3
#define TOKENS 50
#define HIDDEN 300
#define ROW (HIDDEN * 4) /* float32 */
#define EXPERTS 6
#define SECONDS 60
#define SPACE (1 << 20) /* bytes of a window */
#define MOST_WINDOWS 256

typedef struct fixture {
    epic_context *ctx;
    int rank;
    epic_layer layer;
    unsigned char *plan;
    int64_t plan_bytes, slots;
    unsigned char *space; /* the window; its parts are handed out by take() */
    int64_t used;
} fixture;

static const char *backend; /* the backend of the running test */

static epic_context *open_context(const epic_bootstrap *bootstrap, uint32_t timeout_ms)
{
    const epic_config config = {.max_tokens = TOKENS,
                                .max_row_bytes = ROW,
                                .max_in_flight = 2,
                                .timeout_ms = timeout_ms,
                                .backend = backend};
    epic_context *ctx = NULL;
    const epic_result result = epic_open(&ctx, bootstrap, &config);
    CHECK_SAY(result == EPIC_OK, "open: %s", epic_error(ctx));
    return ctx;
}

static void *take(fixture *f, int64_t bytes)
{
    void *at = f->space + f->used;
    f->used += (bytes + 63) / 64 * 64;
    if (f->used > SPACE) abort(); /* a mistake of the test itself */
    memset(at, 0xab, (size_t)bytes);
    return at;
}

/* The value of element i of token t of a rank. */
static float value(int rank, int64_t t, int64_t i, int step)
{
    return (float)(rank * 100000 + t * 1000 + i + step);
}

static int32_t choose_expert(int rank, int64_t t, uint32_t k, int step)
{
    return (int32_t)((rank + t * 5 + k * 3 + step) % EXPERTS);
}

static void make_plan(fixture *f, uint64_t tag, int step)
{
    int32_t ids[TOKENS * 2];
    const uint32_t top_k = f->layer.top_k;
    for (int64_t i = 0; i < TOKENS * top_k; i++)
        ids[i] = choose_expert(f->rank, i / top_k, (uint32_t)(i % top_k), step);
    const epic_plan_args a = {.call = {.tag = tag},
                              .layer = &f->layer,
                              .plan = f->plan,
                              .plan_bytes = f->plan_bytes,
                              .topk_idx = ids,
                              .num_tokens = TOKENS,
                              .capacity = f->slots};
    CHECK_SAY(epic_plan(f->ctx, &a) == EPIC_OK, "plan: %s", epic_error(f->ctx));
}

static void begin(fixture *f, const epic_bootstrap *bootstrap, epic_layer layer)
{
    epic_layer_info sizes = {0};
    epic_window_info window = {0};
    const epic_window_args args = {.bytes = SPACE};
    *f = (fixture){.rank = bootstrap->rank, .layer = layer};
    f->ctx = open_context(bootstrap, 20000);
    CHECK(epic_layer_sizes(f->ctx, &layer, &sizes) == EPIC_OK);
    f->plan_bytes = sizes.plan_bytes;
    f->slots = sizes.capacity;
    f->plan = aligned_alloc(64, (size_t)(f->plan_bytes + 63) / 64 * 64);
    CHECK_SAY(epic_window_alloc(f->ctx, &args, &window) == EPIC_OK, "alloc: %s",
              epic_error(f->ctx));
    CHECK(window.is_direct == 1 && window.bytes == SPACE && window.data);
    f->space = window.data;
}

static void end(fixture *f)
{
    CHECK(epic_check(f->ctx) == EPIC_OK);
    epic_close(f->ctx);
    free(f->plan);
}

/* ------------------------------------------------------------------ what is not staged ---- */

static uint64_t sent_since(const fixture *f, uint64_t before)
{
    return epic_context_bytes_sent(f->ctx) - before;
}

/* Dispatches with every output in a window, and checks that `each` bytes of every token passed
 * through the rings. */
static void count_dispatch(fixture *f, int64_t each)
{
    static _Thread_local float tokens[TOKENS * HIDDEN], weights[TOKENS * 2];
    const uint32_t top_k = f->layer.top_k;
    const int64_t floats = f->layer.layout == EPIC_FLAT ? top_k : 1;
    for (int64_t i = 0; i < TOKENS * HIDDEN; i++)
        tokens[i] = value(f->rank, i / HIDDEN, i % HIDDEN, 0);
    for (int64_t i = 0; i < TOKENS * top_k; i++) weights[i] = 0.5f;
    const epic_dispatch_args a = {.layer = &f->layer,
                                  .plan = f->plan,
                                  .plan_bytes = f->plan_bytes,
                                  .tokens = {tokens, TOKENS, ROW},
                                  .recv = {take(f, f->slots * ROW), f->slots, ROW},
                                  .weights = weights,
                                  .slot_weights = take(f, f->slots * floats * 4)};
    const uint64_t before = epic_context_bytes_sent(f->ctx);
    CHECK_SAY(epic_dispatch(f->ctx, &a) == EPIC_OK, "dispatch: %s", epic_error(f->ctx));
    CHECK_EQ(sent_since(f, before), TOKENS * each);
}

/* Runs combine and both backward calls. With top-1 no byte may pass through the rings. */
static void count_the_rest(fixture *f)
{
    unsigned char *slots = take(f, f->slots * ROW), *tokens = take(f, TOKENS * ROW);
    float *slot_floats = take(f, f->slots * 4), *floats = take(f, TOKENS * 4);
    memset(slots, 0, (size_t)f->slots * ROW);
    memset(slot_floats, 0, (size_t)f->slots * 4);
    const epic_combine_args combine = {.layer = &f->layer,
                                       .plan = f->plan,
                                       .plan_bytes = f->plan_bytes,
                                       .rows = {slots, f->slots, ROW},
                                       .out = {tokens, TOKENS, ROW},
                                       .slot_weights = slot_floats,
                                       .type = EPIC_F32};
    const epic_combine_backward_args spread = {.layer = &f->layer,
                                               .plan = f->plan,
                                               .plan_bytes = f->plan_bytes,
                                               .d_out = {tokens, TOKENS, ROW},
                                               .d_rows = {slots, f->slots, ROW},
                                               .type = EPIC_F32};
    const epic_dispatch_backward_args home = {.layer = &f->layer,
                                              .plan = f->plan,
                                              .plan_bytes = f->plan_bytes,
                                              .d_recv = {slots, f->slots, ROW},
                                              .d_tokens = {tokens, TOKENS, ROW},
                                              .d_slot_weights = slot_floats,
                                              .d_weights = floats,
                                              .type = EPIC_F32};
    const uint64_t before = epic_context_bytes_sent(f->ctx);
    CHECK(epic_combine(f->ctx, &combine) == EPIC_OK);
    CHECK_EQ(sent_since(f, before), 0);
    CHECK(epic_combine_backward(f->ctx, &spread) == EPIC_OK);
    CHECK_EQ(sent_since(f, before), 0);
    CHECK(epic_dispatch_backward(f->ctx, &home) == EPIC_OK);
    CHECK_EQ(sent_since(f, before), 0);
}

static void nothing_is_staged(const epic_bootstrap *bootstrap, void *self)
{
    fixture f;
    (void)self;
    begin(&f, bootstrap, (epic_layer){.num_experts = EXPERTS, .top_k = 1});
    make_plan(&f, 0, 0);
    count_dispatch(&f, 0);
    count_the_rest(&f);
    end(&f);
    begin(&f, bootstrap, (epic_layer){.num_experts = EXPERTS, .top_k = 2, .layout = EPIC_FLAT});
    make_plan(&f, 0, 0);
    count_dispatch(&f, 2 * 4); /* FLAT: the weights are sorted by the receiver */
    end(&f);
}

/* ----------------------------------------------------------------------- many steps ---- */

static void check_step(const fixture *f, const float *recv, int step)
{
    epic_plan_info info;
    int64_t wrong = 0, slot = 0;
    CHECK(epic_plan_read(f->plan, f->plan_bytes, &info) == EPIC_OK);
    for (int32_t e = f->rank * (EXPERTS / RANKS); e < (f->rank + 1) * (EXPERTS / RANKS); e++)
        for (int from = 0; from < RANKS; from++)
            for (int64_t t = 0; t < TOKENS; t++) {
                if (choose_expert(from, t, 0, step) != e) continue;
                for (int64_t i = 0; i < HIDDEN; i++)
                    wrong += recv[slot * HIDDEN + i] != value(from, t, i, step);
                slot++;
            }
    CHECK_EQ(slot, info.num_slots);
    CHECK_EQ(wrong, 0);
}

/* Uses one window in every step. Between the steps its rank overwrites it, as experts would. */
static void many_steps(const epic_bootstrap *bootstrap, void *self)
{
    static _Thread_local float tokens[TOKENS * HIDDEN];
    fixture f;
    run_random random = {run_mix(run_seed(), (uint64_t)bootstrap->rank)};
    (void)self;
    begin(&f, bootstrap, (epic_layer){.num_experts = EXPERTS, .top_k = 1});
    float *recv = take(&f, f.slots * ROW);
    for (int step = 0; step < 200; step++) {
        make_plan(&f, 7, step);
        for (int64_t i = 0; i < TOKENS * HIDDEN; i++)
            tokens[i] = value(f.rank, i / HIDDEN, i % HIDDEN, step);
        const epic_dispatch_args a = {.call = {.tag = 7},
                                      .layer = &f.layer,
                                      .plan = f.plan,
                                      .plan_bytes = f.plan_bytes,
                                      .tokens = {tokens, TOKENS, ROW},
                                      .recv = {recv, f.slots, ROW}};
        memset(recv, 0xab, (size_t)f.slots * ROW);
        if (run_chance(&random, 10)) run_nap_us((long)run_below(&random, 500));
        CHECK(epic_dispatch(f.ctx, &a) == EPIC_OK);
        check_step(&f, recv, step);
    }
    end(&f);
}

/* ---------------------------------------------------------------------------- errors ---- */

static void refused(epic_context *ctx, epic_result result, epic_result expected,
                    const char *words)
{
    CHECK_EQ(result, expected);
    CHECK_SAY(strstr(epic_error(ctx), words) != NULL, "no \"%s\" in: %s", words,
              epic_error(ctx));
}

static void wrong_arguments(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap, 20000);
    epic_window_info out;
    char byte;
    (void)self;
    epic_window_args a = {.bytes = -1};
    refused(ctx, epic_window_alloc(ctx, &a, &out), EPIC_EINVAL, "bytes is -1: must be 0 to");
    a = (epic_window_args){.bytes = 1, .data = &byte};
    refused(ctx, epic_window_alloc(ctx, &a, &out), EPIC_EINVAL, "data is given");
    a = (epic_window_args){.bytes = 1};
    refused(ctx, epic_window_register(ctx, &a, &out), EPIC_EINVAL, "data is NULL");
    a = (epic_window_args){.bytes = 1, .data = &byte, .fd_offset = -1};
    refused(ctx, epic_window_register(ctx, &a, &out), EPIC_EINVAL, "fd_offset is -1");
    a = (epic_window_args){.bytes = 1, .reserved = 1};
    refused(ctx, epic_window_alloc(ctx, &a, &out), EPIC_EINVAL, "reserved");
    CHECK(epic_check(ctx) == EPIC_OK);
    epic_close(ctx);
}

/* Adds windows until the table is full. The sizes differ between ranks, and some are 0. */
static void too_many(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap, 20000);
    epic_window_info out;
    (void)self;
    for (int i = 0; i < MOST_WINDOWS; i++) {
        const epic_window_args a = {.bytes = (i + bootstrap->rank) % 4 * 1000};
        if (!CHECK_SAY(epic_window_alloc(ctx, &a, &out) == EPIC_OK, "%s", epic_error(ctx)))
            break;
        CHECK((out.data != NULL) == (a.bytes > 0));
    }
    const epic_window_args a = {.bytes = 1};
    refused(ctx, epic_window_alloc(ctx, &a, &out), EPIC_EINVAL, "256 windows");
    epic_close(ctx);
}

/* Calls epic_window_register on all ranks; `mine` is only for rank 1. Checks that every rank
 * gets an error that names rank 1. */
static void refused_by_rank_1(epic_context *ctx, const epic_window_args *mine,
                              epic_result expected, const char *words)
{
    const epic_window_args none = {0};
    epic_window_info out;
    const epic_result result =
        epic_window_register(ctx, epic_rank(ctx) == 1 ? mine : &none, &out);
    refused(ctx, result, expected, "window of rank 1: ");
    refused(ctx, result, expected, words);
    CHECK(epic_check(ctx) == EPIC_OK);
}

static int make_file(int64_t bytes)
{
    const int fd = memfd_create("windows-test", MFD_CLOEXEC);
    CHECK(fd > 0 && ftruncate(fd, bytes) == 0);
    return fd;
}

/* Backend shm: memory that other processes cannot map. */
static void wrong_memory(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap, 20000);
    const int64_t page = sysconf(_SC_PAGESIZE), bytes = 2 * page;
    const int fd = make_file(bytes);
    char *copy = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    char *shared = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)self;
    epic_window_args a = {.bytes = bytes, .data = copy};
    refused_by_rank_1(ctx, &a, EPIC_ENOTSUP, "fd is not given");
    a.fd = fd;
    refused_by_rank_1(ctx, &a, EPIC_ENOTSUP, "data is not a shared mapping");
    a.data = shared;
    a.fd_offset = page;
    refused_by_rank_1(ctx, &a, EPIC_ENOTSUP, "cannot be mapped at fd_offset");
    a.bytes = page;
    refused_by_rank_1(ctx, &a, EPIC_ENOTSUP, "data is not a shared mapping");
    munmap(copy, (size_t)bytes);
    munmap(shared, (size_t)bytes);
    close(fd);
    epic_close(ctx);
}

/* A rank whose memory cannot be allocated. The group then still adds windows. */
static void no_memory(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap, 20000);
    epic_window_args a = {.bytes = bootstrap->rank == 1 ? (INT64_C(1) << 48) - 1 : 4096};
    epic_window_info out;
    (void)self;
    refused(ctx, epic_window_alloc(ctx, &a, &out), EPIC_ENOMEM,
            "window of rank 1: bytes is 281474976710655: ");
    a.bytes = 4096;
    CHECK(epic_window_alloc(ctx, &a, &out) == EPIC_OK && out.is_direct);
    epic_close(ctx);
}

/* Registers memory of the caller, which begins inside of a page, and dispatches into it. */
static void register_memory(const epic_bootstrap *bootstrap, void *self)
{
    const int64_t offset = 4096 + 64 * (bootstrap->rank + 1), bytes = offset + SPACE;
    const int fd = make_file(bytes);
    char *data = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    fixture f;
    (void)self;
    begin(&f, bootstrap, (epic_layer){.num_experts = EXPERTS, .top_k = 1});
    const epic_window_args a = {
        .bytes = SPACE, .data = data + offset, .fd = fd, .fd_offset = offset};
    epic_window_info out;
    CHECK_SAY(epic_window_register(f.ctx, &a, &out) == EPIC_OK, "register: %s",
              epic_error(f.ctx));
    CHECK(out.data == data + offset && out.is_direct);
    close(fd);
    f.space = out.data;
    make_plan(&f, 0, 0);
    float *recv = (float *)(void *)(f.space + f.used);
    count_dispatch(&f, 0);
    check_step(&f, recv, 0);
    end(&f);
    data[offset] = 1; /* the memory still belongs to the caller */
    munmap(data, (size_t)bytes);
}

/* Rank 1 does not add the window. */
static void missing_rank(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap, 300);
    const epic_window_args a = {.bytes = 4096};
    epic_window_info out;
    epic_failure_info failure;
    (void)self;
    if (bootstrap->rank == 1) {
        while (epic_check(ctx) == EPIC_OK) run_nap_us(1000);
    } else {
        refused(ctx, epic_window_alloc(ctx, &a, &out), EPIC_ETIMEOUT, "window");
    }
    CHECK(epic_failure(ctx, &failure) == EPIC_OK && failure.operation == EPIC_OP_WINDOW);
    CHECK(failure.num_culprits == 1 && failure.culprits[0] == 1);
    epic_close(ctx);
}

/* Rank 0 closes its context while rank 1 acts as if it stored into a window of rank 0. The
 * close must wait for rank 1. After it, rank 1 must see that it may not store any more. */
static void late_store(const epic_bootstrap *bootstrap, void *self)
{
    static _Atomic int begun, ended, num_closed; /* backend threads only */
    epic_context *ctx = open_context(bootstrap, 20000);
    const epic_window_transport *t = ctx->backend->transport->windows;
    const epic_window_args a = {.bytes = 4096};
    epic_window_info out;
    (void)self;
    CHECK(epic_window_alloc(ctx, &a, &out) == EPIC_OK);
    if (bootstrap->rank == 1) {
        t->begin_stores(ctx->group);
        CHECK(t->may_store(ctx->group, 0));
        begun = 1;
        while (t->may_store(ctx->group, 0)) run_nap_us(100); /* until rank 0 closes */
        run_nap_us(50000);
        CHECK(num_closed == 0);
        ended = 1;
        t->end_stores(ctx->group);
        while (num_closed == 0) run_nap_us(100);
    } else if (bootstrap->rank == 0) {
        while (!begun) run_nap_us(100);
        epic_close(ctx);
        CHECK(ended == 1);
        num_closed = 1;
        return;
    }
    epic_close(ctx);
}

/* Rank 1 ends while it stores into windows of its peers. Their closes wait for its end, but not
 * for their deadline. Backend shm only. */
static void ended_store(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap, 40000);
    const epic_window_args a = {.bytes = 4096};
    epic_window_info out;
    (void)self;
    CHECK(epic_window_alloc(ctx, &a, &out) == EPIC_OK);
    if (bootstrap->rank == 1) ctx->backend->transport->windows->begin_stores(ctx->group);
    CHECK(epic_window_alloc(ctx, &a, &out) == EPIC_OK); /* rank 1 has begun */
    if (bootstrap->rank == 1) {
        run_nap_us(100000);
        _exit(0);
    }
    const uint64_t begin = run_now_ns();
    epic_close(ctx);
    CHECK(run_now_ns() - begin < 30000000000ull);
}

/* EPIC_LEAST_STAGING: epic_memory reports a few rows for each peer, and all sizes shrink. */
static void least_staging(const char *name)
{
    epic_memory_info full, least;
    epic_config config = {
        .max_tokens = 4096, .max_row_bytes = 14336, .num_ranks = 4, .backend = name};
    CHECK(epic_memory(&config, NULL, &full) == EPIC_OK);
    config.staging_bytes = EPIC_LEAST_STAGING;
    CHECK(epic_memory(&config, NULL, &least) == EPIC_OK);
    CHECK(least.staging_bytes > 0 && least.staging_bytes < full.staging_bytes);
    CHECK_EQ(full.shared_bytes - least.shared_bytes, full.staging_bytes - least.staging_bytes);
    config.staging_bytes = least.staging_bytes - 1;
    CHECK(epic_memory(&config, NULL, &full) == EPIC_EINVAL);
    config.staging_bytes = least.staging_bytes; /* exactly the least that is accepted */
    CHECK(epic_memory(&config, NULL, &full) == EPIC_OK);
    CHECK_EQ(full.staging_bytes, least.staging_bytes);
}

static void *plan_in_thread(void *fixture_of_rank)
{
    make_plan(fixture_of_rank, 5, 0);
    return NULL;
}

/* While an operation of tag 5 is in flight, rank 0 often tries to add a window with this tag.
 * These calls fail and must leave nothing behind: afterwards all ranks add a window, whose
 * memory must be that of the last call. */
static void refused_calls(const epic_bootstrap *bootstrap, void *self)
{
    static _Thread_local float tokens[TOKENS * HIDDEN];
    const epic_window_args args = {.call = {.tag = 5}, .bytes = SPACE};
    epic_window_info window = {0};
    fixture f;
    pthread_t thread;
    float one = 1;
    const epic_allreduce_sum_args sum = {.call = {.tag = 7}, .data = &one, .count = 1};
    (void)self;
    begin(&f, bootstrap, (epic_layer){.num_experts = EXPERTS, .top_k = 1});
    if (f.rank == 0) {
        CHECK(pthread_create(&thread, NULL, plan_in_thread, &f) == 0);
        while (tags_check(&f.ctx->tags, 5) == EPIC_OK) run_nap_us(100);
        for (int i = 0; i < 500; i++)
            refused(f.ctx, epic_window_alloc(f.ctx, &args, &window), EPIC_EINVAL,
                    "an operation of this tag is in flight");
    }
    CHECK(epic_allreduce_sum(f.ctx, &sum) == EPIC_OK); /* the peers begin tag 5 after it */
    if (f.rank == 0)
        pthread_join(thread, NULL);
    else
        make_plan(&f, 5, 0);
    CHECK_SAY(epic_window_alloc(f.ctx, &args, &window) == EPIC_OK, "alloc: %s",
              epic_error(f.ctx));
    for (int64_t i = 0; i < TOKENS * HIDDEN; i++)
        tokens[i] = value(f.rank, i / HIDDEN, i % HIDDEN, 0);
    const epic_dispatch_args a = {.call = {.tag = 5},
                                  .layer = &f.layer,
                                  .plan = f.plan,
                                  .plan_bytes = f.plan_bytes,
                                  .tokens = {tokens, TOKENS, ROW},
                                  .recv = {window.data, f.slots, ROW}};
    CHECK(epic_dispatch(f.ctx, &a) == EPIC_OK);
    check_step(&f, window.data, 0);
    end(&f);
}

static void run(run_body *body)
{
    if (strcmp(backend, "shm") == 0)
        run_processes(RANKS, body, NULL, SECONDS);
    else
        run_threads(RANKS, body, NULL);
}

int main(void)
{
    static run_body *const bodies[] = {nothing_is_staged, many_steps,   wrong_arguments,
                                       too_many,          no_memory,    register_memory,
                                       missing_rank,      refused_calls};
    check_begin();
    run_alarm(SECONDS);
    for (int b = 0; b < 2; b++) {
        backend = b ? "shm" : "threads";
        for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) run(bodies[i]);
    }
    run(wrong_memory);
    run(ended_store);
    least_staging("shm");
    backend = "threads";
    run(late_store);
    return check_end();
}
