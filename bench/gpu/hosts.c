/* SPDX-License-Identifier: Apache-2.0 */
/* Times exchanges of backend hosts, with a process for each rank, and checks the results. The
 * ranks of this machine act as hosts of `local` ranks each. EPIC_NET selects the net (ucx, over
 * tcp and lo unless UCX_TLS and UCX_NET_DEVICES are set). Rows are bf16, and tokens choose 8 of
 * 256 experts uniformly.
 * Prints the time of the slowest rank in us (median of `rounds`), the GB/s of rows that a rank
 * sends to other hosts, the number and size of an operation's puts, and its ring entries. At
 * the end it prints the CPU time that a second without operations takes.
 *   gpu_hosts [ranks=GPUS] [local=1] [tokens=8,128,4096] [hidden=7168] [rounds=20] [order=rank]
 *             [backend=hosts] [threads=0] [idle=1] [sms=0] */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "context/context.h"
#include "copies.h"
#include "epic/epic.h"

enum { MOST_RANKS = 8, MOST_ROUNDS = 200, WARM_UP = 3, TOP_K = 8, EXPERTS = 256 };

static int num_ranks, local = 1, hidden = 7168, rounds = 20, threads, idle = 1, sms;
static uint32_t order = EPIC_BY_RANK;
static const char *tokens_wanted = "8,128,4096", *backend = "hosts";

typedef struct place { /* Memory that all processes share. */
    pthread_barrier_t barrier;
    float us[MOST_RANKS];
    unsigned port;
} place;
static place *shared;

typedef struct seat {
    int rank;
    int64_t tokens, slots, row;
    double rows_out; /* number of rows for ranks of other hosts, one for each token and rank */
    cudaStream_t stream;
    cudaEvent_t begin, end;
    epic_context *ctx;
    epic_layer layer;
    int64_t plan_bytes;
    void *plan, *ids, *in, *recv, *out;
    uint16_t *host; /* the tokens, then the results */
} seat;

static void need(int good, const char *what, const epic_context *ctx)
{
    if (good) return;
    const cudaError_t error = cudaGetLastError();
    fprintf(stderr, "gpu_hosts: %s: %s%s%s\n", what, epic_error(ctx), error ? "; CUDA: " : "",
            error ? cudaGetErrorString(error) : "");
    _exit(1);
}

static void *memory(int64_t bytes)
{
    void *p = NULL;
    need(cudaMalloc(&p, (size_t)bytes) == cudaSuccess, "cudaMalloc", NULL);
    need(fill_in(p, 0, (size_t)bytes) == cudaSuccess, "cudaMemset", NULL);
    return p;
}

/* -------------------------------------------------------------------------------- data ---- */

static uint32_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

/* Draws distinct experts for each token. Values are small integers, whose sums are exact in
 * bf16. */
static void make_data(seat *s)
{
    int32_t *ids = malloc((size_t)s->tokens * TOP_K * sizeof *ids);
    uint64_t state = (uint64_t)s->rank * 977 + 1;
    const int block = EXPERTS / num_ranks;
    for (int64_t t = 0; t < s->tokens; t++) {
        uint32_t ranks = 0;
        for (int k = 0; k < TOP_K; k++) {
            int32_t *id = &ids[t * TOP_K + k];
            int again = 1;
            while (again) {
                *id = (int32_t)(draw(&state) % EXPERTS);
                again = 0;
                for (int j = 0; j < k; j++) again |= ids[t * TOP_K + j] == *id;
            }
            ranks |= 1u << *id / block;
        }
        for (int q = 0; q < num_ranks; q++)
            if (q / local != s->rank / local && ranks >> q & 1) s->rows_out++;
    }
    for (int64_t i = 0; i < s->tokens * hidden; i++) {
        const float x = (float)(draw(&state) % 15 + 1);
        uint32_t word;
        memcpy(&word, &x, sizeof word);
        s->host[i] = (uint16_t)(word >> 16);
    }
    need(copy_in(s->ids, ids, (size_t)s->tokens * TOP_K * sizeof *ids) == cudaSuccess, "ids",
         NULL);
    need(copy_in(s->in, s->host, (size_t)(s->tokens * s->row)) == cudaSuccess, "tokens", NULL);
    free(ids);
}

