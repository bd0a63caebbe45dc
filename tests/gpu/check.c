/* SPDX-License-Identifier: Apache-2.0 */
/* Checks random cases on a CUDA backend against plain loops, bit for bit.
 *
 *   gpu_check RANKS GPUS threads|processes|RANKS_PER_PROCESS CASES SEED
 *             [big|tight|small|lowlat|most|usual [rows|forms|leaves|windows|drops]]
 *
 *   tight   contexts with staging of two rows, which makes many rounds
 *   lowlat  contexts for low-latency kernels (at most TEAM_LOWLAT_TOKENS tokens)
 *   most    contexts with more tokens than the library's limit for these kernels
 *   rows    only the seeds whose rows have no second rows
 *   forms   the cases of each kernel in turn (lowlat, usual)
 *   leaves  those with several leaves of the sum tree on a rank
 *   windows in half of the cases, the arrays of all ranks lie in windows; in the others, those
 *           of about two of three ranks
 *   drops   FLAT layers in which every rank drops choices
 *
 * Every rank makes the same case from the same seed, does its part, and checks its results.
 *
 * The conformance suite (tests/conformance) tests the same operations through the public API,
 * with the same oracle. This program tests what the public API cannot set or read:
 *
 *   - the token limit of the low-latency kernels (group->lowlat_tokens), so that small cases
 *     run both kinds of kernels, and `forms` runs each kernel in turn
 *   - epochs that start shortly before 2^32 (EPIC_TEST_EPOCH)
 *   - the bytes of the heap at the end: poison or zero, as before the first call
 *   - ranks that are processes, and full size (big) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case.h"
#include "scaled_cases.h"
#include "virtual_memory.h"

#define MAX_CASE_TOKENS 256
#define SMALL_CASE_TOKENS 24

static struct {
    int cases;
    uint64_t seed;
    bool big, lowlat, rows, forms, leaves, windows, drops;
    size_t arena_bytes;
} options;

/* Do all low-latency kernels support this case? */
static void check_plain(bench *b)
{
    const epic_group *g = b->me->group;
    const int64_t most = g->config.max_tokens;
    if (most > g->lowlat_tokens || !p2p_can_plan_lowlat(g->num_ranks, most, &b->c.r.layer, 0) ||
        b->c.r.layer.top_k > 32 || b->c.r.layer.layout == EPIC_FLAT)
        report_wrong(b, "the low-latency kernels do not support it");
}

static void run_case(bench *b)
{
    arrays a;
    sums s;
    if (b->c.plain) check_plain(b);
    b->used = 0;
    b->call = (epic_call){.stream = b->me->stream, .tag = b->c.seed};
    make_inputs(b, &a);
    team_barrier(b->me);
    if (b->c.fused) {
        if (!call_plan_dispatch(b, &a)) return;
        check_plan(b, &a);
        check_dispatch(b, &a, "plan_dispatch");
        dirty_received(b, &a);
    } else {
        if (!call_plan(b, &a)) return;
        check_plan(b, &a);
    }
    if (!call_dispatch(b, &a)) return;
    check_dispatch(b, &a, "dispatch");
    make_sums(b, &s);
    if (case_moves(&b->c) || b->c.r.result) {
        if (!call_combine(b, &a, &s) || !call_dispatch_backward(b, &a, &s) ||
            !call_combine_backward(b, &a, &s))
            return;
        check_sums(b, &s);
    }
    epic_failure_info failure;
    if (p2p_ops.poll_failure(b->me->group, &failure) != EPIC_OK)
        report_wrong(b, "%s", failure.sentence);
}

/* Staging, floats and parts must contain poison again, escapes zeros. */
static void check_heap(bench *b, const uint8_t *memory)
{
    const p2p_heap *at = &b->me->group->self.at;
    uint8_t *heap = malloc((size_t)at->bytes);
    cudaMemcpy(heap, memory, (size_t)at->bytes, cudaMemcpyDefault);
    for (int64_t i = at->floats; i < at->bytes; i++)
        if (heap[i] != 0xff) {
            report_wrong(b,
                         "heap byte %lld is %02x, not ff (floats %lld parts %lld staging %lld)",
                         (long long)i, heap[i], (long long)at->floats, (long long)at->parts,
                         (long long)at->staging);
            break;
        }
    for (int64_t i = at->escapes; i < at->floats; i++)
        if (heap[i]) {
            report_wrong(b, "escape byte %lld is %02x", (long long)(i - at->escapes), heap[i]);
            break;
        }
    free(heap);
}

