/* SPDX-License-Identifier: Apache-2.0 */
/* The net "local", for tests (EPIC_NET=local). It connects GPUs of one machine, about as fast
 * as a good network.
 * If net memory is on GPUs (EPIC_NET_MEMORY=gpu or unset), copy engines stand in for a NIC that
 * can access GPU memory. A separate thread issues the copies, because issuing one takes 2.7 us,
 * where a NIC takes 0.25 us. Urgent words have a queue and streams of their own, and are issued
 * first. With EPIC_LOCAL_NIC=CTAS a kernel with this many CTAs copies instead (nic.h), at the
 * speed of a NIC of EPIC_LOCAL_SPEED GB/s (50), and no CUDA call waits for it.
 * If net memory is on the host, threads copy it (EPIC_LOCAL_THREADS, 8), and the calling thread
 * copies small puts. This stands in for a NIC that cannot access GPU memory. The ranks must be
 * in one process. This net calls CUDA where a real net must not, and never reports a dead host.
 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "net/net.h"
#include "nic.h"

#define DEPTH 256  /* largest number of unfinished puts to a host */
#define EVENTS 16  /* events per host */
#define OF_EVENT 4 /* each event covers this many puts, or the last put */
/* queue length of the threads that copy, and of the thread that issues copies */
#define JOBS 1024
#define COPIERS 32     /* largest number of threads that copy */
#define PATIENCE 20000 /* how often a thread looks for a job before it sleeps */
#define SMALL 1024     /* puts of at most this many bytes are copied by the calling thread */

typedef struct card {
    int64_t pid;
    void *inbox; /* the inbox, if it is in this process */
    int32_t device, on_gpu;
    cudaIpcMemHandle_t handle;
} card;

/* kinds of traffic, each with a stream of its own */
enum { URGENT = NIC_URGENT, ROWS = NIC_ROWS, LANES };

typedef struct job {
    char *to;
    const char *from;
    uint64_t bytes;
    int *left;
    struct lane *lane;
} job;

typedef struct jobs {
    uint64_t posted, taken;
    job at[JOBS];
} jobs;

typedef struct lane { /* copies to a peer by the issuing thread */
    cudaStream_t stream;
    cudaEvent_t events[EVENTS];
    uint64_t marks[EVENTS]; /* number of copies issued when an event was recorded */
    uint64_t num_events, num_seen;
    /* numbers of copies that were requested, covered by an event, and seen to have ended */
    uint64_t asked, marked, seen;
    int *left[DEPTH]; /* counters of copies that have not been seen to end */
} lane;

typedef struct peer {
    char *inbox;
    bool mapped;
    uint64_t given, finished; /* numbers of puts passed to the net, and of finished words */
    int *left;                /* [DEPTH], 1: this copy has ended */
    lane lanes[LANES];
} peer;

struct net {
    net_setup setup;
    int device, num_copiers, leave;
    int num_asleep; /* number of threads that sleep or are about to sleep */
    pthread_mutex_t lock;
    pthread_cond_t awake; /* signalled when a job is posted while threads sleep */
    nic *nic;             /* NULL: copy engines */
    /* [num_hosts][DEPTH], pinned if net memory is on GPUs; the flags of `left` follow */
    uint64_t *words;
    peer peers[NET_MAX_HOSTS];
    pthread_t copiers[COPIERS];
    jobs jobs[LANES]; /* the threads that copy host memory use only ROWS */
};

static bool local_can_open(char *why)
{
    (void)why;
    return true;
}

static bool reaches_gpu(void)
{
    return true;
}

static epic_result refuse_open(char *why, const char *what, cudaError_t error)
{
    snprintf(why, NET_WHY_BYTES, "net \"local\": %s: %s", what, cudaGetErrorString(error));
    return EPIC_EDEVICE;
}

#define CUDA(call, what)                                                          \
    do {                                                                          \
        const cudaError_t cuda_error = (call);                                    \
        if (cuda_error != cudaSuccess) return refuse_open(why, what, cuda_error); \
    } while (0)

/* ------------------------------------------------------------------- threads that copy ---- */

/* Copies whole words, and stores each word only once, because the GPU may poll any word and
 * write there after it has seen it. memcpy() stores the last words twice. */
static void copy_words(const job *j)
{
    const uint64_t *from = (const uint64_t *)(const void *)j->from;
    uint64_t *to = (uint64_t *)(void *)j->to;
    for (uint64_t i = 0; i < j->bytes / 8; i++)
        __atomic_store_n(&to[i], from[i], __ATOMIC_RELAXED);
    __atomic_store_n(j->left, 1, __ATOMIC_RELEASE);
}

