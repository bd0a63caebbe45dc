/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic_open over a malicious bootstrap. Its gathers give a rank forged records of its
 * peers: random bytes, flipped bits, unterminated texts, huge numbers, or records of other
 * ranks. There must be no crash (AddressSanitizer checks this), no wait past the deadline, and
 * no EPIC_OK with an unusable context. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "api/rank_info.h"
#include "check.h"
#include "run.h"

#define RANKS 3
#define PATIENCE_MS 300 /* deadline of a group, for which a rank waits for a peer that left */
#define HONEST_MS 40000 /* deadline if all ranks are honest, which should never pass */
#define MOST_NS 20000000000ull

static const epic_config good = {
    .max_tokens = 4, .max_row_bytes = 64, .max_in_flight = 2, .timeout_ms = PATIENCE_MS};

/* A bootstrap that calls an honest one, and changes what it returns. */
typedef struct liar {
    epic_bootstrap inner;
    run_random random;
    int which;   /* number of the gather that it changes, from 0; -1: every gather */
    int gathers; /* number of gathers so far */
    bool lied;
} liar;

/* -------------------------------------------------------------------------------- lies ---- */

static void flip_bits(liar *l, unsigned char *record, size_t bytes)
{
    for (int64_t i = run_between(&l->random, 1, 8); i > 0; i--)
        record[run_below(&l->random, (int64_t)bytes)] ^=
            (unsigned char)(1 << run_below(&l->random, 8));
}

static void huge_numbers(liar *l, unsigned char *record, size_t bytes)
{
    static const int64_t huge[] = {INT64_MAX,    INT64_MIN, -1,     INT32_MAX, 1ll << 32,
                                   1ll << 33,    1ll << 62, 0,      10,        INT32_MIN,
                                   0xffffffffll, 65536,     1 << 20};
    for (int64_t i = run_between(&l->random, 1, 4); i > 0 && bytes >= 8; i--) {
        const int64_t number = huge[run_below(&l->random, sizeof huge / sizeof *huge)];
        memcpy(record + run_below(&l->random, (int64_t)bytes / 8) * 8, &number, sizeof number);
    }
}

static void garble(liar *l, unsigned char *record, size_t bytes)
{
    const int64_t begin = run_below(&l->random, (int64_t)bytes);
    for (int64_t i = begin; i < (int64_t)bytes; i++)
        record[i] = (unsigned char)run_next(&l->random);
}

/* Makes every text of a rank_info unterminated, or adds terminal control codes. */
static void endless_texts(liar *l, unsigned char *record, size_t bytes)
{
    rank_info *h = (rank_info *)(void *)record;
    const int letter = run_chance(&l->random, 50) ? 'x' : 27;
    if (bytes != sizeof *h) return;
    switch (run_below(&l->random, 3)) {
    case 0:
        memset(h->backend, letter, sizeof h->backend);
        break;
    case 1:
        memset(h->name, letter, sizeof h->name);
        break;
    default:
        memset(h->sentence, letter, sizeof h->sentence);
        h->refused = run_between(&l->random, 0, 10);
    }
}

static void lie_about(liar *l, unsigned char *all, int rank, size_t bytes)
{
    unsigned char *record = all + (size_t)rank * bytes;
    const int other = (int)run_below(&l->random, l->inner.num_ranks);
    switch (run_below(&l->random, 7)) {
    case 0:
        garble(l, record, bytes);
        break;
    case 1:
        memset(record, run_chance(&l->random, 50) ? 0 : 0xff, bytes);
        break;
    case 2:
        memmove(record, all + (size_t)other * bytes, bytes);
        break;
    case 3:
        endless_texts(l, record, bytes);
        break;
    case 4:
        flip_bits(l, record, bytes);
        break;
    default:
        huge_numbers(l, record, bytes);
    }
}

