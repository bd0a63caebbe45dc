/* SPDX-License-Identifier: Apache-2.0 */
/* Tests from when a deadline counts: from the call until the last header has arrived, then from
 * the last row that moved. Also tests which rank is named when the waits form a circle. Rows
 * are slow here because the rank that sends or receives them sleeps. The cases run at the same
 * time, in processes. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "exchange/exchange.h"
#include "run.h"

#define DEADLINE_MS 2500
#define LATE_MS 1700 /* less than the deadline, but more than half of it */
#define NAP_MS 100
#define ITEMS 50 /* rows of an operation that takes twice the deadline, with a sleep per row */
#define STOP_AT 8
#define LATER_MS 2000 /* if the error comes this much later, the deadline was restarted */
#define TRIES 5
#define ROW 8192
/* the ring holds only two entries of ROW bytes, so no rank can run ahead */
#define LEAST_LANE 17408

static const char *backend;
static _Atomic int *late; /* number of late errors, shared by the ranks of one attempt */

static epic_context *open_context(const epic_bootstrap *bootstrap, uint32_t in_flight)
{
    const epic_config config = {.max_tokens = 64,
                                .max_row_bytes = ROW,
                                .staging_bytes =
                                    (int64_t)in_flight * bootstrap->num_ranks * LEAST_LANE,
                                .timeout_ms = DEADLINE_MS,
                                .max_in_flight = in_flight,
                                .backend = backend};
    epic_context *ctx;
    const epic_result result = epic_open(&ctx, bootstrap, &config);
    CHECK_SAY(result == EPIC_OK, "open: %s", epic_error(ctx));
    return ctx;
}

static long ms_since(uint64_t begin)
{
    return (long)((run_now_ns() - begin) / 1000000);
}

/* Counts an error that came too late. If the deadline was restarted, the error is late. On a
 * busy machine others are late, too. So a late case is repeated, and fails if it is late each
 * time. */
static void note_time(long ms)
{
    if (ms >= DEADLINE_MS + LATER_MS) atomic_store(late, 1);
}

static bool names(const epic_failure_info *info, int rank)
{
    for (uint32_t i = 0; i < info->num_culprits; i++)
        if (info->culprits[i] == rank) return true;
    return false;
}

static epic_failure_info failure_of(const epic_context *ctx)
{
    epic_failure_info info;
    CHECK(epic_failure(ctx, &info) == EPIC_OK);
    return info;
}

/* --------------------------------------------------------------------------- slow rows ---- */

enum pace { SLOW_FILL, SLOW_TAKE, STOPS, LATE };

typedef struct slow {
    epic_context *ctx;
    exchange *x;
    uint64_t tag;
    bool collects;
    enum pace pace;
    uint64_t moved_ns; /* time when rank 1 received the last row */
    epic_result result;
} slow;

static bool always(void *self, int rank, int64_t item)
{
    (void)self, (void)rank, (void)item;
    return true;
}

static void stop_until_continued(const slow *s)
{
    const uint64_t begin = run_now_ns();
    while (failure_of(s->ctx).result == EPIC_OK && ms_since(begin) < 20000) run_nap_us(5000);
}

static void fill(slow *s, int64_t item, void *entry)
{
    memset(entry, (int)item, ROW);
    if (s->pace == SLOW_FILL) run_nap_us(NAP_MS * 1000);
    if (s->pace == STOPS && item >= STOP_AT) stop_until_continued(s);
    if (s->pace == LATE && item == 0) run_nap_us(LATE_MS * 1000);
}

static void take(slow *s, int64_t item, const unsigned char *row)
{
    CHECK_EQ(row[ROW - 1], item);
    if (s->pace == SLOW_TAKE) run_nap_us(NAP_MS * 1000);
    s->moved_ns = run_now_ns();
}

static void fill_item(void *self, int64_t item, int32_t piece, void *entry)
{
    (void)piece;
    fill(self, item, entry);
}

static void take_item(void *self, int from, int64_t item, int32_t piece, const void *entry)
{
    (void)from, (void)piece;
    take(self, item, entry);
}

static void take_own(void *self, int64_t item)
{
    (void)self, (void)item;
}

static void fill_home(void *self, int home, int64_t item, int32_t piece, void *entry)
{
    (void)home, (void)piece;
    fill(self, item, entry);
}

static void take_rows(void *self, int64_t item, int32_t piece, const void **rows)
{
    (void)piece;
    take(self, item, rows[0]);
}

