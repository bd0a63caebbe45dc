/* SPDX-License-Identifier: Apache-2.0 */
/* Tests EPIC_TRACE. The files of the ranks contain their plans and operations. If a write
 * fails, a file ends there. If the folder cannot be written, open fails on every rank. */
#include "base/trace.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "run.h"

#define RANKS 2
#define TOKENS 3
#define TOP_K 2

static char folder[64];

typedef struct seat {
    epic_bootstrap bootstrap;
    uint32_t experts;
    int steps;
    epic_result opened;
    char why[512];
} seat;

/* Returns an id that depends on rank, step and position; some are -1. */
static int64_t id_of(const seat *s, int step, int64_t i)
{
    const int64_t id = (s->bootstrap.rank * 31 + step * 7 + i) % (int64_t)s->experts;
    return i == 1 ? -5 : i == 2 ? (int64_t)s->experts - 1 : id;
}

static void plan(epic_context *ctx, const seat *s, int step)
{
    const epic_config config = {.max_tokens = TOKENS, .max_row_bytes = 8, .num_ranks = RANKS};
    const epic_layer layer = {.num_experts = s->experts, .top_k = TOP_K};
    int64_t bytes;
    CHECK(epic_plan_bytes(&config, &layer, &bytes) == EPIC_OK);
    void *memory = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    int64_t ids[TOKENS * TOP_K];
    for (int64_t i = 0; i < TOKENS * TOP_K; i++) ids[i] = id_of(s, step, i);
    const epic_plan_args args = {.call.tag = 9,
                                 .layer = &layer,
                                 .plan = memory,
                                 .plan_bytes = bytes,
                                 .topk_idx = ids,
                                 .index_type = EPIC_I64,
                                 .num_tokens = TOKENS};
    CHECK(epic_plan(ctx, &args) == EPIC_OK);
    free(memory);
}

static void *run_rank(void *argument)
{
    seat *s = argument;
    epic_context *ctx;
    const epic_config config = {
        .max_tokens = TOKENS, .max_row_bytes = 8, .name = "a group/of traces"};
    s->opened = epic_open(&ctx, &s->bootstrap, &config);
    if (s->opened == EPIC_OK)
        for (int step = 0; step < s->steps; step++) plan(ctx, s, step);
    snprintf(s->why, sizeof s->why, "%s", epic_error(ctx));
    epic_close(ctx);
    return NULL;
}

static void run(seat seats[RANKS], uint32_t experts, int steps)
{
    epic_bootstrap bootstraps[RANKS];
    pthread_t threads[RANKS];
    CHECK(epic_bootstrap_threads(bootstraps, RANKS, 30000) == EPIC_OK);
    for (int r = 0; r < RANKS; r++) {
        seats[r] = (seat){.bootstrap = bootstraps[r], .experts = experts, .steps = steps};
        CHECK(pthread_create(&threads[r], NULL, run_rank, &seats[r]) == 0);
    }
    for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < RANKS; r++) epic_bootstrap_close(&bootstraps[r]);
}

/* Reads the file of a rank and removes it. Returns its size. */
static size_t take(int rank, unsigned char *out, size_t size)
{
    char path[512], ending[32];
    size_t length = 0;
    snprintf(ending, sizeof ending, "-%d.epictrace", rank);
    DIR *files = opendir(folder);
    if (!CHECK(files != NULL)) return 0;
    for (struct dirent *file; (file = readdir(files));) {
        if (!strstr(file->d_name, ending)) continue;
        CHECK(!strncmp(file->d_name, "a_group_of_traces-", 18));
        snprintf(path, sizeof path, "%s/%.255s", folder, file->d_name);
        FILE *in = fopen(path, "rb");
        if (!CHECK(in != NULL)) continue;
        length = fread(out, 1, size, in);
        fclose(in);
        unlink(path);
    }
    closedir(files);
    return length;
}

static void check_plan(const seat *s, const trace_record *r, const unsigned char *ids, int step)
{
    CHECK(r->tag == 9 && r->sequence == (uint64_t)step && r->time_ns > 0);
    CHECK(r->plan.num_tokens == TOKENS && r->plan.top_k == TOP_K);
    CHECK(r->plan.num_experts == s->experts && r->plan.alignment == 1);
    CHECK(r->id_bytes == (s->experts < 256 ? 1u : s->experts < 65536 ? 2u : 4u));
    CHECK(r->payload == (TOKENS * TOP_K * r->id_bytes + 7) / 8 * 8);
    for (int64_t i = 0; i < TOKENS * TOP_K; i++) {
        uint32_t id = 0;
        memcpy(&id, ids + i * r->id_bytes, r->id_bytes);
        const uint32_t none = UINT32_MAX >> (32 - 8 * r->id_bytes);
        CHECK(id == (id_of(s, step, i) < 0 ? none : (uint32_t)id_of(s, step, i)));
    }
}

