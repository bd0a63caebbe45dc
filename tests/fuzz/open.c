/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzes epic_open with a bootstrap whose other ranks do not exist. Their records are copies of
 * this rank's own, changed by the input. Backends: self, threads and shm. */
#include <string.h>

#include "api/rank_info.h"
#include "fuzz/world.h"

#define TIMEOUT_MS 100

typedef struct forger {
    const uint8_t *at;
    size_t left;
    int rank, num_ranks;
} forger;

static uint8_t next(forger *f)
{
    if (f->left == 0) return 0;
    f->left--;
    return *f->at++;
}

/* Changes runs of bytes until the input ends this gather. */
static void change(forger *f, uint8_t *all, size_t bytes)
{
    while (f->left > 0 && next(f) % 4 != 0) {
        size_t at = next(f);
        at = (at << 8 | next(f)) % bytes;
        for (int n = next(f) % 16; n >= 0 && at < bytes; n--) all[at++] = next(f);
    }
}

static epic_result forge(void *self, const void *mine, void *all, int64_t bytes)
{
    forger *f = self;
    for (int r = 0; r < f->num_ranks; r++) {
        uint8_t *record = (uint8_t *)all + (size_t)r * bytes;
        memcpy(record, mine, bytes);
        if (bytes == sizeof(rank_info)) ((rank_info *)(void *)record)->rank = r;
    }
    change(f, all, (size_t)f->num_ranks * bytes);
    if (next(f) % 2 == 0) memcpy((uint8_t *)all + (size_t)f->rank * bytes, mine, bytes);
    return next(f) == 255 ? (epic_result)next(f) : EPIC_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const backends[] = {NULL, "self", "threads", "shm"};
    forger f = {.at = data, .left = size};
    const uint8_t flags = next(&f);
    f.num_ranks = 1 + flags % 4;
    f.rank = (flags >> 2) % 4 % f.num_ranks;
    const epic_bootstrap bootstrap = {f.rank, f.num_ranks, forge, NULL, &f};
    const epic_config config = {.max_tokens = 2,
                                .max_row_bytes = 16,
                                .max_in_flight = 1,
                                .timeout_ms = TIMEOUT_MS,
                                .backend = backends[flags >> 4 & 3]};
    epic_context *ctx = NULL;
    fuzz_begin(4 * TIMEOUT_MS);
    const epic_result result = epic_open(&ctx, &bootstrap, &config);
    if (result < EPIC_OK || result > EPIC_EEVICTED) __builtin_trap();
    /* an open without real peers must not succeed */
    if (result == EPIC_OK && f.num_ranks > 1) __builtin_trap();
    if (result == EPIC_OK && epic_check(ctx) != EPIC_OK) __builtin_trap();
    epic_close(ctx);
    return 0;
}