static void check_restored(bench *b)
{
    const p2p_self *self = &b->me->group->self;
    check_heap(b, self->heap[self->rank]);
    if (HOSTS) check_heap(b, self->net->inbox);
}

/* Returns the kind of case i: the first cases suit all low-latency kernels, the last ones are
 * of any kind. */
static case_kind kind_of(int i)
{
    if (options.drops) return CASE_FLAT_DROPS;
    if (!options.lowlat || i >= options.cases - options.cases / 4) return CASE_ANY;
    return i < (options.cases + 1) / 2 ? CASE_PLAIN : CASE_LOWLAT;
}

static void draw_next(bench *b, uint64_t seed, int i)
{
    const epic_config *config = &b->me->group->config;
    if (options.big)
        draw_big(&b->c, seed, b->me->num_ranks, config->max_tokens);
    else if (options.leaves)
        draw_form(&b->c, seed, CASE_LEAVES + i % (CASE_FORMS - CASE_LEAVES), b->me->num_ranks,
                  config->max_tokens);
    else if (options.forms)
        draw_form(&b->c, seed, i % CASE_FORMS, b->me->num_ranks, config->max_tokens);
    else
        draw_case(&b->c, seed, b->me->num_ranks, config->max_tokens, config->max_row_bytes,
                  kind_of(i));
}

/* The memory of the windows of a rank that EPIC has not allocated. */
typedef struct own_memory {
    uint8_t *allocation;
    virtual_memory chunks;
} own_memory;

static void make_own_memory(own_memory *own, int device)
{
    const size_t bytes = options.arena_bytes + 12288;
    CHECK_CUDA(cudaMalloc((void **)&own->allocation, bytes));
    const CUresult error = virtual_make(&own->chunks, 2, bytes / 2 + 1,
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, device, 1);
    if (error == CUDA_SUCCESS) return;
    fprintf(stderr, "virtual memory: error %d\n", (int)error);
    team_stop();
}

static void free_own_memory(own_memory *own)
{
    CHECK_CUDA(cudaFree(own->allocation));
    if (virtual_free(&own->chunks) == CUDA_SUCCESS) return;
    fprintf(stderr, "virtual memory cannot be freed\n");
    team_stop();
}

enum { NUM_WINDOWS = 3 }; /* with memory */

/* Makes windows of the group: one that EPIC allocates, one in the middle of memory of
 * cudaMalloc, and one that spans two allocations of cuMemCreate. Ranks have windows of
 * different sizes, and one rank has no memory. Sets `arenas` to the memory of the windows. */
static void add_windows(team_rank *me, uint8_t **arenas, own_memory *own)
{
    const int64_t bytes = (int64_t)options.arena_bytes;
    const int before = 4096 + 256 * (me->rank % 3);
    epic_window_info none = {0}, window = {0};
    make_own_memory(own, me->group->device);
    const epic_window_args args[] = {
        {.bytes = me->rank == 0 ? 0 : 4096 * me->rank},
        {.bytes = bytes + 256 * me->rank},
        {.bytes = bytes, .data = own->allocation + before},
        {.bytes = bytes + 16 * me->rank, .data = own->chunks.base + before}};
    for (int i = 0; i <= NUM_WINDOWS; i++) {
        epic_window_info *out = i == 0 ? &none : &window;
        if (p2p_ops.add_window(me->group, &args[i], out) != EPIC_OK || !out->is_direct ||
            out->bytes != args[i].bytes || !out->data != !out->bytes) {
            fprintf(stderr, "rank %d, window %d: %s\n", me->rank, i, epic_error(NULL));
            team_stop();
        }
        if (i) arenas[i - 1] = window.data;
    }
}

/* Chooses the memory in which this rank's arrays of the case lie: ordinary memory or a window.
 * In half of the cases all ranks choose a window, because otherwise rows go through staging. In
 * the others each rank chooses for itself. */
static void choose_arena(bench *b, uint8_t *const *arenas, int count)
{
    uint64_t common = b->c.seed * 17, state = b->c.seed * 31 + (uint64_t)b->me->rank;
    const int first = draw_between(&common, 0, 1) ? 1 : 0;
    b->arena = arenas[count > 1 ? draw_between(&state, first, count - 1) : 0];
}

/* Returns whether the test runs the case. With `rows` it leaves out cases with scales. With
 * `windows` it leaves out most cases in which all rows go through staging in any case. */
