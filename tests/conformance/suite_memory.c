/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays of a call: made in host memory, copied to the memory of the backend; and the
 * features that the backend lacks. */
#include "suite_memory.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "suite_case.h"

/* ----------------------------------------------------------------------- host memory ---- */

static void *allocate(int64_t bytes)
{
    return malloc((size_t)bytes);
}

static void copy(void *to, const void *from, int64_t bytes)
{
    memcpy(to, from, (size_t)bytes);
}

static const suite_memory host = {
    .allocate = allocate, .release = free, .copy = copy, .most_experts = UINT32_MAX};

const suite_memory *suite_there = &host;

/* --------------------------------------------------------------------------- windows ---- */

#define MOST_ARENAS (2 * RUN_MAX_RANKS) /* two groups of ranks that are threads */
#define ARENA_BYTES (8 << 20)

/* A window of one context, from which arrays of calls are taken. Its memory is reused when all
 * arrays were returned. */
static struct {
    epic_context *ctx;
    unsigned char *base;
    int64_t used, count;
} arenas[MOST_ARENAS];
static pthread_mutex_t arenas_mutex = PTHREAD_MUTEX_INITIALIZER;

static int find_arena(const epic_context *ctx)
{
    int i = 0;
    while (i < MOST_ARENAS && arenas[i].ctx != ctx) i++;
    return i;
}

void case_windows_open(epic_context *ctx)
{
    epic_window_info window;
    const epic_window_args args = {.bytes = ARENA_BYTES};
    if (!CHECK_SAY(epic_window_alloc(ctx, &args, &window) == EPIC_OK, "epic_window_alloc: %s",
                   epic_error(ctx)))
        return;
    pthread_mutex_lock(&arenas_mutex);
    const int i = find_arena(NULL);
    if (i == MOST_ARENAS) abort(); /* a mistake of the test itself */
    arenas[i].ctx = ctx;
    arenas[i].base = window.data;
    arenas[i].used = arenas[i].count = 0;
    pthread_mutex_unlock(&arenas_mutex);
}

void case_windows_close(const epic_context *ctx)
{
    pthread_mutex_lock(&arenas_mutex);
    const int i = find_arena(ctx);
    if (i < MOST_ARENAS) arenas[i].ctx = NULL;
    pthread_mutex_unlock(&arenas_mutex);
}

/* Returns memory in the window of the context, or NULL if it has none or the window is full. */
static void *take_from_window(const epic_context *ctx, int64_t bytes)
{
    void *at = NULL;
    pthread_mutex_lock(&arenas_mutex);
    const int i = find_arena(ctx);
    if (i < MOST_ARENAS && arenas[i].used + bytes + 64 <= ARENA_BYTES) {
        at = arenas[i].base + arenas[i].used;
        arenas[i].used += (bytes + 63) / 64 * 64;
        arenas[i].count++;
    }
    pthread_mutex_unlock(&arenas_mutex);
    return at;
}

/* Returns memory to the window. Returns false if it is not in the window. */
static bool return_to_window(const epic_context *ctx, const void *memory)
{
    const uintptr_t at = (uintptr_t)memory;
    pthread_mutex_lock(&arenas_mutex);
    const int i = find_arena(ctx);
    const uintptr_t base = i < MOST_ARENAS ? (uintptr_t)arenas[i].base : 0;
    const bool inside = i < MOST_ARENAS && at >= base && at < base + ARENA_BYTES;
    if (inside && --arenas[i].count == 0) arenas[i].used = 0;
    pthread_mutex_unlock(&arenas_mutex);
    return inside;
}

/* ---------------------------------------------------------------------------- arrays ---- */

epic_rows case_rows(seat *s, int64_t num_rows, int64_t row_bytes)
{
    epic_rows rows = {NULL, num_rows, row_bytes};
    const int64_t bytes = num_rows * row_bytes;
    if (bytes == 0) return rows;
    if (s->num_arrays == CASE_MOST_ARRAYS) abort(); /* a mistake of the test itself */
    rows.data = malloc((size_t)bytes);
    memset(rows.data, CASE_POISON, (size_t)bytes);
    s->arrays[s->num_arrays++] = (case_array){.here = rows.data, .bytes = bytes};
    return rows;
}