/* Checks the results: eight equal rows were added, so the exponent grows by three. */
static void check_home(seat *s, const char *what)
{
    uint16_t *home = s->host + s->tokens * hidden;
    need(cudaMemcpy(home, s->out, (size_t)(s->tokens * s->row), cudaMemcpyDeviceToHost) ==
             cudaSuccess,
         "the copy of the results", NULL);
    for (int64_t i = 0; i < s->tokens * hidden; i++)
        if (home[i] != s->host[i] + (3u << 7)) {
            fprintf(stderr, "gpu_hosts: %s, rank %d: element %lld is %04x in place of %04x\n",
                    what, s->rank, (long long)i, home[i], s->host[i] + (3u << 7));
            _exit(1);
        }
}

/* ------------------------------------------------------------------------------- steps ---- */

static epic_result plan_and_dispatch(seat *s)
{
    const epic_plan_args plan = {.call.stream = s->stream,
                                 .layer = &s->layer,
                                 .plan = s->plan,
                                 .plan_bytes = s->plan_bytes,
                                 .topk_idx = s->ids,
                                 .num_tokens = s->tokens,
                                 .capacity = s->slots};
    const epic_dispatch_args dispatch = {.tokens = {s->in, s->tokens, s->row},
                                         .recv = {s->recv, s->slots, s->row}};
    return epic_plan_dispatch(s->ctx, &plan, &dispatch);
}

static epic_result dispatch(seat *s)
{
    return epic_dispatch(s->ctx, &(epic_dispatch_args){.call.stream = s->stream,
                                                       .layer = &s->layer,
                                                       .plan = s->plan,
                                                       .plan_bytes = s->plan_bytes,
                                                       .tokens = {s->in, s->tokens, s->row},
                                                       .recv = {s->recv, s->slots, s->row}});
}

static epic_result combine(seat *s)
{
    return epic_combine(s->ctx, &(epic_combine_args){.call.stream = s->stream,
                                                     .layer = &s->layer,
                                                     .plan = s->plan,
                                                     .plan_bytes = s->plan_bytes,
                                                     .rows = {s->recv, s->slots, s->row},
                                                     .out = {s->out, s->tokens, s->row},
                                                     .type = EPIC_BF16});
}

/* Reads the bytes and puts that this rank has passed to the net so far, and the entries of its
 * ring. */
static void read_given(const seat *s, uint64_t given[3])
{
    typedef void reader(const epic_group *, uint64_t *);
    static reader *read;
    void *library = dlopen("libepic_hosts.so", RTLD_NOLOAD | RTLD_LAZY);
    given[0] = given[1] = given[2] = 0;
    if (!library) return; /* another backend has no such counts */
    if (!read) *(void **)&read = dlsym(library, "epic_backend_hosts_counts");
    if (read) read(s->ctx->group, given);
    dlclose(library);
}

static double used_ms(void) /* Returns the CPU time of this process in ms. */
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e3 +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e3;
}

static void time_idle(const seat *s)
{
    usleep(20000);
    pthread_barrier_wait(&shared->barrier);
    const double before = used_ms();
    sleep(1);
    const double used = used_ms() - before;
    pthread_barrier_wait(&shared->barrier);
    if (s->rank == 0)
        printf("        idle             %10.2f %% of a core a rank\n",
               used / 10 / (threads ? num_ranks : 1));
    fflush(stdout);
}

