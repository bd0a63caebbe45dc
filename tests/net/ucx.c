/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the engine ucx over TCP, between network namespaces if they can be made. With messages
 * every word arrives whole and once. With remote writes, which TCP delivers in parts and partly
 * twice, everything arrives. Messages of strangers are ignored. Different sizes of TCP segments
 * and unreachable GPU memory are errors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "net/striped/striped.h"
#include "net/suite.h"
#include "net/suite_net.h"

static const net_engine *ucx;

static void exchange(suite_verdict *v, int hosts, suite_case c)
{
    c.engine = ucx;
    c.seed = check_seed = run_seed() + (uint64_t)hosts;
    c.patience_ms = 60000;
    c.verdict = v;
    memset(v, 0, sizeof *v);
    net_run(hosts, suite_exchange, &c, 0, 150);
    printf(
        "%d hosts: %ld words, %ld torn, %ld wrong, %ld missing, %ld twice; %ld puts found no "
        "room\n",
        hosts, v->words, v->torn, v->wrong, v->missing, v->twice, v->refusals);
}

static void test_exchanges(suite_verdict *v)
{
    const int rounds = run_scale() < 1 ? 2 : 4;
    exchange(v, 2,
             (suite_case){.bytes = 2 << 20,
                          .most_bytes = NET_MAX_PUT_BYTES,
                          .rounds = rounds,
                          .wanted = "by messages"});
    CHECK(suite_is_clean(v));
    exchange(v, 2,
             (suite_case){.bytes = 2 << 20,
                          .most_bytes = NET_MAX_PUT_BYTES,
                          .rounds = rounds,
                          .threads = 2,
                          .wanted = "by messages, over 3 stripes"});
    CHECK(suite_is_clean(v));
    exchange(v, 3,
             (suite_case){
                 .bytes = 256 << 10, .most_bytes = 1024, .rounds = rounds, .wanted = "tcp/"});
    CHECK(suite_is_clean(v));
    exchange(v, 2,
             (suite_case){.bytes = 256 << 10,
                          .most_bytes = 64 << 10,
                          .rounds = rounds,
                          .rdma = NET_RDMA_ALWAYS,
                          .tears = true,
                          .wanted = "by writes"});
    CHECK(v->words > 0 && !v->missing);
}

/* Two GPUs of one machine may be two hosts; UCX chooses the transport there. */
static void test_one_machine(suite_verdict *v)
{
    unsetenv("UCX_TLS");
    unsetenv("UCX_NET_DEVICES");
    exchange(v, 2, (suite_case){.bytes = 1 << 20, .most_bytes = 229376, .rounds = 2});
    CHECK(suite_is_clean(v));
}

/* --------------------------------------------------------------------------- strangers ---- */

#define WORDS 64

static net_setup small_setup(const epic_bootstrap *bootstrap, uint64_t *inbox, uint64_t *outbox)
{
    return (net_setup){.host = bootstrap->rank,
                       .num_hosts = 2,
                       .inbox = inbox,
                       .inbox_bytes = WORDS * 8,
                       .outbox = outbox,
                       .outbox_bytes = WORDS * 8};
}

/* Host 1 lacks the secret of host 0, or misses its inbox. Such messages land nowhere, and later
 * ones arrive. */
static void go_astray(const epic_bootstrap *bootstrap, void *self)
{
    const bool *stranger = self;
    static uint64_t inbox[WORDS + 8], outbox[WORDS];
    unsigned char mine[NET_HANDLE_BYTES] = {0}, handles[2 * NET_HANDLE_BYTES];
    char why[NET_WHY_BYTES] = "";
    net *w = NULL;
    memset(inbox, 0xff, sizeof inbox);
    memset(outbox, 0x11, sizeof outbox);
    const net_setup setup = small_setup(bootstrap, inbox, outbox);
    if (!CHECK_SAY(ucx->open(&w, &setup, mine, why) == EPIC_OK, "%s", why)) return;
    CHECK(bootstrap->gather(bootstrap->self, mine, handles, sizeof mine) == EPIC_OK);
    /* a bit of the token */
    if (bootstrap->rank == 1 && *stranger) handles[2 * STRIPED_MAX + 3] ^= 1;
    CHECK_SAY(ucx->connect(w, handles, why) == EPIC_OK, "%s", why);
    if (bootstrap->rank == 1) {
        CHECK(ucx->put_word(w, 0, WORDS * 8, 1) && ucx->put_word(w, 0, UINT64_MAX - 7, 1));
        CHECK(ucx->put_word(w, 0, 3, 1) && ucx->put(w, 0, 8, outbox, WORDS * 8));
        CHECK(ucx->put(w, 0, UINT64_MAX - 15, outbox, 24));
        CHECK(ucx->put_word(w, 0, 16, 5) && ucx->put(w, 0, 32, outbox, 8));
        while (!ucx->is_done(w, 0, 7)) ucx->progress(w);
    }
    const uint64_t end = run_now_ns() + (*stranger ? 500000000ull : 60000000000ull);
    while (bootstrap->rank == 0 && (inbox[2] != 5 || inbox[4] == UINT64_MAX) &&
           run_now_ns() < end)
        ucx->progress(w);
    suite_wait_for_all(ucx, w, bootstrap);
    for (int i = 0; bootstrap->rank == 0 && i < WORDS + 8; i++) {
        const bool sent = !*stranger && (i == 2 || i == 4);
        CHECK_SAY((inbox[i] != UINT64_MAX) == sent, "word %d is %llx", i,
                  (unsigned long long)inbox[i]);
    }
    ucx->close(w);
}