/* Wakes all sleeping threads, because it is not known which of them the job is for. */
static void wake_threads(net *w)
{
    if (!__atomic_load_n(&w->num_asleep, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&w->lock);
    pthread_cond_broadcast(&w->awake);
    pthread_mutex_unlock(&w->lock);
}

/* Sleeps until `is_wanted` returns true. The count is increased before the first check, so that
 * a thread that posts a job later sees it. */
static void sleep_until(net *w, bool (*is_wanted)(const net *, uint64_t), uint64_t number)
{
    pthread_mutex_lock(&w->lock);
    __atomic_add_fetch(&w->num_asleep, 1, __ATOMIC_SEQ_CST);
    while (!is_wanted(w, number)) pthread_cond_wait(&w->awake, &w->lock);
    __atomic_sub_fetch(&w->num_asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&w->lock);
}

static bool has_job(const net *w, uint64_t number)
{
    return __atomic_load_n(&w->jobs[ROWS].posted, __ATOMIC_SEQ_CST) > number ||
           __atomic_load_n(&w->leave, __ATOMIC_SEQ_CST);
}

/* Spins before it sleeps. It never calls sched_yield(), which gives the core to another
 * spinning thread for a whole time slice. With 14 threads per rank one token took 4.9 ms (4
 * H100, 64 cores). */
static void *run_copier(void *self)
{
    net *w = self;
    jobs *all = &w->jobs[ROWS];
    for (;;) {
        const uint64_t mine = __atomic_fetch_add(&all->taken, 1, __ATOMIC_RELAXED);
        for (int idle = 0; __atomic_load_n(&all->posted, __ATOMIC_ACQUIRE) <= mine; idle++) {
            if (__atomic_load_n(&w->leave, __ATOMIC_ACQUIRE)) return NULL;
            __builtin_ia32_pause();
            if (idle < PATIENCE) continue;
            sleep_until(w, has_job, mine);
            idle = 0;
        }
        copy_words(&all->at[mine % JOBS]);
    }
}

/* ---------------------------------------------------------------- the thread that asks ---- */

static bool is_posted(const jobs *all)
{
    return all->taken < __atomic_load_n(&all->posted, __ATOMIC_SEQ_CST);
}

/* Records that all copies issued before the event have ended. */
static void note_copied(lane *l, uint64_t mark)
{
    for (; l->seen < mark; l->seen++)
        __atomic_store_n(l->left[l->seen % DEPTH], 1, __ATOMIC_RELEASE);
}

/* Queries events. Events cost time, so one event covers several copies, unless no later event
 * would cover the last copies. `more`: further copies will be issued immediately. */
static int see_events(lane *l, bool more)
{
    int moved = 0;
    for (; l->num_seen < l->num_events; l->num_seen++, moved++) {
        if (cudaEventQuery(l->events[l->num_seen % EVENTS]) != cudaSuccess) break;
        note_copied(l, l->marks[l->num_seen % EVENTS]);
    }
    const uint64_t under_way = l->num_events - l->num_seen, unmarked = l->asked - l->marked;
    if (unmarked == 0 || under_way == EVENTS) return moved;
    if (unmarked < OF_EVENT && (more || under_way)) return moved;
    if (cudaEventRecord(l->events[l->num_events % EVENTS], l->stream) != cudaSuccess)
        return moved;
    l->marks[l->num_events++ % EVENTS] = l->marked = l->asked;
    return moved + 1;
}

static int ask_next(net *w)
{
    jobs *all = &w->jobs[is_posted(&w->jobs[URGENT]) ? URGENT : ROWS];
    if (!is_posted(all)) return 0;
    const job *j = &all->at[all->taken % JOBS];
    lane *l = j->lane;
    (void)cudaMemcpyAsync(j->to, j->from, j->bytes, cudaMemcpyDefault, l->stream);
    l->left[l->asked++ % DEPTH] = j->left;
    __atomic_store_n(&all->taken, all->taken + 1, __ATOMIC_RELEASE);
    return 1;
}

static int see_all(net *w)
{
    int moved = 0;
    for (int h = 0; h < w->setup.num_hosts; h++)
        for (int i = 0; i < LANES; i++) {
            lane *l = &w->peers[h].lanes[i];
            if (l->seen < l->asked) moved += see_events(l, is_posted(&w->jobs[i]));
        }
    return moved;
}

static bool awaits_some(const net *w)
{
    for (int h = 0; h < w->setup.num_hosts; h++)
        for (int i = 0; i < LANES; i++)
            if (w->peers[h].lanes[i].seen < w->peers[h].lanes[i].asked) return true;
    return false;
}

static bool has_any_job(const net *w, uint64_t number)
{
    return is_posted(&w->jobs[URGENT]) || has_job(w, number);
}

static void *run_asker(void *self)
{
    net *w = self;
    (void)cudaSetDevice(w->device);
    for (int idle = 0; !__atomic_load_n(&w->leave, __ATOMIC_ACQUIRE);) {
        const int moved = ask_next(w) + see_all(w);
        idle = moved || awaits_some(w) ? 0 : idle + 1;
        if (idle > PATIENCE) sleep_until(w, has_any_job, w->jobs[ROWS].taken);
    }
    return NULL;
}

static int num_copiers(void)
{
    const char *text = getenv("EPIC_LOCAL_THREADS");
    const int wanted = text ? atoi(text) : 8;
    return wanted < 1 ? 1 : wanted > COPIERS ? COPIERS : wanted;
}

static void start_threads(net *w)
{
    if (w->nic) return;
    const int most = w->setup.on_gpu ? 1 : num_copiers();
    for (int i = 0; i < most; i++)
        if (pthread_create(&w->copiers[w->num_copiers], NULL,
                           w->setup.on_gpu ? run_asker : run_copier, w) == 0)
            w->num_copiers++;
}

/* ----------------------------------------------------------------------------- opening ---- */

static void close_net(net *w);

static epic_result prepare_card(net *w, card *c, char *why)
{
    const net_setup *s = &w->setup;
    CUDA(cudaGetDevice(&w->device), "the device");
    *c = (card){.pid = getpid(), .inbox = s->inbox, .device = w->device, .on_gpu = s->on_gpu};
    const size_t puts = (size_t)s->num_hosts * DEPTH, bytes = puts * (8 + sizeof(int));
    CUDA(cudaHostAlloc((void **)&w->words, bytes, cudaHostAllocMapped), "pinned memory");
    for (int h = 0; h < s->num_hosts; h++)
        w->peers[h].left = (int *)(void *)(w->words + puts) + h * DEPTH;
    if (!s->on_gpu) return EPIC_OK;
    CUDA(cudaIpcGetMemHandle(&c->handle, s->inbox), "a handle of the inbox");
    const char *ctas = getenv("EPIC_LOCAL_NIC"), *speed = getenv("EPIC_LOCAL_SPEED");
    if (ctas && atoi(ctas) > 0)
        CUDA(nic_open(&w->nic, atoi(ctas), speed ? atof(speed) : 50), "a NIC");
    return EPIC_OK;
}

static epic_result open_net(net **out, const net_setup *setup, void *bytes, char *why)
{
    net *w = calloc(1, sizeof *w);
    if (!w) return refuse_open(why, "host memory", cudaErrorMemoryAllocation);
    w->setup = *setup;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->awake, NULL);
    const epic_result result = prepare_card(w, bytes, why);
    if (result == EPIC_OK)
        *out = w;
    else
        close_net(w);
    return result;
}