static bool is_wanted(const bench *b)
{
    const epic_layer *l = &b->c.r.layer;
    const bool can_be_direct =
        !b->c.scale_bytes && (l->top_k == 1 || (l->layout == EPIC_FLAT && b->c.seed % 4 == 0));
    if (options.rows && b->c.scale_bytes) return false;
    return !options.windows || can_be_direct || b->c.seed % 32 == 0;
}

static int run_rank(team_rank *me)
{
    bench b = {.me = me, .arena_bytes = options.arena_bytes};
    uint8_t *arenas[1 + NUM_WINDOWS];
    own_memory own;
    CHECK_CUDA(cudaMalloc((void **)&arenas[0], options.arena_bytes));
    if (options.windows) add_windows(me, arenas + 1, &own);
    team_barrier(me);
    uint64_t seed = options.seed;
    for (int i = 0; i < options.cases;) {
        draw_next(&b, seed++, i);
        if (is_wanted(&b)) {
            choose_arena(&b, arenas, options.windows ? 1 + NUM_WINDOWS : 1);
            run_case(&b);
            i++;
        }
        if (b.wrong) team_stop();
        free_routing(&b.c.r);
    }
    CHECK_CUDA(cudaStreamSynchronize(me->stream));
    team_barrier(me);
    check_restored(&b);
    if (b.wrong) team_stop();
    team_barrier(me);
    CHECK_CUDA(cudaFree(arenas[0]));
    /* The group still has the windows in `own`, but no rank stores into them any more. */
    if (options.windows) free_own_memory(&own);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 6) {
        fprintf(stderr,
                "gpu_check RANKS GPUS threads|processes|RANKS_PER_PROCESS CASES SEED "
                "[big|tight|small|lowlat|most|usual [rows|forms|leaves|windows|drops]]\n");
        return 2;
    }
    const bool big = argc > 6 && !strcmp(argv[6], "big");
    /* little staging memory, so that operations need many rounds */
    const bool tight = argc > 6 && !strcmp(argv[6], "tight");
    const bool most = argc > 6 && !strcmp(argv[6], "most");
    const bool lowlat = argc > 6 && !strcmp(argv[6], "lowlat");
    const bool small = argc > 6 && !strcmp(argv[6], "small"); /* small cases, for slow tools */
    options.seed = strtoull(argv[5], NULL, 10);
    options.big = big;
    options.lowlat = lowlat;
    options.rows = argc > 7 && !strcmp(argv[7], "rows");
    options.forms = argc > 7 && !strcmp(argv[7], "forms");
    options.leaves = argc > 7 && !strcmp(argv[7], "leaves");
    options.windows = argc > 7 && !strcmp(argv[7], "windows");
    options.drops = argc > 7 && !strcmp(argv[7], "drops");
    /* the cases of these options are selected, so all of them run */
    const bool selected = options.forms || options.leaves || most;
    options.cases = selected ? atoi(argv[4]) : scaled_cases(atoi(argv[4]));
    options.arena_bytes = (size_t)(big ? 3072 : small ? 128 : 1200) << 20;
    team t = {.num_ranks = atoi(argv[1]),
              .num_gpus = atoi(argv[2]),
              .ranks_per_process = team_ranks_per_process(argv[3]),
              .max_tokens = big      ? 4096
                            : small  ? SMALL_CASE_TOKENS
                            : most   ? MOST_CASE_TOKENS
                            : lowlat ? TEAM_LOWLAT_TOKENS
                                     : MAX_CASE_TOKENS,
              .max_row_bytes = big     ? 14336
                               : small ? 2048
                                       : 7168,
              .staging_bytes = tight ? 1 : 0, /* tight: the minimum, which is two rows */
              .lowlat_tokens = big || most ? 0 : TEAM_LOWLAT_TOKENS,
              .timeout_ms = TEAM_LONG_MS,
              .work = run_rank};
    const int failed = team_run(&t);
    printf("gpu_check %s ranks, %s GPUs, %s, %d cases from seed %llu%s: %s\n", argv[1], argv[2],
           argv[3], options.cases, (unsigned long long)options.seed,
           big      ? ", full size"
           : tight  ? ", little staging"
           : small  ? ", small"
           : most   ? ", large low-latency limit"
           : lowlat ? ", low latency"
                    : "",
           failed ? "WRONG" : "good");
    return failed != 0;
}