static int by_size(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Times the steps one after the other. All ranks begin a step together. */
static void time_step(seat *s, const char *name, epic_result (*step)(seat *))
{
    float times[MOST_ROUNDS], ms = 0;
    uint64_t before[3] = {0}, after[3];
    for (int i = -WARM_UP; i < rounds; i++) {
        pthread_barrier_wait(&shared->barrier);
        if (i == 0) read_given(s, before);
        need(cudaEventRecord(s->begin, s->stream) == cudaSuccess, "an event", NULL);
        need(step(s) == EPIC_OK, name, s->ctx);
        need(cudaEventRecord(s->end, s->stream) == cudaSuccess, "an event", NULL);
        need(cudaStreamSynchronize(s->stream) == cudaSuccess, "a stream", NULL);
        need(epic_check(s->ctx) == EPIC_OK, name, s->ctx);
        need(cudaEventElapsedTime(&ms, s->begin, s->end) == cudaSuccess, "a time", NULL);
        shared->us[s->rank] = ms * 1000;
        pthread_barrier_wait(&shared->barrier);
        float most = 0;
        for (int q = 0; q < num_ranks; q++)
            if (shared->us[q] > most) most = shared->us[q];
        if (i >= 0) times[i] = most;
    }
    qsort(times, (size_t)rounds, sizeof *times, by_size);
    const double us = times[rounds / 2], bytes = s->rows_out * (double)s->row;
    read_given(s, after);
    const double puts = (double)(after[1] - before[1]);
    if (s->rank == 0)
        printf("%6lld  %-16s %10.1f us  (least %.1f, most %.1f)  %7.2f GB/s, %.0f puts of %.1f "
               "KB, %.0f entries\n",
               (long long)s->tokens, name, us, times[0], times[rounds - 1], bytes / us / 1e3,
               puts / rounds, puts > 0 ? (double)(after[0] - before[0]) / puts / 1024 : 0,
               (double)(after[2] - before[2]) / rounds);
    fflush(stdout);
}

/* --------------------------------------------------------------------------- processes ---- */

static void take_seat(seat *s, unsigned port)
{
    const epic_tcp tcp = {
        .rank = s->rank, .num_ranks = num_ranks, .port = port, .timeout_ms = 60000};
    const epic_config config = {.max_tokens = s->tokens,
                                .max_row_bytes = s->row,
                                .num_ranks = (uint32_t)num_ranks,
                                .timeout_ms = 10000,
                                .max_sms = (uint32_t)sms,
                                .backend = backend};
    epic_bootstrap bootstrap;
    need(epic_bootstrap_tcp(&bootstrap, &tcp) == EPIC_OK, "the bootstrap", NULL);
    need(epic_open(&s->ctx, &bootstrap, &config) == EPIC_OK, "open", s->ctx);
    epic_bootstrap_close(&bootstrap);
    s->layer = (epic_layer){.num_experts = EXPERTS, .top_k = TOP_K, .sum_order = order};
    need(epic_capacity_bound(&config, &s->layer, &s->slots) == EPIC_OK, "capacity", NULL);
    if (s->slots > num_ranks * s->tokens * TOP_K) s->slots = num_ranks * s->tokens * TOP_K;
    need(epic_plan_bytes(&config, &s->layer, &s->plan_bytes) == EPIC_OK, "plan size", NULL);
    s->plan = memory(s->plan_bytes);
    s->ids = memory(s->tokens * TOP_K * 4);
    s->in = memory(s->tokens * s->row);
    s->out = memory(s->tokens * s->row);
    s->recv = memory(s->slots * s->row);
    s->host = malloc((size_t)(2 * s->tokens * s->row));
    need(s->host != NULL, "host memory", NULL);
    need(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking) == cudaSuccess &&
             cudaEventCreate(&s->begin) == cudaSuccess &&
             cudaEventCreate(&s->end) == cudaSuccess,
         "a stream", NULL);
    make_data(s);
}

static void give_back(seat *s)
{
    void *all[] = {s->plan, s->ids, s->in, s->out, s->recv};
    epic_close(s->ctx);
    for (int i = 0; i < 5; i++) (void)cudaFree(all[i]);
    free(s->host);
}

static int run(int rank)
{
    int gpus = 0;
    unsigned port = shared->port;
    need(cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0, "no GPU", NULL);
    need(cudaSetDevice(rank % gpus) == cudaSuccess, "the GPU", NULL);
    for (const char *at = tokens_wanted; *at; port++) {
        char *rest;
        seat s = {.rank = rank, .tokens = strtol(at, &rest, 10), .row = hidden * 2};
        at = *rest == ',' ? rest + 1 : rest;
        take_seat(&s, port);
        if (rank == 0) printf("%s, %s\n", epic_backend_name(s.ctx), epic_net_name(s.ctx));
        time_step(&s, "plan + dispatch", plan_and_dispatch);
        time_step(&s, "dispatch", dispatch);
        time_step(&s, "combine", combine);
        check_home(&s, "combine");
        if (idle && !*at) time_idle(&s);
        give_back(&s);
    }
    return 0;
}

