/* SPDX-License-Identifier: Apache-2.0 */
/* Tests bootstraps with a secret against an attacker who does not know it. The attacker is
 * between two ranks and changes, repeats, swaps or cuts messages, or takes the place of rank 0
 * or of another rank. The ranks must get the correct bytes or an error. An attacker who is not
 * between the ranks must not even make the bootstrap fail. */
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bootstrap/tcp.h"
#include "check.h"
#include "run.h"

#define GATHERS 3
#define BYTES 48
#define PATIENCE_MS 24000

/* ------------------------------------------------------------------------------- ranks ---- */

typedef struct joiner {
    epic_tcp tcp;
    epic_result result;
    char sentence[512];
    bool wrong_bytes;
    int gathers; /* number of gathers that succeeded */
} joiner;

static void *run_rank(void *self)
{
    joiner *s = self;
    epic_bootstrap bootstrap;
    unsigned char mine[BYTES], all[4 * BYTES];
    s->result = epic_bootstrap_tcp(&bootstrap, &s->tcp);
    for (int g = 0; g < GATHERS && s->result == EPIC_OK; g++) {
        memset(mine, 16 * s->tcp.rank + g, sizeof mine);
        s->result = bootstrap.gather(bootstrap.self, mine, all, sizeof mine);
        for (int i = 0; i < s->tcp.num_ranks * BYTES && s->result == EPIC_OK; i++)
            s->wrong_bytes |= all[i] != 16 * (i / BYTES) + g;
        s->gathers += s->result == EPIC_OK;
    }
    if (s->result != EPIC_OK) snprintf(s->sentence, sizeof s->sentence, "%s", epic_error(NULL));
    epic_bootstrap_close(&bootstrap);
    return NULL;
}

static struct sockaddr_in loopback(uint32_t port)
{
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

/* Opens a listening socket and stores its port. If *port is 0, any port is used. */
static int listen_at(uint32_t *port)
{
    struct sockaddr_in at = loopback(*port);
    socklen_t bytes = sizeof at;
    const int one = 1;
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    CHECK(bind(s, (struct sockaddr *)&at, sizeof at) == 0);
    CHECK(listen(s, 50) == 0);
    getsockname(s, (struct sockaddr *)&at, &bytes);
    *port = ntohs(at.sin_port);
    return s;
}

/* Returns a port that no other program can use while *holder is open. The socket is first bound
 * without SO_REUSEADDR, so that the port is exclusive. Then the option is set, so that rank 0
 * can listen there too. */
static uint32_t hold_port(int *holder)
{
    struct sockaddr_in at = loopback(0);
    socklen_t bytes = sizeof at;
    const int one = 1;
    *holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(*holder, (struct sockaddr *)&at, sizeof at) == 0);
    getsockname(*holder, (struct sockaddr *)&at, &bytes);
    setsockopt(*holder, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    return ntohs(at.sin_port);
}

/* Connects to the port. Returns -1 if no program listens. */
static int knock(uint32_t port)
{
    const struct sockaddr_in at = loopback(port);
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(s, (const struct sockaddr *)&at, sizeof at) == 0) return s;
    close(s);
    return -1;
}

static bool read_all(int s, void *to, size_t bytes)
{
    return recv(s, to, bytes, MSG_WAITALL) == (ssize_t)bytes;
}

static void write_all(int s, const void *from, size_t bytes)
{
    (void)!send(s, from, bytes, MSG_NOSIGNAL);
}

/* ------------------------------------------------------------------------------- relay ---- */

typedef enum damage { FLIP, REPEAT, SWAP, DROP, CUT, REFLECT } damage;

/* How the relay changes one message in one direction of the first connection. Rank 0 sends
 * hello, entry, begin and answers. It receives hello, proof and parts. */
typedef struct relay {
    uint32_t to;
    int listener;
    bool from_zero; /* true: the messages from rank 0 */
    int message;
    damage what;
    size_t byte; /* FLIP */
    atomic_bool used, over;
} relay;