/* Moves rows from rank 0 to rank 1. */
static epic_result flow(slow *s)
{
    const row_split whole = {.row_bytes = ROW, .piece_bytes = ROW, .num_pieces = 1};
    const scatter scattered = {.self = s,
                               .items = (const int64_t[]){ITEMS, 0},
                               .split = whole,
                               .is_sent = always,
                               .is_received = always,
                               .fill_entry = fill_item,
                               .read_entry = take_item,
                               .read_own_item = take_own};
    const collect collected = {.self = s,
                               .items = (const int64_t[]){0, ITEMS},
                               .split = whole,
                               .is_sent = always,
                               .is_received = always,
                               .fill_entry = fill_home,
                               .read_rows = take_rows};
    return s->collects ? collect_run(s->x, &collected) : scatter_run(s->x, &scattered);
}

static void *be_slow(void *self)
{
    slow *s = self;
    const epic_call call = {.tag = s->tag};
    const epic_op_header header = {.common = {EPIC_OP_SUM}};
    s->result = exchange_open(&s->x, s->ctx, EPIC_OP_SUM, &call, &header, 0);
    if (!s->x) return NULL;
    if (s->result == EPIC_OK) s->result = flow(s);
    exchange_close(s->x, s->result);
    return NULL;
}

/* An operation that moves rows, however slowly, for twice its deadline does not fail. */
static void moving(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    enum { NUM = 4 };
    slow all[NUM];
    pthread_t threads[NUM];
    const uint64_t begin = run_now_ns();
    epic_context *ctx = open_context(bootstrap, NUM);
    for (int i = 0; i < NUM; i++) {
        all[i] = (slow){.ctx = ctx,
                        .tag = (uint64_t)i,
                        .collects = i % 2,
                        .pace = i / 2 ? SLOW_FILL : SLOW_TAKE};
        pthread_create(&threads[i], NULL, be_slow, &all[i]);
    }
    for (int i = 0; i < NUM; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < NUM; i++)
        CHECK_SAY(all[i].result == EPIC_OK, "%s, slow rows %d: %s", backend, i,
                  failure_of(ctx).sentence);
    CHECK(ms_since(begin) > 2 * DEADLINE_MS);
    epic_close(ctx);
}

/* Rank 0 comes late, and its first row comes late again. The deadline must restart when the
 * header arrives. */
static void late_rows(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    epic_context *ctx = open_context(bootstrap, 1);
    slow s = {.ctx = ctx, .pace = LATE};
    if (bootstrap->rank == 0) run_nap_us(LATE_MS * 1000);
    be_slow(&s);
    CHECK_SAY(s.result == EPIC_OK, "%s: %s", backend, failure_of(ctx).sentence);
    epic_close(ctx);
}

/* An operation that moves rows and then stops fails one deadline after its last row. */
static void stopping(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap, 1);
    slow s = {.ctx = ctx, .collects = *(const bool *)self, .pace = STOPS};
    be_slow(&s);
    CHECK_EQ(s.result, EPIC_ETIMEOUT);
    const epic_failure_info info = failure_of(ctx);
    CHECK_SAY(info.num_culprits == 1 && names(&info, 0), "%s", info.sentence);
    if (bootstrap->rank == 1) {
        const long ms = ms_since(s.moved_ns);
        CHECK_SAY(ms >= DEADLINE_MS, "%s: %ld ms after the last row", backend, ms);
        note_time(ms);
    }
    epic_close(ctx);
}

/* ------------------------------------------------------- what does not put it off ---- */

static epic_result sum(epic_context *ctx, uint64_t tag)
{
    float one = 1;
    const epic_allreduce_sum_args args = {.call.tag = tag, .data = &one, .count = 1};
    return epic_allreduce_sum(ctx, &args);
}

/* A header that arrives just before the deadline does not move the deadline. */
static void late_note(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    epic_context *ctx = open_context(bootstrap, 1);
    const uint64_t begin = run_now_ns();
    const slow stopped = {.ctx = ctx};
    if (bootstrap->rank == 1) run_nap_us(DEADLINE_MS * 900);
    if (bootstrap->rank == 2) stop_until_continued(&stopped);
    CHECK_EQ(sum(ctx, 0), EPIC_ETIMEOUT);
    note_time(ms_since(begin));
    const epic_failure_info info = failure_of(ctx);
    CHECK_SAY(info.num_culprits == 1 && names(&info, 2), "%s", info.sentence);
    epic_close(ctx);
}

static void *sum_after_continue(void *self)
{
    while (sum(self, 2) == EPIC_OK) run_nap_us(2000);
    return NULL;
}

