/* SPDX-License-Identifier: Apache-2.0 */
/* Measures a net between two processes of this host: the time of a word in each direction, and
 * the rate of rows in puts of several sizes, in one direction and in both at once. For
 * comparison it measures plain TCP with as many bytes in one direction, in the same run. Prints
 * medians.
 *   net [--rounds N] [--threads N]    N threads of the net in addition to the one that polls
 * UCX_TLS and UCX_NET_DEVICES select the network; the default is tcp over lo. */
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

#include "net/net.h"

#define TURNS 2000
#define TOTAL (128u << 20) /* bytes of a measurement */
/* largest number of puts of a measurement, each to an address of its own */
#define MOST 8192
#define BOX (8 + TOTAL)
#define MOST_ROUNDS 100

typedef struct end {
    const net_engine *e;
    net *w;
    int me, pipe; /* me: 0 or 1; pipe: a socket to the other process */
    int threads;
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
    fprintf(stderr, "net: %s\n", why);
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

/* Waits until both processes are here. */
static void bootstrap(end *a)
{
    char byte = 0;
    move_all(a->pipe, &byte, 1, true);
    move_all(a->pipe, &byte, 1, false);
}

static void open_end(end *a)
{
    static unsigned char cards[2][NET_HANDLE_BYTES];
    char why[NET_WHY_BYTES] = "";
    const net_setup setup = {.host = a->me,
                             .num_hosts = 2,
                             .threads = a->threads,
                             .inbox = a->inbox,
                             .inbox_bytes = BOX,
                             .outbox = a->outbox,
                             .outbox_bytes = BOX};
    if (a->e->open(&a->w, &setup, cards[a->me], why) != EPIC_OK) stop(why);
    move_all(a->pipe, cards[a->me], NET_HANDLE_BYTES, true);
    move_all(a->pipe, cards[1 - a->me], NET_HANDLE_BYTES, false);
    if (a->e->connect(a->w, cards, why) != EPIC_OK) stop(why);
}

/* Polls the net. If nothing moves, yields the core, which the other process may need. */
static void look(end *a)
{
    if (a->e->progress(a->w) == 0) sched_yield();
}

static void insist(end *a, uint64_t to, uint64_t value)
{
    while (!a->e->put_word(a->w, 1 - a->me, to, value)) look(a);
}

static void await(end *a, uint64_t value)
{
    while (__atomic_load_n(&a->inbox[0], __ATOMIC_RELAXED) < value) look(a);
}

/* Sends words back and forth. Returns us per direction. */
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

static uint64_t count_of(uint32_t bytes)
{
    const uint64_t count = TOTAL / bytes;
    return count < MOST ? count : MOST;
}

/* Puts rows. Each put ends with the word `base`. The other process has read all earlier puts.
 */
static void put_rows(end *a, uint32_t bytes, uint64_t base)
{
    a->outbox[bytes / 8 - 1] = base;
    for (uint64_t i = 0; i < count_of(bytes); i++)
        while (!a->e->put(a->w, 1 - a->me, 8 + i * bytes, a->outbox, bytes)) look(a);
}

/* Waits until all puts are here. Puts may arrive in any order, but the words of one put arrive
 * in order. */
static void take_rows(end *a, uint32_t bytes, uint64_t base)
{
    for (uint64_t i = 0; i < count_of(bytes); i++)
        while (__atomic_load_n(&a->inbox[(i + 1) * bytes / 8], __ATOMIC_RELAXED) != base)
            look(a);
}

static double gb_per_s(uint32_t bytes, double start)
{
    return (double)count_of(bytes) * bytes / (now_us() - start) / 1e3;
}

/* Sends rows in one direction. Returns GB/s. */
static double time_puts(end *a, uint32_t bytes, uint64_t base)
{
    const double start = now_us();
    if (a->me == 0) {
        put_rows(a, bytes, base);
        await(a, base);
    } else {
        take_rows(a, bytes, base);
        insist(a, 0, base);
    }
    return gb_per_s(bytes, start);
}

/* Sends rows in both directions at once. Returns GB/s per direction, of the slower one. */
static double time_both(end *a, uint32_t bytes, uint64_t base)
{
    const double start = now_us();
    put_rows(a, bytes, base);
    take_rows(a, bytes, base);
    insist(a, 0, base);
    await(a, base);
    return gb_per_s(bytes, start);
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
    for (uint64_t i = 0; i < count_of(bytes); i++)
        move_all(line, a->me == 0 ? a->outbox : a->inbox + 1, bytes, a->me == 0);
    char last = 0;
    move_all(line, &last, 1, a->me == 1);
    return gb_per_s(bytes, start);
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *of, int count)
{
    qsort(of, (size_t)count, sizeof *of, by_size);
    return of[count / 2];
}

static uint64_t measure_words(end *a, int rounds)
{
    double us[MOST_ROUNDS];
    uint64_t base = 1;
    for (int i = 0; i < rounds; i++, base += TURNS + 1) us[i] = time_words(a, base);
    if (a->me == 0) printf("a word, one way: %.1f us\n", median(us, rounds));
    return base;
}

static uint64_t measure_rows(end *a, int line, int rounds, uint32_t bytes, uint64_t base)
{
    double puts[MOST_ROUNDS], both[MOST_ROUNDS], tcp[MOST_ROUNDS];
    for (int i = 0; i < rounds; i++, base += 3) {
        bootstrap(a);
        puts[i] = time_puts(a, bytes, base);
        bootstrap(a);
        both[i] = time_both(a, bytes, base + 1);
        bootstrap(a);
        tcp[i] = time_tcp(a, line, bytes);
    }
    const double way = median(puts, rounds), plain = median(tcp, rounds);
    if (a->me == 0)
        printf("%8u %10.2f %10.2f %10.2f %8.2f\n", bytes, way, median(both, rounds), plain,
               way / plain);
    return base;
}

static void measure(end *a, int rounds)
{
    static const uint32_t sizes[] = {512, 4096, 14336, 57344, 229376};
    char said[256];
    const int line = connect_tcp(a);
    open_end(a);
    a->e->describe(a->w, said, sizeof said);
    if (a->me == 0) printf("%s\n", said);
    uint64_t base = measure_words(a, rounds);
    if (a->me == 0)
        printf("%8s %10s %10s %10s %8s\n", "bytes", "puts GB/s", "both ways", "TCP GB/s",
               "puts/TCP");
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        base = measure_rows(a, line, rounds, sizes[s], base);
    bootstrap(a);
    a->e->close(a->w);
}

static int value_of(int argc, char **argv, const char *option, int otherwise)
{
    for (int i = 1; i + 1 < argc; i += 2)
        if (!strcmp(argv[i], option)) return atoi(argv[i + 1]);
    return otherwise;
}

int main(int argc, char **argv)
{
    char why[NET_WHY_BYTES];
    int pair[2];
    const int wanted = value_of(argc, argv, "--rounds", 5);
    const int rounds = wanted < 1 ? 1 : wanted > MOST_ROUNDS ? MOST_ROUNDS : wanted;
    if (setenv("UCX_TLS", "tcp", 0) == 0 && !strcmp(getenv("UCX_TLS"), "tcp"))
        setenv("UCX_NET_DEVICES", "lo", 0);
    end a = {.e = net_find_engine("ucx", why), .threads = value_of(argc, argv, "--threads", 0)};
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
    measure(&a, rounds);
    if (child == 0) _exit(0);
    int status = 1;
    waitpid(child, &status, 0);
    return status != 0;
}