typedef struct way {
    relay *r;
    int from, to;
    bool from_zero, damaged;
} way;

typedef struct message {
    unsigned char bytes[64 + sizeof(epic_frame) + 4 * BYTES];
    size_t length;
} message;

static bool read_message(const way *w, int number, message *m)
{
    const epic_frame *frame = (const epic_frame *)(void *)m->bytes;
    m->length = number == 0                    ? sizeof(epic_hello)
                : number == 1 && !w->from_zero ? SECRET_PROOF
                                               : sizeof *frame;
    if (!read_all(w->from, m->bytes, m->length)) return false;
    if (m->length != sizeof *frame || frame->length == 0) return true;
    if (frame->length > sizeof m->bytes - m->length) return false;
    if (!read_all(w->from, m->bytes + m->length, frame->length)) return false;
    m->length += frame->length;
    return true;
}

/* Forwards one message after changing it. */
static void spoil(way *w, message *m, int number)
{
    message next;
    w->r->used = true;
    switch (w->r->what) {
    case FLIP:
        m->bytes[w->r->byte % m->length] ^= 4;
        break;
    case REPEAT:
        write_all(w->to, m->bytes, m->length);
        break;
    case SWAP:
        if (!read_message(w, number + 1, &next)) return;
        write_all(w->to, next.bytes, next.length);
        break;
    case DROP:
        return;
    case CUT:
        m->length /= 2;
        break;
    case REFLECT:
        write_all(w->from, m->bytes, m->length);
        return;
    }
    write_all(w->to, m->bytes, m->length);
    if (w->r->what == CUT) shutdown(w->to, SHUT_WR);
}

static void *carry(void *self)
{
    way *w = self;
    message m;
    for (int number = 0; read_message(w, number, &m); number++)
        if (w->damaged && number == w->r->message && w->from_zero == w->r->from_zero)
            spoil(w, &m, number);
        else
            write_all(w->to, m.bytes, m.length);
    shutdown(w->to, SHUT_WR);
    return NULL;
}

static void *run_relay(void *self)
{
    relay *r = self;
    for (bool damaged = true;; damaged = false) {
        pthread_t back;
        const int near = accept(r->listener, NULL, NULL);
        if (near < 0) return NULL;
        int far = knock(r->to);
        for (int i = 0; far < 0 && i < 2000 && !r->over; i++) {
            run_nap_us(1000);
            far = knock(r->to);
        }
        way there = {r, near, far, false, damaged}, home = {r, far, near, true, damaged};
        if (far >= 0) {
            pthread_create(&back, NULL, carry, &home);
            carry(&there);
            pthread_join(back, NULL);
            close(far);
        }
        close(near);
    }
}

/* Ranks 0 and 1 open a bootstrap; rank 1 connects through the relay. */
static void bootstrap_in(relay *r, uint32_t timeout_ms, joiner joiners[2])
{
    pthread_t threads[2], relaying;
    uint32_t port = 0;
    int holder;
    memset(joiners, 0, 2 * sizeof *joiners);
    r->to = hold_port(&holder);
    r->used = r->over = false;
    r->listener = listen_at(&port);
    for (int i = 0; i < 2; i++)
        joiners[i].tcp = (epic_tcp){.secret = "hush",
                                    .rank = i,
                                    .num_ranks = 2,
                                    .port = i == 0 ? r->to : port,
                                    .timeout_ms = timeout_ms};
    pthread_create(&relaying, NULL, run_relay, r);
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, run_rank, &joiners[i]);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    r->over = true;
    shutdown(r->listener, SHUT_RDWR);
    pthread_join(relaying, NULL);
    close(r->listener);
    close(holder);
}

/* If the entry of a rank is changed, the rank retries until its deadline. If nothing had
 * arrived by then, it reports the deadline later. */