/* Returns an address even for 0 bytes. */
void *case_copy(seat *s, const void *from, int64_t bytes)
{
    void *here = case_rows(s, 1, bytes > 0 ? bytes : 1).data;
    if (bytes > 0) memcpy(here, from, (size_t)bytes);
    return here;
}

/* Releases all arrays except those of the plan. */
void case_drop(seat *s)
{
    while (s->num_arrays > 1) free(s->arrays[--s->num_arrays].here);
    s->shift = 0;
}

/* ----------------------------------------------------------------------------- calls ---- */

void case_choose_shift(seat *s, const run_random *common, uint32_t type, bool quantize)
{
    run_random random = {run_mix(common->state, 800)};
    if (run_chance(&random, 20)) s->shift = quantize ? 4 : oracle_type_bytes(type);
}

static void *lend_shifted(seat *s, const void *here, int64_t shift)
{
    for (int i = 0; here && i < s->num_arrays; i++) {
        case_array *a = &s->arrays[i];
        if (a->here != here) continue;
        /* Two of three arrays, if the context has a window. Each rank draws for itself. */
        if (run_chance(&s->places, 67)) a->base = take_from_window(s->ctx, a->bytes + shift);
        if (!a->base) a->base = suite_there->allocate(a->bytes + shift);
        a->there = (char *)a->base + shift;
        suite_there->copy(a->there, a->here, a->bytes);
        return a->there;
    }
    if (here) abort(); /* the test passed an address that is no array of the phase */
    return NULL;
}

void *case_lend(seat *s, const void *here)
{
    return lend_shifted(s, here, 0);
}

epic_rows case_lend_rows(seat *s, epic_rows here)
{
    here.data = lend_shifted(s, here.data, s->shift);
    return here;
}

epic_const_rows case_lend_const_rows(seat *s, epic_const_rows here)
{
    here.data = lend_shifted(s, here.data, s->shift);
    return here;
}

static void take_back(seat *s)
{
    for (int i = 0; i < s->num_arrays; i++) {
        case_array *a = &s->arrays[i];
        if (!a->base) continue;
        suite_there->copy(a->here, a->there, a->bytes);
        if (!return_to_window(s->ctx, a->base)) suite_there->release(a->base);
        a->base = NULL;
    }
}

epic_call case_call(const seat *s)
{
    return (epic_call){.tag = s->tag,
                       .stream = suite_there->stream ? suite_there->stream() : NULL};
}

bool case_lacks(uint32_t needs)
{
    return (needs & suite_there->lacks) != 0;
}

static _Atomic long lacked;

long case_num_lacked(void)
{
    return atomic_load(&lacked);
}

bool case_agree(const epic_bootstrap *bootstrap, bool mine)
{
    const uint32_t said = mine;
    uint32_t all[RUN_MAX_RANKS] = {said};
    if (bootstrap->num_ranks > 1 &&
        !CHECK(bootstrap->gather(bootstrap->self, &said, all, sizeof said) == EPIC_OK))
        return false;
    for (int r = 0; r < bootstrap->num_ranks; r++)
        if (!all[r]) return false;
    return true;
}

/* Checks that every rank refused the call. Otherwise the ranks that did not would wait for
 * the others. */
static void check_refused(seat *s, epic_result result)
{
    CHECK_SAY(case_agree(s->bootstrap, result == EPIC_ENOTSUP),
              "rank %d: %s to what the backend lacks, or another rank did not say EPIC_ENOTSUP",
              s->rank, epic_result_name(result));
    atomic_fetch_add(&lacked, s->rank == 0);
}

/* On a device, errors in the data are reported once the work has finished. */
epic_result case_return(seat *s, epic_result result, uint32_t needs)
{
    if (case_lacks(needs)) check_refused(s, result);
    if (suite_there->synchronise) {
        suite_there->synchronise();
        if (result == EPIC_OK) result = epic_check(s->ctx);
    }
    take_back(s);
    return result;
}
