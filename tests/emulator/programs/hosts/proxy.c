/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the proxy thread of a rank whose net accepts nothing for one host, or never sends its
 * messages: rows and messages for the other hosts continue. Also tests that one call sends
 * messages to all hosts at the same time. */
#include "backend/hosts/proxy.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"

/* The net to host FULL is blocked at times. The net to SILENT and to the hosts after it never
 * sends a put. */
enum { OWN, FULL, OTHER, SILENT, NUM_HOSTS = SILENT + 8, PIECES = 4, WORDS = 64 };

#define LONGEST_MS 20000 /* much longer than any part takes */
/* longer than the time limit of one message to a host, shorter than that of three messages */
#define LONGEST_SEND_MS 5000

static bool is_full = true;        /* Is the net to host FULL blocked? It is at first. */
static uint64_t most = UINT64_MAX; /* number of puts to FULL that the net may read */
static uint64_t given[NUM_HOSTS];  /* number of puts per host */
static int64_t other_at;           /* time in us of the last put to OTHER */

static bool net_put(net *w, int host, uint64_t to, const void *from, uint32_t bytes)
{
    (void)w, (void)to, (void)from, (void)bytes;
    if (host == FULL && __atomic_load_n(&is_full, __ATOMIC_ACQUIRE)) return false;
    if (host == OTHER) __atomic_store_n(&other_at, clock_us(), __ATOMIC_RELAXED);
    __atomic_add_fetch(&given[host], 1, __ATOMIC_RELEASE);
    return true;
}

static bool net_word(net *w, int host, uint64_t to, uint64_t value)
{
    (void)value;
    return net_put(w, host, to, NULL, 8);
}

static int net_look(net *w)
{
    (void)w;
    return 0;
}

static bool net_done(const net *w, int host, uint64_t count)
{
    (void)w;
    if (host >= SILENT) return count == 0;
    return host != FULL || count <= __atomic_load_n(&most, __ATOMIC_ACQUIRE);
}

static bool net_gone(const net *w, int host)
{
    (void)w, (void)host;
    return false;
}

static const net_engine engine = {.name = "test",
                                  .preferred_bytes = 2 << 10,
                                  .put = net_put,
                                  .put_word = net_word,
                                  .progress = net_look,
                                  .is_done = net_done,
                                  .is_gone = net_gone};

static void fail_test(const char *what)
{
    fprintf(stderr, "hosts_proxy: %s\n", what);
    exit(1);
}

static void wait_for(const uint64_t *count, uint64_t wanted, const char *or_else)
{
    for (int ms = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < wanted; ms++) {
        if (ms == LONGEST_MS) fail_test(or_else);
        usleep(1000);
    }
}

static void post_ring_entry(const p2p_ring *ring, uint64_t place, uint64_t entry)
{
    __atomic_store_n(&ring->entries[place], entry | P2P_ENTRY_LAP(place), __ATOMIC_RELEASE);
}

/* Runs an epoch: pieces for both hosts in turn, each in a row of its own. */
static void test_rows(const hosts_proxy_setup *s)
{
    const uint64_t rows = (uint64_t)s->at.staging / 8, apart = s->engine->preferred_bytes / 8;
    const uint64_t *freed = &s->ring.words->freed;
    uint64_t place = 0;
    for (uint64_t i = 0; i < PIECES; i++)
        for (int h = FULL; h <= OTHER; h++)
            post_ring_entry(&s->ring, place++, P2P_ENTRY(h, rows + i * apart, WORDS));
    post_ring_entry(&s->ring, place, P2P_ENTRY(0, P2P_EPOCH_ENDS, 0));
    wait_for(&given[OTHER], PIECES,
             "pieces for one host wait for another host whose net is full");
    if (__atomic_load_n(freed, __ATOMIC_ACQUIRE))
        fail_test("the epoch has ended before all pieces were put");
    __atomic_store_n(&is_full, false, __ATOMIC_RELEASE);
    wait_for(freed, 1, "the epoch does not end");
    if (given[FULL] != PIECES || given[OTHER] != PIECES)
        fail_test("a piece was not put exactly once");
}

/* Sends two messages to hosts that never read them, and to one that does. The second message
 * to this host must not wait until the others have got their first one. */
static void test_messages(const hosts_proxy_setup *s, hosts_proxy *r)
{
    seat_set all = {0};
    __atomic_store_n(&most, PIECES, __ATOMIC_RELEASE);
    for (int h = FULL; h < NUM_HOSTS; h++) seat_set_add(&all, h);
    int64_t begin = clock_us();
    hosts_proxy_send(r, &all, (uint64_t)s->at.abort_text, 8);
    if (clock_us() - begin > LONGEST_SEND_MS * 1000)
        fail_test("a call waits for one host after the other");
    if (__atomic_load_n(&given[OTHER], __ATOMIC_ACQUIRE) != PIECES + 1)
        fail_test("a message waits for a message to another host");
    begin = clock_us();
    hosts_proxy_send(r, &all, (uint64_t)s->at.abort_text, 8);
    if (__atomic_load_n(&given[OTHER], __ATOMIC_ACQUIRE) != PIECES + 2)
        fail_test("a second message was not sent");
    if (__atomic_load_n(&other_at, __ATOMIC_RELAXED) - begin > LONGEST_SEND_MS * 1000 / 5)
        fail_test("a second message waits for messages to other hosts");
}

int main(void)
{
    static p2p_ring_words words;
    static p2p_status status;
    static p2p_beats beats;
    const p2p_heap at = p2p_heap_of(NUM_HOSTS, 64, 2048, 0, 8);
    const p2p_ring ring = {calloc(P2P_RING_ENTRIES, 8), &words};
    uint8_t *outbox = calloc(1, (size_t)at.bytes);
    const net_liveness_setup lines = {.num_hosts = NUM_HOSTS, .ranks_per_host = 1};
    unsigned char card[NET_LIVENESS_HANDLE_BYTES] = {0};
    hosts_proxy_setup setup = {.host = OWN,
                               .num_hosts = NUM_HOSTS,
                               .engine = &engine,
                               .outbox = outbox,
                               .at = at,
                               .status = &status,
                               .beats = &beats,
                               .ring = ring};
    hosts_proxy *r;
    if (!ring.entries || !outbox ||
        net_liveness_listen(&setup.liveness, &lines, card) != EPIC_OK ||
        hosts_proxy_open(&r, &setup) != EPIC_OK)
        return 1;
    test_rows(&setup);
    test_messages(&setup, r);
    hosts_proxy_close(r);
    net_liveness_close(setup.liveness);
    free(ring.entries);
    free(outbox);
    printf("hosts_proxy: good\n");
    return 0;
}