static void bootstrap_through(relay *r)
{
    joiner joiners[2];
    const bool knocks = r->from_zero && r->message == 1;
    uint32_t timeout_ms = knocks ? 1000 : PATIENCE_MS;
    bootstrap_in(r, timeout_ms, joiners);
    for (; knocks && !r->used && timeout_ms < PATIENCE_MS; bootstrap_in(r, timeout_ms, joiners))
        timeout_ms *= 3;

    const int last = r->from_zero ? 2 + GATHERS : 1 + GATHERS;
    const joiner *reader = &joiners[r->from_zero];
    for (int i = 0; i < 2; i++) CHECK(!joiners[i].wrong_bytes);
    CHECK_SAY(r->used == (r->message <= last), "message %d was not damaged", r->message);
    if (r->message <= 1 && !(r->from_zero && r->message == 1)) return; /* hello and proof */
    if (r->message > last) {
        for (int i = 0; i < 2; i++)
            CHECK_SAY(joiners[i].result == EPIC_OK, "honest relay: %s", joiners[i].sentence);
        return;
    }
    /* a repeated last message is never read */
    const bool is_noticed =
        reader->result != EPIC_OK || (r->what == REPEAT && r->message == last);
    CHECK_SAY(is_noticed, "%s 0: message %d, damage %d, byte %zu: no rank noticed",
              r->from_zero ? "from" : "to", r->message, (int)r->what, r->byte);
    CHECK_SAY(r->what != FLIP || r->message < 2 || reader->result == EPIC_EPEER, "%s: %s",
              epic_result_name(reader->result), reader->sentence);
}

static void test_relay(void)
{
    static const size_t bytes[] = {
        offsetof(epic_frame, magic),       offsetof(epic_frame, result),
        offsetof(epic_frame, sequence),    offsetof(epic_frame, length),
        offsetof(epic_frame, length) + 6,  offsetof(epic_frame, left_ms),
        offsetof(epic_frame, zero),        offsetof(epic_frame, digest),
        offsetof(epic_frame, digest) + 31, offsetof(epic_frame, tag),
        offsetof(epic_frame, tag) + 31,    sizeof(epic_frame),
        sizeof(epic_frame) + BYTES - 1,
    };
    relay honest = {.message = 1000};
    bootstrap_through(&honest);
    for (int from_zero = 0; from_zero < 2; from_zero++)
        for (int number = 0; number <= 1 + GATHERS + from_zero; number++) {
            relay r = {.from_zero = from_zero, .message = number};
            const bool entry = from_zero && number == 1;
            for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i += entry ? 5 : 1) {
                r.byte = bytes[i];
                bootstrap_through(&r);
            }
            for (r.what = REPEAT; r.what <= REFLECT; r.what++)
                if (number > 1 && r.what != DROP && r.what != SWAP) bootstrap_through(&r);
            r.what = SWAP; /* swaps entry and begin; later messages wait for each other */
            if (entry) bootstrap_through(&r);
        }
}

/* --------------------------------------------------------------------------- strangers ---- */

typedef struct stranger {
    uint32_t port;
    uint32_t version;
    bool has_secret;
    bool stays; /* stays connected until the end, so that later connections get no answer */
    atomic_bool over;
} stranger;

/* Acts as rank 0 for one connection and sends that the bootstrap has failed. */
static void *refuse_one(void *self)
{
    stranger *o = self;
    time_limit limit = time_limit_begin(5000, NULL);
    epic_hello theirs, ours;
    uint8_t proof[SECRET_PROOF];
    uint32_t port = o->port;
    const int listener = listen_at(&port);
    const int s = accept(listener, NULL, NULL);
    epic_link link = {.socket = s};
    CHECK(read_all(s, &theirs, sizeof theirs));
    epic_frame_make_hello(&ours, 0, theirs.num_ranks, o->has_secret, &limit);
    ours.version = o->version;
    write_all(s, &ours, sizeof ours);
    if (o->has_secret && o->version == FRAME_VERSION) CHECK(read_all(s, proof, sizeof proof));
    epic_link_send_failure(&link, EPIC_EMISMATCH, "go away, all of you", &limit);
    while (o->stays && !o->over) run_nap_us(1000);
    close(listener);
    run_nap_us(20000);
    close(s);
    o->over = true;
    return NULL;
}