static void all_is_there(uint32_t experts)
{
    enum { STEPS = 3 };
    static unsigned char bytes[1 << 16];
    seat seats[RANKS];
    run(seats, experts, STEPS);
    for (int r = 0; r < RANKS; r++) {
        CHECK(seats[r].opened == EPIC_OK);
        const size_t size = take(r, bytes, sizeof bytes);
        trace_header header;
        if (!CHECK(size >= sizeof header)) continue;
        memcpy(&header, bytes, sizeof header);
        CHECK(!memcmp(header.magic, TRACE_MAGIC, 8) && header.version == TRACE_VERSION);
        CHECK(header.header_bytes == sizeof header && header.rank == r);
        CHECK(header.num_ranks == RANKS && !strcmp(header.name, "a group/of traces"));
        int plans = 0, operations = 0;
        for (size_t at = sizeof header; at < size;) {
            trace_record record;
            if (!CHECK(size - at >= sizeof record)) break;
            memcpy(&record, bytes + at, sizeof record);
            at += sizeof record;
            if (!CHECK(size - at >= record.payload)) break;
            if (record.kind == TRACE_PLAN) check_plan(&seats[r], &record, bytes + at, plans++);
            if (record.kind == TRACE_OPERATION) {
                CHECK(record.payload == 0 && record.done.operation == EPIC_OP_PLAN);
                CHECK(record.sequence == (uint64_t)operations++ &&
                      record.done.result == EPIC_OK);
                CHECK(record.done.end_ns >= record.time_ns);
            }
            at += record.payload;
        }
        CHECK(plans == STEPS && operations == STEPS);
    }
}

/* Limits the size of files: the trace ends, but the program continues. */
static void a_full_disk(void)
{
    const pid_t child = run_fork();
    CHECK(child >= 0);
    if (child == 0) {
        const struct rlimit limit = {1 << 20, 1 << 20};
        epic_trace *trace;
        trace_header header = {.magic = {TRACE_MAGIC}, .num_ranks = 1, .name = "full"};
        trace_record record = {
            .plan = {.num_tokens = 1 << 19, .top_k = 1, .num_experts = 300, .alignment = 1}};
        int32_t *ids = calloc(1 << 19, sizeof *ids);
        if (setrlimit(RLIMIT_FSIZE, &limit) || !ids) _exit(1);
        if (trace_open(&trace, folder, &header) != EPIC_OK) _exit(2);
        for (int i = 0; i < 3; i++) trace_plan(trace, record, ids, EPIC_I32);
        if (trace_close(trace)) _exit(3); /* close reports that the trace is incomplete */
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    char command[128];
    snprintf(command, sizeof command, "rm -f %s/full-*", folder);
    CHECK(system(command) == 0);
}

static void a_folder_that_is_none(void)
{
    char path[128];
    seat seats[RANKS];
    snprintf(path, sizeof path, "%s/no/such", folder);
    CHECK(setenv("EPIC_TRACE", path, 1) == 0);
    run(seats, 8, 1);
    for (int r = 0; r < RANKS; r++) {
        CHECK(seats[r].opened == EPIC_EINVAL);
        CHECK(strstr(seats[r].why, "EPIC_TRACE is \"") && strstr(seats[r].why, "unset it"));
    }
    CHECK(setenv("EPIC_TRACE", "", 1) == 0);
    run(seats, 8, 1);
    CHECK(seats[0].opened == EPIC_OK && seats[1].opened == EPIC_OK);
}

int main(void)
{
    check_begin();
    snprintf(folder, sizeof folder, "/tmp/epic-trace-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    CHECK(setenv("EPIC_TRACE", folder, 1) == 0);
    all_is_there(8);
    all_is_there(254);
    all_is_there(256);
    all_is_there(65536);
    a_full_disk();
    a_folder_that_is_none();
    CHECK(rmdir(folder) == 0); /* all files were removed */
    return check_end();
}