static epic_result open_lane(lane *l, char *why)
{
    CUDA(cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking), "a stream");
    for (int i = 0; i < EVENTS; i++)
        CUDA(cudaEventCreateWithFlags(&l->events[i], cudaEventDisableTiming), "an event");
    return EPIC_OK;
}

static epic_result reach_gpu(net *w, peer *p, const card *c, char *why)
{
    void *inbox = c->inbox;
    if (c->pid != getpid()) {
        CUDA(cudaIpcOpenMemHandle(&inbox, c->handle, cudaIpcMemLazyEnablePeerAccess),
             "a peer's inbox");
        p->mapped = true;
    } else if (c->device != w->device) {
        const cudaError_t error = cudaDeviceEnablePeerAccess(c->device, 0);
        if (error != cudaErrorPeerAccessAlreadyEnabled) CUDA(error, "peer access");
        (void)cudaGetLastError();
    }
    p->inbox = inbox;
    for (int i = 0; i < LANES && !w->nic; i++) {
        const epic_result result = open_lane(&p->lanes[i], why);
        if (result != EPIC_OK) return result;
    }
    return EPIC_OK;
}

static epic_result connect_host(net *w, int host, const card *c, char *why)
{
    peer *p = &w->peers[host];
    if (w->setup.on_gpu) return reach_gpu(w, p, c, why);
    p->inbox = c->inbox;
    if (c->pid == getpid()) return EPIC_OK;
    snprintf(why, NET_WHY_BYTES,
             "net \"local\": host %d is another process: EPIC_NET_MEMORY=gpu", host);
    return EPIC_ENOTSUP;
}

static epic_result connect_all(net *w, const void *cards, char *why)
{
    for (int h = 0; h < w->setup.num_hosts; h++) {
        card c;
        memcpy(&c, (const char *)cards + (size_t)h * NET_HANDLE_BYTES, sizeof c);
        const epic_result result = h == w->setup.host ? EPIC_OK : connect_host(w, h, &c, why);
        if (result != EPIC_OK) return result;
    }
    start_threads(w);
    return EPIC_OK;
}

/* ----------------------------------------------------------------------------- sending ---- */