/* Rows that move under another tag do not move the deadline either. */
static void other_tag(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    epic_context *ctx = open_context(bootstrap, 2);
    const uint64_t begin = run_now_ns();
    pthread_t thread;
    pthread_create(&thread, NULL, sum_after_continue, ctx);
    if (bootstrap->rank == 0) {
        CHECK_EQ(sum(ctx, 1), EPIC_ETIMEOUT);
        note_time(ms_since(begin));
        const epic_failure_info info = failure_of(ctx);
        CHECK_SAY(info.num_culprits == 1 && names(&info, 1), "%s", info.sentence);
    }
    pthread_join(thread, NULL);
    epic_close(ctx);
}

/* ------------------------------------------------------------------------- a circle ---- */

/* Every rank uses a tag of its own, so each waits for all others and no rank is idle. The error
 * names the ranks for which the reporting rank waits. */
static void circle(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    epic_context *ctx = open_context(bootstrap, 1);
    CHECK_EQ(sum(ctx, 100 + (uint64_t)bootstrap->rank), EPIC_ETIMEOUT);
    const epic_failure_info info = failure_of(ctx);
    CHECK_SAY(info.num_culprits > 0 && !names(&info, info.rank), "%s: %u culprits: %s", backend,
              info.num_culprits, info.sentence);
    CHECK_SAY(strstr(info.sentence, "was last seen in sum (tag 10") != NULL, "%s",
              info.sentence);
    /* With two ranks, the error names both, each with its tag. */
    static const char *const both[] = {"rank 0", "rank 1", "(tag 100,", "(tag 101,"};
    for (size_t i = 0; bootstrap->num_ranks == 2 && i < sizeof both / sizeof *both; i++)
        CHECK_SAY(strstr(info.sentence, both[i]), "no %s in: %s", both[i], info.sentence);
    epic_close(ctx);
}

/* Rank 0 waits for 1 and 2, rank 1 in another tag for 0 and 2, and rank 2 for no rank. So only
 * rank 2 is named. A rank that gets no CPU time for a quarter of a second does not appear to
 * wait, so there are three attempts. */
static void chain(const epic_bootstrap *bootstrap, void *self)
{
    epic_context *ctx = open_context(bootstrap, 1);
    const slow stopped = {.ctx = ctx};
    if (bootstrap->rank == 2) stop_until_continued(&stopped);
    CHECK_EQ(sum(ctx, (uint64_t)bootstrap->rank), EPIC_ETIMEOUT);
    const epic_failure_info info = failure_of(ctx);
    CHECK_SAY(names(&info, 2), "%s: %s", backend, info.sentence);
    if (info.num_culprits == 1) atomic_store((_Atomic int *)self, 1);
    epic_close(ctx);
}

/* -------------------------------------------------------------------------------- all ---- */

static bool processes;

static void run_ranks(int num_ranks, run_body *body, void *self)
{
    if (processes)
        run_processes(num_ranks, body, self, 60);
    else
        run_threads(num_ranks, body, self);
}

static void run_next_to_stops(int num_ranks, run_body *body, void *self)
{
    if (run_fork() != 0) return;
    late = run_share(sizeof *late);
    int tries = 0;
    do {
        atomic_store(late, 0);
        run_ranks(num_ranks, body, self);
    } while (atomic_load(late) && ++tries < TRIES);
    CHECK_SAY(tries < TRIES, "%s: later than %d ms each time", backend, DEADLINE_MS + LATER_MS);
    _exit(0);
}

static void chains(void)
{
    _Atomic int *right = run_share(sizeof *right);
    if (run_fork() != 0) return;
    for (int i = 0; i < 3 && !atomic_load(right); i++) run_ranks(3, chain, right);
    CHECK_SAY(atomic_load(right), "%s: a rank that waited was named", backend);
    _exit(0);
}

int main(void)
{
    check_begin();
    run_alarm(100);
    bool patterns[] = {false, true};
    for (int way = 0; way < 2; way++) {
        processes = way == 1;
        backend = processes ? "shm" : "threads";
        run_next_to_stops(2, moving, NULL);
        for (int i = 0; i < 2; i++) run_next_to_stops(2, stopping, &patterns[i]);
        run_next_to_stops(2, late_rows, NULL);
        run_next_to_stops(3, late_note, NULL);
        run_next_to_stops(2, other_tag, NULL);
        run_next_to_stops(2, circle, NULL);
        run_next_to_stops(3, circle, NULL);
        chains();
    }
    int status;
    while (wait(&status) > 0) CHECK_EQ(status, 0);
    return check_end();
}
