/* SPDX-License-Identifier: Apache-2.0 */
/* Tests hosts that are killed, stopped or cut off while puts are in flight, with one stripe and
 * with three. No host waits for them, the others continue, and close returns. */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "net/suite.h"
#include "net/suite_net.h"

#define PUT 40960  /* large enough for a thread of a striped net */
#define SLOTS 8192 /* only slots that a put lands in take memory */
#define TURNS 300
#define BAD 2 /* the host that fails */

static const net_engine *ucx;
static int threads; /* threads of a net */

typedef struct trial {
    bool cut; /* false: the host is killed instead */
    atomic_int num_done;
} trial;

static net *open_boxes(const epic_bootstrap *bootstrap, uint64_t **inbox, uint64_t **outbox)
{
    *inbox = calloc(SLOTS, PUT);
    *outbox = calloc(1, PUT);
    const net_setup setup = {.host = bootstrap->rank,
                             .num_hosts = bootstrap->num_ranks,
                             .threads = threads,
                             .inbox = *inbox,
                             .inbox_bytes = (uint64_t)SLOTS * PUT,
                             .outbox = *outbox,
                             .outbox_bytes = PUT};
    return suite_open(ucx, bootstrap, &setup);
}

/* The healthy hosts increment a counter in turn, word by word, while one of them sends as much
 * as it can to the bad host. */
static bool count_on(net *w, int me, const volatile uint64_t *inbox, const void *outbox,
                     int bad)
{
    const uint64_t end = run_now_ns() + 60000000000ull;
    for (uint64_t turn = 1; turn <= TURNS; turn++) {
        while (!ucx->put_word(w, 1 - me, 0, turn)) ucx->progress(w);
        while (inbox[0] < turn) {
            if (run_now_ns() > end) return false;
            if (bad >= 0) ucx->put(w, bad, 8, outbox, PUT - 8);
            ucx->progress(w);
        }
    }
    return true;
}

static void with_a_bad_host(const epic_bootstrap *bootstrap, void *self)
{
    trial *t = self;
    uint64_t *inbox, *outbox;
    net *w = open_boxes(bootstrap, &inbox, &outbox);
    suite_wait_for_all(ucx, w, bootstrap); /* a late rank must not find the bad host gone */
    if (!w) return;
    if (bootstrap->rank == BAD) {
        while (((volatile uint64_t *)inbox)[0] == 0) ucx->progress(w);
        if (!t->cut) raise(SIGKILL);
        for (int i = 0; i < 100; i++) ucx->progress(w);
        net_cut(BAD);
    } else {
        while (!ucx->put_word(w, BAD, 0, 1)) ucx->progress(w);
        CHECK(count_on(w, bootstrap->rank, inbox, outbox, BAD));
        CHECK(!ucx->is_gone(w, 1 - bootstrap->rank));
        atomic_fetch_add(&t->num_done, 1);
        while (atomic_load(&t->num_done) < 2) ucx->progress(w);
        printf("host %d: the bad host is %s\n", bootstrap->rank,
               ucx->is_gone(w, BAD) ? "given up by the engine" : "not noticed by the engine");
    }
    ucx->close(w);
    free(inbox);
    free(outbox);
}

/* A stopped host accepts nothing: puts are refused and nothing waits. After it continues,
 * everything arrives. */
static void with_a_stopped_host(const epic_bootstrap *bootstrap, void *self)
{
    atomic_int *pid = self;
    uint64_t *inbox, *outbox, given = 0;
    net *w = open_boxes(bootstrap, &inbox, &outbox);
    if (!w) return;
    if (bootstrap->rank == 1) {
        atomic_store(pid, (int)getpid());
        raise(SIGSTOP);
    } else {
        while (atomic_load(pid) == 0) run_nap_us(1000);
        run_nap_us(100000);
        memset(outbox, 0x77, PUT);
        for (int refused = 0; given < SLOTS && refused < 5000;) {
            const bool taken = ucx->put(w, 1, given * PUT, outbox, PUT);
            given += taken;
            refused = taken ? 0 : refused + 1;
            ucx->progress(w);
        }
        CHECK_SAY(given < SLOTS && !ucx->is_done(w, 1, given), "%llu puts were taken",
                  (unsigned long long)given);
        kill(atomic_load(pid), SIGCONT);
        while (!ucx->is_done(w, 1, given)) ucx->progress(w);
        while (!ucx->put_word(w, 1, (uint64_t)(SLOTS - 1) * PUT, given)) ucx->progress(w);
    }
    volatile const uint64_t *count = inbox + (uint64_t)(SLOTS - 1) * PUT / 8;
    while (bootstrap->rank == 1 && *count == 0) ucx->progress(w);
    for (uint64_t i = 0; bootstrap->rank == 1 && i < *count * PUT / 8; i++)
        while (((volatile uint64_t *)inbox)[i] != 0x7777777777777777ull) ucx->progress(w);
    suite_wait_for_all(ucx, w, bootstrap);
    ucx->close(w);
    free(inbox);
    free(outbox);
}

static void test_all(bool spaces)
{
    trial *t = run_share(sizeof *t);
    *t = (trial){0};
    net_run(3, with_a_bad_host, t, 1u << BAD, 100);
    *t = (trial){.cut = true};
    if (spaces) net_run(3, with_a_bad_host, t, 0, 100);
    atomic_int *pid = run_share(sizeof *pid);
    net_run(2, with_a_stopped_host, pid, 0, 150);
    run_unshare(t, sizeof *t);
    run_unshare(pid, sizeof *pid);
}

int main(void)
{
    check_begin();
    run_alarm(400);
    char why[NET_WHY_BYTES];
    setenv("UCX_TLS", "tcp", 1);
    setenv("UCX_LOG_LEVEL", "fatal", 1);
    ucx = net_find_engine("ucx", why);
    if (!ucx) return check_skip(why);
    for (threads = 0; threads <= 2; threads += 2) {
        const bool spaces = net_open(3);
        setenv("UCX_NET_DEVICES", spaces ? "net" : "lo", 1);
        test_all(spaces);
        net_close();
    }
    return check_end();
}