/* Returns the number of GPUs. A child process counts them, because a process that forks must
 * not have used CUDA. */
static int num_gpus(void)
{
    int count = 0, status = 0;
    const pid_t child = fork();
    if (child == 0) _exit(cudaGetDeviceCount(&count) == cudaSuccess ? count : 0);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

/* Returns the value if the argument sets the option `name`, else NULL. */
static const char *value_of(const char *argument, const char *name)
{
    const size_t length = strlen(name);
    return !strncmp(argument, name, length) && argument[length] == '=' ? argument + length + 1
                                                                       : NULL;
}

static int is_known(const char *argument)
{
    const struct {
        const char *name;
        int *to;
    } numbers[] = {{"ranks", &num_ranks}, {"local", &local},     {"hidden", &hidden},
                   {"rounds", &rounds},   {"threads", &threads}, {"idle", &idle},
                   {"sms", &sms}};
    const char *value = NULL;
    for (int i = 0; i < 7 && !value; i++)
        if ((value = value_of(argument, numbers[i].name))) *numbers[i].to = atoi(value);
    if (value) return 1;
    if ((value = value_of(argument, "tokens"))) return tokens_wanted = value, 1;
    if ((value = value_of(argument, "backend"))) return backend = value, 1;
    if (!(value = value_of(argument, "order"))) return 0;
    order = strcmp(value, "tree") ? EPIC_BY_RANK : EPIC_TREE;
    return 1;
}

static void read_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (!is_known(argv[i])) {
            fprintf(stderr, "gpu_hosts: unknown option %s\n", argv[i]);
            exit(2);
        }
    if (rounds < 1 || rounds > MOST_ROUNDS) rounds = 20;
    if (local < 1) local = 1;
}

static void share(void)
{
    pthread_barrierattr_t all;
    shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(shared != MAP_FAILED, "mmap", NULL);
    pthread_barrierattr_init(&all);
    pthread_barrierattr_setpshared(&all, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &all, (unsigned)num_ranks);
    shared->port = 20000 + (unsigned)getpid() % 20000;
}

static int run_processes(void)
{
    pid_t children[MOST_RANKS];
    int status, failed = 0;
    for (int q = 0; q < num_ranks; q++)
        if ((children[q] = fork()) == 0) _exit(run(q));
    for (pid_t ended; (ended = wait(&status)) > 0;) {
        failed |= status != 0;
        for (int q = 0; q < num_ranks; q++) {
            if (children[q] == ended) children[q] = 0;
            /* the remaining ranks would wait forever */
            if (status && children[q]) kill(children[q], SIGKILL);
        }
    }
    return failed;
}

static void *run_thread(void *rank)
{
    run((int)(intptr_t)rank);
    return NULL;
}

/* Runs the ranks as threads. A rank that fails ends the process. */
static int run_threads(void)
{
    pthread_t ranks[MOST_RANKS];
    for (int q = 0; q < num_ranks; q++)
        need(pthread_create(&ranks[q], NULL, run_thread, (void *)(intptr_t)q) == 0, "a thread",
             NULL);
    for (int q = 0; q < num_ranks; q++) pthread_join(ranks[q], NULL);
    return 0;
}

int main(int argc, char **argv)
{
    char host[24];
    read_options(argc, argv);
    const int gpus = num_gpus();
    if (!num_ranks) num_ranks = gpus;
    if (!gpus || num_ranks < 2 || num_ranks > MOST_RANKS) {
        printf("left out: gpu_hosts needs 2 to %d ranks, and there are %d GPUs\n", MOST_RANKS,
               gpus);
        return 0;
    }
    snprintf(host, sizeof host, "%%r/%d", local);
    setenv("EPIC_HOST", strcmp(backend, "p2p") ? host : "one", 0);
    if (setenv("UCX_TLS", "tcp", 0) == 0 && !strcmp(getenv("UCX_TLS"), "tcp"))
        setenv("UCX_NET_DEVICES", "lo", 0);
    share();
    printf("%s: %d ranks, %d on a host; hidden %d, top-%d of %d\n", backend, num_ranks, local,
           hidden, TOP_K, EXPERTS);
    fflush(stdout);
    return threads ? run_threads() : run_processes();
}