/* ---------------------------------------------------------------------------- refusals ---- */

static void be_refused(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    static uint64_t inbox[WORDS], outbox[WORDS];
    unsigned char mine[NET_HANDLE_BYTES] = {0}, handles[2 * NET_HANDLE_BYTES] = {0};
    char why[NET_WHY_BYTES] = "";
    net *w = NULL;
    CHECK_SAY(ucx->is_available(why), "%s", why);
    net_setup setup = small_setup(bootstrap, inbox, outbox);
    if (!CHECK_SAY(ucx->open(&w, &setup, mine, why) == EPIC_OK, "%s", why)) return;
    memset(handles, 0xee, sizeof handles);
    CHECK(ucx->connect(w, handles, why) == EPIC_EMISMATCH);
    CHECK_SAY(strstr(why, "handle of host 1 is damaged") != NULL, "%s", why);
    ucx->close(w);
    if (!ucx->can_reach_gpu()) {
        setup.on_gpu = true;
        w = NULL;
        memset(mine, 0, sizeof mine);
        CHECK(ucx->open(&w, &setup, mine, why) == EPIC_ENOTSUP && w == NULL);
        CHECK_SAY(strstr(why, "memory of a GPU") != NULL, "%s", why);
    }
    ucx->close(NULL);
}

/* A message larger than the receiver's segment would end its process. */
static void differ(const epic_bootstrap *bootstrap, void *self)
{
    (void)self;
    static uint64_t inbox[WORDS], outbox[WORDS];
    unsigned char mine[NET_HANDLE_BYTES] = {0}, handles[2 * NET_HANDLE_BYTES];
    char why[NET_WHY_BYTES] = "";
    net *w = NULL;
    const net_setup setup = small_setup(bootstrap, inbox, outbox);
    if (bootstrap->rank == 1) setenv("UCX_TCP_RX_SEG_SIZE", "64k", 1);
    if (!CHECK_SAY(ucx->open(&w, &setup, mine, why) == EPIC_OK, "%s", why)) return;
    CHECK(bootstrap->gather(bootstrap->self, mine, handles, sizeof mine) == EPIC_OK);
    CHECK(ucx->connect(w, handles, why) == EPIC_EMISMATCH);
    CHECK_SAY(strstr(why, bootstrap->rank == 1 ? "is 64k here and" : "and 64k on host 1"), "%s",
              why);
    ucx->close(w);
}

int main(void)
{
    check_begin();
    run_alarm(400);
    char why[NET_WHY_BYTES];
    setenv("UCX_TLS", "tcp", 1);
    ucx = net_find_engine("ucx", why);
    if (!ucx) return check_skip(why);
    CHECK(net_find_engine("none", why) == NULL && strstr(why, "only ucx is supported") != NULL);
    setenv("UCX_NET_DEVICES", net_open(3) ? "net" : "lo", 1);
    suite_verdict *v = run_share(sizeof *v);
    test_exchanges(v);
    for (int stranger = 0; stranger < 2; stranger++)
        net_run(2, go_astray, &(bool){stranger}, 0, 100);
    net_run(1, be_refused, NULL, 0, 60); /* host 1 does not exist */
    net_run(2, differ, NULL, 0, 60);
    net_close();
    test_one_machine(v);
    return check_end();
}
