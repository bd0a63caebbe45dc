/* SPDX-License-Identifier: Apache-2.0 */
/* Measures the bootstrap of many ranks: processes of this host that open a bootstrap over TCP,
 * make some gathers, and close it. With --group they open and close a group of backend shm,
 * too. Rank 0 prints times, its memory and its processor time. The last line of --group is the
 * processor time of all ranks in epic_open, which other programs on the machine hardly change.
 *
 *     build/bench/bootstrap [--ranks 64] [--bytes 4800] [--gathers 3] [--secret] [--group]
 *
 * --bytes is the size that each rank sends to a gather. epic_open makes three gathers of 728
 * bytes, and with the backend hosts one to three more of about 4,800 bytes. */
#include <netinet/in.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "epic/epic.h"

enum { MAX_RANKS = 4096, TIMEOUT_MS = 300000 };

static int num_ranks = 64, num_gathers = 3;
static int64_t bytes = 4800;
static bool has_secret, with_group;

static struct board {        /* shared by all processes */
    atomic_int num_ready;    /* ranks that have started */
    _Atomic int64_t open_us; /* processor time of all ranks in epic_open */
} * board;

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static _Noreturn void fail_rank(int rank, const char *what)
{
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, epic_error(NULL));
    _exit(1);
}

/* Returns the number of kB after `label` in /proc/self/status. */
static long read_status(const char *label)
{
    char line[256];
    long kb = -1;
    FILE *in = fopen("/proc/self/status", "r");
    while (in && fgets(line, sizeof line, in))
        if (!strncmp(line, label, strlen(label))) kb = atol(line + strlen(label) + 1);
    if (in) fclose(in);
    return kb;
}

static double cpu_ms(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e3 +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-3;
}

/* Prints one line of rank 0. `begin` and `cpu` are the values at the begin of the step. */
static void print_step(int rank, const char *what, double begin, double cpu)
{
    if (rank != 0) return;
    printf(
        "%-14s %9.1f ms, processor time of rank 0 %8.1f ms, its memory %7.1f MiB, peak %.1f\n",
        what, now_ms() - begin, cpu_ms() - cpu, (double)read_status("VmRSS:") / 1024,
        (double)read_status("VmHWM:") / 1024);
}

static void run_gathers(const epic_bootstrap *bootstrap)
{
    unsigned char *mine = malloc((size_t)bytes);
    unsigned char *all = malloc((size_t)(bytes * num_ranks));
    if (!mine || !all) fail_rank(bootstrap->rank, "no memory");
    memset(mine, bootstrap->rank, (size_t)bytes);
    for (int i = 0; i < num_gathers; i++) {
        const double begin = now_ms(), cpu = cpu_ms();
        if (bootstrap->gather(bootstrap->self, mine, all, bytes) != EPIC_OK)
            fail_rank(bootstrap->rank, "gather");
        for (int r = 0; r < num_ranks; r++)
            if (all[r * bytes] != (unsigned char)r) fail_rank(bootstrap->rank, "wrong bytes");
        print_step(bootstrap->rank, "gather", begin, cpu);
    }
    free(all);
    free(mine);
}

static void open_group(const epic_bootstrap *bootstrap)
{
    const epic_config config = {.max_tokens = 1,
                                .max_row_bytes = 16,
                                .staging_bytes = EPIC_LEAST_STAGING,
                                .max_in_flight = 1,
                                .timeout_ms = TIMEOUT_MS,
                                .backend = "shm"};
    epic_context *ctx;
    double begin = now_ms(), cpu = cpu_ms();
    if (epic_open(&ctx, bootstrap, &config) != EPIC_OK) {
        fprintf(stderr, "rank %d: epic_open: %s\n", bootstrap->rank, epic_error(ctx));
        _exit(1);
    }
    atomic_fetch_add(&board->open_us, (int64_t)((cpu_ms() - cpu) * 1e3));
    print_step(bootstrap->rank, "epic_open", begin, cpu);
    begin = now_ms(), cpu = cpu_ms();
    epic_close(ctx);
    print_step(bootstrap->rank, "epic_close", begin, cpu);
}

static void run_rank(int rank, uint32_t port)
{
    epic_bootstrap bootstrap;
    const epic_tcp tcp = {.rank = rank,
                          .num_ranks = num_ranks,
                          .port = port,
                          .timeout_ms = TIMEOUT_MS,
                          .secret = has_secret ? "secret of the benchmark" : NULL};
    atomic_fetch_add(&board->num_ready, 1);
    while (atomic_load(&board->num_ready) < num_ranks) usleep(1000);
    double begin = now_ms(), cpu = cpu_ms();
    if (epic_bootstrap_tcp(&bootstrap, &tcp) != EPIC_OK) fail_rank(rank, "epic_bootstrap_tcp");
    print_step(rank, "connect", begin, cpu);
    run_gathers(&bootstrap);
    if (with_group) open_group(&bootstrap);
    begin = now_ms(), cpu = cpu_ms();
    epic_bootstrap_close(&bootstrap);
    print_step(rank, "close", begin, cpu);
}

/* Returns a port that no program uses now. */
static uint32_t find_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) ||
        getsockname(fd, (struct sockaddr *)&at, &length))
        exit(1);
    close(fd);
    return ntohs(at.sin_port);
}

static bool read_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--secret"))
            has_secret = true;
        else if (!strcmp(argv[i], "--group"))
            with_group = true;
        else if (!strcmp(argv[i], "--ranks"))
            num_ranks = atoi(value), i++;
        else if (!strcmp(argv[i], "--bytes"))
            bytes = atol(value), i++;
        else if (!strcmp(argv[i], "--gathers"))
            num_gathers = atoi(value), i++;
        else
            return false;
    }
    return num_ranks >= 2 && num_ranks <= MAX_RANKS && bytes >= 1 && num_gathers >= 0;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!read_options(argc, argv)) {
        fprintf(stderr,
                "usage: bootstrap [--ranks 2 to %d] [--bytes N] [--gathers N] [--secret] "
                "[--group]\n",
                MAX_RANKS);
        return 2;
    }
    const uint32_t port = find_port();
    board = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED) return 1;
    printf("%d ranks, gathers of %lld bytes per rank%s\n", num_ranks, (long long)bytes,
           has_secret ? ", with a secret" : "");
    fflush(stdout);
    for (int r = 0; r < num_ranks; r++) {
        const pid_t pid = fork();
        if (pid < 0) return 1;
        if (pid > 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        run_rank(r, port);
        fflush(stdout);
        _exit(0);
    }
    int status, failed = 0;
    while (wait(&status) > 0) failed |= status != 0;
    if (with_group)
        printf("epic_open: processor time of all ranks %.0f ms\n",
               (double)board->open_us * 1e-3);
    return failed;
}