static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    liar *l = self;
    const int number = l->gathers++;
    const epic_result result = l->inner.gather(l->inner.self, mine, all, bytes);
    if (result != EPIC_OK || (l->which >= 0 && l->which != number)) return result;
    l->lied = true;
    const int first = (int)run_below(&l->random, l->inner.num_ranks);
    const int last = run_chance(&l->random, 50) ? first : l->inner.num_ranks - 1;
    for (int r = first; r <= last; r++) lie_about(l, all, r, bytes);
    return run_chance(&l->random, 5) ? (epic_result)run_next(&l->random) : EPIC_OK;
}

/* -------------------------------------------------------------------------- the trials ---- */

typedef struct trial {
    const char *backend;
    uint64_t seed;
    int deceived; /* bit mask of the ranks that get forged records */
} trial;

/* If an open succeeded, an operation on the context must succeed or return an error. */
static void use(epic_context *ctx, bool honest)
{
    float one[4] = {1, 1, 1, 1};
    CHECK(epic_backend_name(ctx)[0] != '\0');
    CHECK_EQ(epic_check(ctx) == EPIC_ECLOSED, 0);
    const epic_result result =
        epic_allreduce_sum(ctx, &(epic_allreduce_sum_args){.data = one, .count = 4});
    const bool right = result == EPIC_OK ? one[0] == (float)epic_num_ranks(ctx)
                                         : result == EPIC_EPEER || result == EPIC_ETIMEOUT;
    CHECK_SAY(right && (result == EPIC_OK || !honest), "epic_allreduce_sum: %s: %s",
              epic_result_name(result), epic_error(ctx));
}

static void open_deceived(epic_bootstrap *bootstrap, const trial *t)
{
    liar l = {.inner = *bootstrap, .random = {run_mix(t->seed, (uint64_t)bootstrap->rank)}};
    const bool deceived = t->deceived >> bootstrap->rank & 1;
    l.which = (int)run_below(&l.random, 5) - 1;
    const epic_bootstrap lies = {bootstrap->rank, bootstrap->num_ranks, gather, NULL, &l};
    epic_config config = good;
    config.backend = t->backend;
    if (!t->deceived) config.timeout_ms = HONEST_MS;
    epic_context *ctx = NULL;
    const uint64_t start = run_now_ns();
    check_seed = t->seed;
    const epic_result result = epic_open(&ctx, deceived ? &lies : bootstrap, &config);
    CHECK_SAY(!t->deceived || run_now_ns() - start < MOST_NS, "open took %lld ms",
              (long long)(run_now_ns() - start) / 1000000);
    CHECK_SAY(result >= EPIC_OK && result <= EPIC_EEVICTED, "result %d", (int)result);
    if (result != EPIC_OK) epic_bootstrap_close(bootstrap);
    if (result == EPIC_OK)
        use(ctx, t->deceived == 0);
    else
        CHECK(epic_error(ctx)[0] != '\0' && epic_check(ctx) == EPIC_ECLOSED);
    for (const char *at = epic_error(ctx); *at; at++)
        CHECK_SAY((unsigned char)*at >= ' ', "a control character in: %s", epic_error(ctx));
    CHECK_SAY(t->deceived || result == EPIC_OK, "%s", epic_error(ctx));
    epic_bootstrap_close(bootstrap);
    epic_close(ctx);
}

typedef struct place {
    epic_bootstrap bootstrap;
    trial *trial;
} place;

/* Leaves the bootstrap immediately after open, so that ranks that still use it notice. */
static void *open_and_leave(void *self)
{
    place *p = self;
    open_deceived(&p->bootstrap, p->trial);
    return NULL;
}

/* Ranks are threads also for backend shm, which allows this. */
static void run_trial(trial *t, int num_ranks)
{
    epic_bootstrap bootstraps[RANKS];
    place places[RANKS];
    pthread_t threads[RANKS];
    if (!CHECK(epic_bootstrap_threads(bootstraps, num_ranks, t->deceived ? 5000 : HONEST_MS) ==
               EPIC_OK))
        return;
    for (int r = 0; r < num_ranks; r++) {
        places[r] = (place){bootstraps[r], t};
        pthread_create(&threads[r], NULL, open_and_leave, &places[r]);
    }
    for (int r = 0; r < num_ranks; r++) pthread_join(threads[r], NULL);
}