/* Copies the bytes in a job for a thread. */
static bool copy_bytes(net *w, peer *p, uint64_t to, const void *from, uint32_t bytes)
{
    const int lane = w->setup.on_gpu && to < w->setup.urgent_bytes ? URGENT : ROWS;
    int *left = &p->left[p->given % DEPTH];
    jobs *all = &w->jobs[lane];
    *left = 0;
    if (w->nic) return nic_put(w->nic, lane, p->inbox + to, from, bytes, left);
    if (!w->setup.on_gpu && bytes <= SMALL) {
        copy_words(&(job){p->inbox + to, from, bytes, left, NULL});
        return true;
    }
    if (all->posted >= __atomic_load_n(&all->taken, __ATOMIC_ACQUIRE) + JOBS - COPIERS)
        return false;
    all->at[all->posted % JOBS] = (job){p->inbox + to, from, bytes, left, &p->lanes[lane]};
    __atomic_store_n(&all->posted, all->posted + 1, __ATOMIC_SEQ_CST);
    wake_threads(w);
    return true;
}

static bool local_put(net *w, int host, uint64_t to, const void *from, uint32_t bytes)
{
    peer *p = &w->peers[host];
    if (p->given - p->finished == DEPTH || !copy_bytes(w, p, to, from, bytes)) return false;
    p->given++;
    return true;
}

static bool local_word(net *w, int host, uint64_t to, uint64_t value)
{
    peer *p = &w->peers[host];
    if (p->given - p->finished == DEPTH) return false;
    if (w->setup.on_gpu) {
        uint64_t *from = &w->words[(uint64_t)host * DEPTH + p->given % DEPTH];
        *from = value;
        if (!copy_bytes(w, p, to, from, 8)) return false;
    } else {
        __atomic_store_n((uint64_t *)(void *)(p->inbox + to), value, __ATOMIC_RELEASE);
        p->left[p->given % DEPTH] = 1;
    }
    p->given++;
    return true;
}

static int local_look(net *w)
{
    int moved = 0;
    if (w->nic) nic_run(w->nic);
    for (int h = 0; h < w->setup.num_hosts; h++) {
        peer *p = &w->peers[h];
        for (; p->finished < p->given; p->finished++, moved++)
            if (!__atomic_load_n(&p->left[p->finished % DEPTH], __ATOMIC_ACQUIRE)) break;
    }
    return moved;
}

static bool local_done(const net *w, int host, uint64_t count)
{
    return w->peers[host].finished >= count;
}

static bool local_gone(const net *w, int host)
{
    (void)w, (void)host;
    return false;
}

static void local_describe(const net *w, char *to, size_t size)
{
    if (w->setup.on_gpu)
        snprintf(to, size, "local, GPU memory, %s", w->nic ? "a kernel" : "copy engines");
    else
        snprintf(to, size, "local, host memory, %d threads", w->num_copiers);
}

/* ----------------------------------------------------------------------------- closing ---- */

static void close_lane(lane *l)
{
    if (l->stream) (void)cudaStreamSynchronize(l->stream);
    for (int i = 0; i < EVENTS; i++)
        if (l->events[i]) (void)cudaEventDestroy(l->events[i]);
    if (l->stream) (void)cudaStreamDestroy(l->stream);
}

static void let_go(peer *p)
{
    for (int i = 0; i < LANES; i++) close_lane(&p->lanes[i]);
    if (p->mapped) (void)cudaIpcCloseMemHandle(p->inbox);
}

static bool is_all_done(net *w)
{
    local_look(w);
    for (int h = 0; h < w->setup.num_hosts; h++)
        if (w->peers[h].finished < w->peers[h].given) return false;
    return true;
}

static void close_net(net *w)
{
    if (!w) return;
    for (int i = 0; i < 1000 && !is_all_done(w); i++) usleep(100);
    __atomic_store_n(&w->leave, 1, __ATOMIC_SEQ_CST);
    wake_threads(w);
    for (int i = 0; i < w->num_copiers; i++) pthread_join(w->copiers[i], NULL);
    nic_close(w->nic);
    for (int h = 0; h < NET_MAX_HOSTS; h++) let_go(&w->peers[h]);
    if (w->words) (void)cudaFreeHost(w->words);
    pthread_cond_destroy(&w->awake);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

extern EPIC_API const net_engine epic_net_local;
const net_engine epic_net_local = {.name = "local",
                                   .preferred_bytes = 224 << 10,
                                   .is_available = local_can_open,
                                   .can_reach_gpu = reaches_gpu,
                                   .open = open_net,
                                   .connect = connect_all,
                                   .put = local_put,
                                   .put_word = local_word,
                                   .progress = local_look,
                                   .is_done = local_done,
                                   .is_gone = local_gone,
                                   .describe = local_describe,
                                   .close = close_net};
