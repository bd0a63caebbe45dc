/* SPDX-License-Identifier: Apache-2.0 */
/* What a wire costs: a word each way, and rows in puts of several sizes, between two processes of
 * this host, beside plain TCP that carries as many bytes in the same run.
 *   wire [--rounds N]    UCX_TLS and UCX_NET_DEVICES choose the network; tcp over lo unless set */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "wire/wire.h"

#define BOX (8u << 20)
#define TURNS 2000
#define TOTAL (256u << 20) /* bytes of a measurement */

typedef struct end {
    const wire_engine *e;
    wire *w;
    int me, pipe; /* a socket pair to the other process */
    uint64_t *inbox, *outbox;
} end;

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void stop(const char *why)
{
    fprintf(stderr, "wire: %s\n", why);
    _exit(1);
}

static void move_all(int fd, void *bytes, size_t count, bool out)
{
    for (char *at = bytes; count > 0;) {
        const ssize_t n = out ? write(fd, at, count) : read(fd, at, count);
        if (n <= 0) stop("the other process has gone");
        at += n;
        count -= (size_t)n;
    }
}

/* Both are here. */
static void meet(end *a)
{
    char byte = 0;
    move_all(a->pipe, &byte, 1, true);
    move_all(a->pipe, &byte, 1, false);
}

static void open_end(end *a)
{
    static unsigned char cards[2][WIRE_CARD_BYTES];
    char why[WIRE_WHY] = "";
    const wire_setup setup = {.host = a->me,
                              .num_hosts = 2,
                              .inbox = a->inbox,
                              .inbox_bytes = BOX,
                              .outbox = a->outbox,
                              .outbox_bytes = BOX};
    if (a->e->open(&a->w, &setup, cards[a->me], why) != EPIC_OK) stop(why);
    move_all(a->pipe, cards[a->me], WIRE_CARD_BYTES, true);
    move_all(a->pipe, cards[1 - a->me], WIRE_CARD_BYTES, false);
    if (a->e->connect(a->w, cards, why) != EPIC_OK) stop(why);
}

/* Gives its core away while nothing moves: the other process may need it. */
static void look(end *a)
{
    if (a->e->look(a->w) == 0) sched_yield();
}

static void insist(end *a, uint64_t to, uint64_t value)
{
    while (!a->e->word(a->w, 1 - a->me, to, value)) look(a);
}

static void await(end *a, uint64_t value)
{
    while (__atomic_load_n(&a->inbox[0], __ATOMIC_RELAXED) != value) look(a);
}

/* Words that answer each other; us one way. */
static double time_words(end *a, uint64_t base)
{
    const double start = now_us();
    for (uint64_t i = 1; i <= TURNS; i++) {
        if (a->me == 0) insist(a, 0, base + i);
        await(a, base + i);
        if (a->me == 1) insist(a, 0, base + i);
    }
    return (now_us() - start) / TURNS / 2;
}

/* Rows one way; the receiver knows the last put of each slot by its last word.  GB/s */
static double time_puts(end *a, uint32_t bytes, uint64_t base)
{
    const uint64_t slots = (BOX - 8) / bytes, count = TOTAL / bytes;
    uint64_t given = 0;
    const double start = now_us();
    for (uint64_t i = 0; a->me == 0 && i < count; given++, i++)
        while (!a->e->put(a->w, 1, 8 + i % slots * bytes, a->outbox, bytes)) look(a);
    if (a->me ==
        0) { /* TCP and shared memory keep the order of messages, so the last is last */
        insist(a, 0, base);
        await(a, base);
    } else {
        await(a, base);
        insist(a, 0, base);
    }
    return (double)count * bytes / (now_us() - start) / 1e3;
}

static int connect_tcp(const end *a)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0), line;
    if (a->me == 0) {
        bind(fd, (struct sockaddr *)&at, sizeof at);
        listen(fd, 1);
        getsockname(fd, (struct sockaddr *)&at, &length);
        move_all(a->pipe, &at, sizeof at, true);
        line = accept(fd, NULL, NULL);
        close(fd);
    } else {
        move_all(a->pipe, &at, sizeof at, false);
        if (connect(fd, (struct sockaddr *)&at, sizeof at) != 0) stop("connect");
        line = fd;
    }
    setsockopt(line, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    return line;
}

static double time_tcp(end *a, int line, uint32_t bytes)
{
    const double start = now_us();
    for (uint64_t i = 0; i < TOTAL / bytes; i++)
        move_all(line, a->me == 0 ? a->outbox : a->inbox, bytes, a->me == 0);
    char last = 0;
    move_all(line, &last, 1, a->me == 1);
    return (double)(TOTAL / bytes) * bytes / (now_us() - start) / 1e3;
}

static double best(double a, double b)
{
    return a > b ? a : b;
}

static void measure(end *a, int rounds)
{
    static const uint32_t sizes[] = {512, 4096, 14336, 57344, 229376};
    char said[256];
    const int line = connect_tcp(a);
    open_end(a);
    a->e->say(a->w, said, sizeof said);
    uint64_t base = 1;
    double word = 1e9;
    for (int i = 0; i < rounds; i++, base += TURNS + 1) {
        const double us = time_words(a, base);
        if (us < word) word = us;
    }
    if (a->me == 0) printf("%s\na word, one way: %.1f us\n", said, word);
    if (a->me == 0) printf("%8s %10s %10s %8s\n", "bytes", "puts GB/s", "TCP GB/s", "ratio");
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        double puts = 0, tcp = 0;
        for (int i = 0; i < rounds; i++, base++) {
            meet(a);
            puts = best(puts, time_puts(a, sizes[s], base));
            meet(a);
            tcp = best(tcp, time_tcp(a, line, sizes[s]));
        }
        if (a->me == 0) printf("%8u %10.2f %10.2f %8.2f\n", sizes[s], puts, tcp, puts / tcp);
    }
    meet(a);
    a->e->close(a->w);
}

int main(int argc, char **argv)
{
    char why[WIRE_WHY];
    int pair[2];
    const int rounds = argc == 3 && !strcmp(argv[1], "--rounds") ? atoi(argv[2]) : 5;
    if (setenv("UCX_TLS", "tcp", 0) == 0 && !strcmp(getenv("UCX_TLS"), "tcp"))
        setenv("UCX_NET_DEVICES", "lo", 0);
    end a = {.e = wire_find("ucx", why)};
    if (!a.e) stop(why);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) stop("socketpair");
    const pid_t child = fork();
    a.me = child == 0;
    a.pipe = pair[a.me];
    close(pair[1 - a.me]);
    a.inbox = aligned_alloc(4096, BOX);
    a.outbox = aligned_alloc(4096, BOX);
    if (!a.inbox || !a.outbox) stop("no memory");
    memset(a.inbox, 0, BOX);
    memset(a.outbox, 1, BOX);
    measure(&a, rounds > 0 ? rounds : 1);
    if (child == 0) _exit(0);
    int status = 1;
    waitpid(child, &status, 0);
    return status != 0;
}