static void test_deceived(const char *backend, int64_t count)
{
    run_random random = {run_mix(run_seed(), (uint64_t)count)};
    for (int64_t i = 0; i < count; i++) {
        trial t = {run_chance(&random, 70) ? backend : NULL, run_next(&random),
                   (int)run_below(&random, 1 << RANKS)};
        run_trial(&t, RANKS);
    }
}

/* A group of one rank with a malicious bootstrap. */
static void test_self(void)
{
    run_random random = {run_mix(run_seed(), 2)};
    for (int i = 0; i < 300; i++) {
        trial t = {run_chance(&random, 50) ? "self" : NULL, run_next(&random), 1};
        run_trial(&t, 1);
    }
}

/* ------------------------------------------------------------------ named for what was ---- */

/* A bootstrap without peers: every record is a copy of this rank's own, changed by `spoil`. */
typedef struct mirror {
    void (*spoil)(void *record, size_t bytes, int number);
    int gathers;
} mirror;

static epic_result reflect(void *self, const void *mine, void *all, int64_t bytes)
{
    mirror *m = self;
    memcpy((char *)all + bytes, mine, bytes);
    memcpy(all, mine, bytes);
    if (bytes == sizeof(rank_info)) ((rank_info *)all)->rank = 0;
    m->spoil(all, bytes, m->gathers++);
    return EPIC_OK;
}

static void expect(const char *backend, void (*spoil)(void *, size_t, int), const char *words)
{
    mirror m = {.spoil = spoil};
    const epic_bootstrap bootstrap = {.rank = 1, .num_ranks = 2, .gather = reflect, .self = &m};
    epic_config config = good;
    config.backend = backend;
    epic_context *ctx = NULL;
    const epic_result result = epic_open(&ctx, &bootstrap, &config);
    CHECK_SAY(result == EPIC_EPEER, "%s, not EPIC_EPEER: %s", epic_result_name(result),
              epic_error(ctx));
    CHECK_SAY(strstr(epic_error(ctx), words) != NULL, "no \"%s\" in: %s", words,
              epic_error(ctx));
    epic_close(ctx);
}

/* As an int this value is 0. Once open then continued without a backend. */
static void refuse_past_32_bits(void *record, size_t bytes, int number)
{
    if (bytes == sizeof(rank_info) && number == 1) ((rank_info *)record)->refused = 1ll << 32;
}

/* Writes a random address where rank 0 passes that of its memory. */
static void invent_address(void *record, size_t bytes, int number)
{
    const uint64_t address = 0xdead0000;
    (void)number;
    if (bytes == sizeof address) memcpy(record, &address, sizeof address);
}

static void nothing(void *record, size_t bytes, int number)
{
    (void)record, (void)bytes, (void)number;
}

static void endless_name(void *record, size_t bytes, int number)
{
    (void)number;
    if (bytes == sizeof(rank_info)) memset(((rank_info *)record)->name, 'x', 64);
}

static void other_address(void *record, size_t bytes, int number)
{
    (void)number;
    if (bytes != sizeof(rank_info) && bytes >= 32) memset((char *)record + bytes - 32, 'a', 32);
}

int main(void)
{
    check_begin();
    run_alarm(110);
    expect("threads", refuse_past_32_bits,
           "EPIC did not write what the bootstrap received from rank 0 (its result)");
    expect(NULL, endless_name,
           "EPIC did not write what the bootstrap received from rank 0 (its name)");
    expect("threads", invent_address, "threads: rank 0 could not join");
    expect("threads", nothing, "1 of the 2 ranks are in this process");
    expect("shm", other_address, "not an address that EPIC made");
    test_self();
    test_deceived("threads", run_scaled(400) + 20);
    test_deceived("shm", run_scaled(200) + 20);
    return check_end();
}