/* Acts as rank 1, again and again, with an invented proof. */
static void *take_seat(void *self)
{
    stranger *o = self;
    epic_hello hello;
    uint8_t proof[SECRET_PROOF] = {7};
    for (int i = 0; !o->over; i++) {
        const int s = knock(o->port);
        const time_limit limit = time_limit_begin(60000, NULL);
        epic_frame_make_hello(&hello, 1 + i % 2, i % 5 ? 3 : 4, true, &limit);
        if (i % 3 == 0) hello.version = 99;
        if (i % 7 == 0) hello.left_ms = 1;
        if (s >= 0) {
            write_all(s, &hello, sizeof hello);
            write_all(s, proof, sizeof proof);
            run_nap_us(500);
            close(s);
        }
        run_nap_us(200);
    }
    return NULL;
}

/* Three ranks with a secret open a bootstrap in spite of the attacker. The last rank comes
 * late. */
static void bootstrap_despite(void *(*body)(void *), stranger *o, bool zero_late)
{
    joiner joiners[3] = {0};
    pthread_t threads[3], other;
    int holder;
    o->port = hold_port(&holder);
    o->over = false;
    pthread_create(&other, NULL, body, o);
    for (int i = 2; i >= 0; i--) {
        joiners[i].tcp = (epic_tcp){.secret = "hush",
                                    .rank = i,
                                    .num_ranks = 3,
                                    .port = o->port,
                                    .timeout_ms = PATIENCE_MS};
        while (i == 0 && zero_late && !o->over) run_nap_us(1000);
        pthread_create(&threads[i], NULL, run_rank, &joiners[i]);
        if (!zero_late) run_nap_us(100000);
    }
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    o->over = true;
    pthread_join(other, NULL);
    close(holder);
    for (int i = 0; i < 3; i++)
        CHECK_SAY(joiners[i].result == EPIC_OK && !joiners[i].wrong_bytes, "rank %d: %s", i,
                  joiners[i].sentence);
}

static void test_strangers(void)
{
    stranger refusing[] = {
        {.version = FRAME_VERSION, .has_secret = true},
        {.version = FRAME_VERSION, .has_secret = false},
        {.version = 99, .has_secret = true},
    };
    for (int i = 0; i < 3; i++) bootstrap_despite(refuse_one, &refusing[i], true);
    stranger sitting = {0};
    bootstrap_despite(take_seat, &sitting, false);
}

/* No other rank connects. The deadline cuts off the last attempt, which received nothing. So
 * the error must contain what the attempt before it received. */
static void test_last_words(void)
{
    stranger other = {.version = FRAME_VERSION, .has_secret = true, .stays = true};
    joiner alone = {.tcp = {.secret = "hush", .rank = 1, .num_ranks = 2, .timeout_ms = 1000}};
    pthread_t thread;
    int holder;
    other.port = alone.tcp.port = hold_port(&holder);
    pthread_create(&thread, NULL, refuse_one, &other);
    run_rank(&alone);
    other.over = true;
    pthread_join(thread, NULL);
    close(holder);
    CHECK_SAY(alone.result == EPIC_ETIMEOUT && strstr(alone.sentence, "go away, all of you"),
              "%s", alone.sentence);
}

int main(void)
{
    check_begin();
    run_alarm(55);
    epic_secret secret;
    if (epic_secret_open(&secret, "hush") == EPIC_ENOTSUP) return check_skip(epic_error(NULL));
    test_strangers();
    test_last_words();
    test_relay();
    epic_secret_close(&secret);
    return check_end();
}
