/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_open of CUDA contexts with a bootstrap that changes the data which ranks exchange
 * when they join. The result must be an error and never a crash, and the next group opens.
 *
 *   usage: rogue [TRIALS] */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epic/epic.h"
#include "scaled_cases.h"

enum { RANKS = 3, MAX_BYTES = 640 /* backends gather less; a rank_info is larger */ };

typedef struct seat {
    epic_bootstrap inner;
    uint64_t random;
    /* lies: this rank's bootstrap changes data; honest: no other rank's bootstrap does */
    int lies, honest;
    epic_result result;
    char sentence[512];
} seat;

static uint64_t next_random(seat *s)
{
    uint64_t x = s->random += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    return x ^ x >> 31;
}

static void make_lie(seat *s, unsigned char *record, size_t bytes)
{
    static const int64_t huge[] = {-1, INT64_MAX, INT64_MIN, 1ll << 32, 0x7fffffff, 0};
    switch (next_random(s) % 4) {
    case 0:
        memset(record, next_random(s) % 2 ? 0xff : 0, bytes);
        break;
    case 1:
        for (size_t i = 0; i < bytes; i++) record[i] = (unsigned char)next_random(s);
        break;
    case 2:
        memcpy(record + next_random(s) % (bytes / 8) * 8, &huge[next_random(s) % 6], 8);
        break;
    default:
        record[next_random(s) % bytes] ^= (unsigned char)(1 << next_random(s) % 8);
    }
}

static epic_result gather_lies(void *self, const void *mine, void *all, int64_t bytes)
{
    seat *s = self;
    const epic_result result = s->inner.gather(s->inner.self, mine, all, bytes);
    if (result != EPIC_OK || !s->lies || bytes >= MAX_BYTES) return result;
    const int rank = (int)(next_random(s) % RANKS);
    if (rank != s->inner.rank) make_lie(s, (unsigned char *)all + (size_t)rank * bytes, bytes);
    return EPIC_OK;
}

static void *run_rank(void *self)
{
    seat *s = self;
    const epic_config config = {.max_tokens = 8,
                                .max_row_bytes = 64,
                                .backend = "p2p",
                                .timeout_ms = s->honest ? 60000 : 2000};
    const epic_bootstrap bootstrap = {s->inner.rank, RANKS, gather_lies, NULL, s};
    epic_context *ctx = NULL;
    s->result = epic_open(&ctx, &bootstrap, &config);
    snprintf(s->sentence, sizeof s->sentence, "%s", s->result ? epic_error(ctx) : "");
    epic_bootstrap_close(&s->inner);
    epic_close(ctx);
    return NULL;
}

/* Returns the number of ranks whose open failed. */
static int open_all(uint64_t seed, int lies)
{
    epic_bootstrap bootstraps[RANKS];
    seat seats[RANKS];
    pthread_t threads[RANKS];
    int failed = 0;
    if (epic_bootstrap_threads(bootstraps, RANKS, lies ? 10000 : 60000) != EPIC_OK)
        return RANKS;
    for (int r = 0; r < RANKS; r++) {
        seats[r] = (seat){.inner = bootstraps[r], .random = seed * 64 + (uint64_t)r};
        seats[r].lies = lies >> r & 1;
        seats[r].honest = !lies;
        pthread_create(&threads[r], NULL, run_rank, &seats[r]);
    }
    for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < RANKS; r++) {
        failed += seats[r].result != EPIC_OK;
        if (seats[r].result < EPIC_OK || seats[r].result > EPIC_ECLOSED) exit(1);
        if (!lies && seats[r].result) fprintf(stderr, "rank %d: %s\n", r, seats[r].sentence);
    }
    return failed;
}

int main(int argc, char **argv)
{
    const int trials = scaled_cases(argc > 1 ? atoi(argv[1]) : 60);
    int failed = 0;
    for (int i = 1; i <= trials; i++) failed += open_all((uint64_t)i, 1 + i % 7) > 0;
    if (open_all(0, 0) != 0) return 1;
    printf("rogue: %d of %d groups failed to open, and the next one opened\n", failed, trials);
    return failed > trials / 4 ? 0 : 1;
}
