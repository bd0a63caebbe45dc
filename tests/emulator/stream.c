/* SPDX-License-Identifier: Apache-2.0 */
/* Streams: each is a thread that performs its tasks in order. A graph is a list of tasks. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "inner.h"

#define MAX_LAUNCHES 64 /* number of launches that a thread remembers */

typedef struct task {
    launch kernel; /* valid if it has a body */
    void *to;
    const void *from; /* NULL: fill with `value` */
    size_t bytes;
    int value;
    void *owned; /* the kernel's arguments, or the data to copy */
    uint64_t
        number; /* tasks of all streams are numbered from 1 in the order of enqueue_task() */
    struct task *next;
} task;

typedef struct emulator_stream {
    pthread_t thread;
    /* signalled when its thread gets a task, and when the thread has ended one */
    pthread_cond_t given, ended;
    task *first, **end;
    uint64_t running; /* number of the task that its thread performs; 0: none */
    bool closed;
    int device;
    struct emulator_graph *captured; /* not NULL: tasks are added to this graph */
    struct emulator_stream *next;
} stream;

typedef struct emulator_graph {
    task *first, **end;
    int users;
} graph;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards all streams */
static uint64_t num_tasks; /* number of tasks that all streams have got */
static stream *streams;
static stream *defaults[MAX_DEVICES];
/* for each device, the number of copies to pageable memory that threads wait for; guarded by
 * mutex */
static int waiting_copies[MAX_DEVICES];
static pthread_cond_t copies_done = PTHREAD_COND_INITIALIZER;
static const void *launched[MAX_KERNELS];
static __thread emulator_launch launches[MAX_LAUNCHES]; /* launches of this thread */
/* number of launches since they were last copied */
static __thread int num_launches;
static __thread stream *own;

/* ------------------------------------------------------------------------------- tasks ---- */

static void run_task(const task *t, int device)
{
    if (t->kernel.body)
        run_kernel(device, &t->kernel);
    else if (t->from)
        memcpy(t->to, t->from, t->bytes);
    else
        fill_memory(t->to, t->value, t->bytes);
}

static void free_tasks(task *t)
{
    while (t) {
        task *next = t->next;
        free(t->owned);
        free(t);
        t = next;
    }
}

static void *copy_of(const void *from, size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p) emulator_die("no memory for a task");
    memcpy(p, from, bytes);
    return p;
}

/* Returns a task like t with a copy of `data`. */
static task *new_task(const task *t, const void *data, size_t bytes)
{
    task *made = copy_of(t, sizeof *t);
    made->next = NULL;
    made->owned = data ? copy_of(data, bytes) : NULL;
    if (data && made->kernel.body) made->kernel.arguments = made->owned;
    if (data && !made->kernel.body) made->from = made->owned;
    return made;
}

/* ----------------------------------------------------------------------------- streams ---- */

static void *be_stream(void *self)
{
    stream *s = self;
    pthread_mutex_lock(&mutex);
    while (s->first || !s->closed) {
        task *t = s->first;
        if (!t) {
            pthread_cond_wait(&s->given, &mutex);
            continue;
        }
        s->first = t->next;
        if (!s->first) s->end = &s->first;
        t->next = NULL;
        s->running = t->number;
        pthread_mutex_unlock(&mutex);
        run_task(t, s->device);
        free_tasks(t);
        pthread_mutex_lock(&mutex);
        s->running = 0;
        pthread_cond_broadcast(&s->ended);
    }
    pthread_mutex_unlock(&mutex);
    return NULL;
}

static stream *open_stream(int device)
{
    stream *s = calloc(1, sizeof *s);
    if (!s) emulator_die("no memory for a stream");
    s->device = device;
    s->end = &s->first;
    pthread_cond_init(&s->given, NULL);
    pthread_cond_init(&s->ended, NULL);
    if (pthread_create(&s->thread, NULL, be_stream, s)) emulator_die("no thread for a stream");
    pthread_mutex_lock(&mutex);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&mutex);
    return s;
}

static stream *stream_of(cudaStream_t given)
{
    stream **kept = given ? &own : &defaults[current_device()];
    if (given && given != cudaStreamPerThread) return given;
    pthread_mutex_lock(&mutex);
    stream *s = *kept;
    pthread_mutex_unlock(&mutex);
    if (s) return s;
    s = open_stream(current_device());
    pthread_mutex_lock(&mutex);
    *kept = s;
    pthread_mutex_unlock(&mutex);
    return s;
}

/* Returns true if the stream has not ended all its tasks up to number `last`. The caller holds
 * the mutex. */
static bool has_earlier_task(const stream *s, uint64_t last)
{
    const uint64_t oldest = s->running ? s->running : s->first ? s->first->number : last + 1;
    return oldest <= last;
}

/* Waits until the stream has ended the tasks that it has now. Like CUDA, does not wait for
 * tasks that it gets later. */
static void finish_tasks(stream *s)
{
    pthread_mutex_lock(&mutex);
    const uint64_t last = num_tasks;
    while (has_earlier_task(s, last)) pthread_cond_wait(&s->ended, &mutex);
    pthread_mutex_unlock(&mutex);
}

/* Like CUDA: with CUDA_LAUNCH_BLOCKING the host waits for each task. */
static void enqueue_task(stream *s, task *t)
{
    pthread_mutex_lock(&mutex);
    const bool captured = s->captured != NULL;
    task ***end = captured ? &s->captured->end : &s->end;
    t->number = ++num_tasks;
    **end = t;
    *end = &t->next;
    pthread_cond_signal(&s->given);
    pthread_mutex_unlock(&mutex);
    if (!captured && getenv("CUDA_LAUNCH_BLOCKING")) finish_tasks(s);
}

/* Returns a stream of the device that has not ended all its tasks up to number `last`, or NULL.
 * The caller holds the mutex. */
static stream *stream_with_earlier_task(int device, uint64_t last)
{
    for (stream *s = streams; s; s = s->next)
        if (s->device == device && has_earlier_task(s, last)) return s;
    return NULL;
}

/* Waits until all streams of the device have ended the tasks that they have now. A stream that
 * is closed meanwhile has ended all its tasks. */
void finish_streams(int device)
{
    pthread_mutex_lock(&mutex);
    const uint64_t last = num_tasks;
    for (stream *s; (s = stream_with_earlier_task(device, last));)
        pthread_cond_wait(&s->ended, &mutex);
    pthread_mutex_unlock(&mutex);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags)
{
    (void)flags;
    *made = open_stream(current_device());
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t given)
{
    pthread_mutex_lock(&mutex);
    given->closed = true;
    stream **link = &streams;
    while (*link != given) link = &(*link)->next;
    *link = given->next;
    pthread_cond_signal(&given->given);
    pthread_mutex_unlock(&mutex);
    pthread_join(given->thread, NULL);
    pthread_cond_destroy(&given->given);
    pthread_cond_destroy(&given->ended);
    free(given);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t given)
{
    finish_tasks(stream_of(given));
    return cudaSuccess;
}

/* -------------------------------------------------------------- what streams are given ---- */

static void record_launch(const void *kernel)
{
    int i = 0;
    pthread_mutex_lock(&mutex);
    while (i < MAX_KERNELS - 1 && launched[i] && launched[i] != kernel) i++;
    launched[i] = kernel;
    pthread_mutex_unlock(&mutex);
}

int emulator_kernels(void)
{
    int count = 0;
    pthread_mutex_lock(&mutex);
    while (count < MAX_KERNELS && launched[count]) count++;
    pthread_mutex_unlock(&mutex);
    return count;
}

int emulator_launches(emulator_launch *out, int most)
{
    const int count = num_launches < most ? num_launches : most;
    memcpy(out, launches, (size_t)count * sizeof *out);
    num_launches = 0;
    return count;
}

/* Waits until no thread waits for a copy to pageable memory. Like CUDA, whose copy holds a lock
 * of the device's context until the stream reaches it, so that no thread can launch a
 * kernel. */
static void wait_for_copies(int device)
{
    pthread_mutex_lock(&mutex);
    while (waiting_copies[device]) pthread_cond_wait(&copies_done, &mutex);
    pthread_mutex_unlock(&mutex);
}

/* Waits for the copy to pageable memory that the stream has got last. */
static void finish_copy(stream *s)
{
    pthread_mutex_lock(&mutex);
    waiting_copies[s->device]++;
    pthread_mutex_unlock(&mutex);
    finish_tasks(s);
    pthread_mutex_lock(&mutex);
    if (!--waiting_copies[s->device]) pthread_cond_broadcast(&copies_done);
    pthread_mutex_unlock(&mutex);
}

cudaError_t emulator_enqueue(const void *kernel, void (*body)(const void *arguments),
                             const void *arguments, size_t bytes, int ctas, int threads,
                             int shared_bytes, cudaStream_t given)
{
    const task t = {.kernel = {body, NULL, ctas, threads, shared_bytes}};
    if (ctas < 1 || threads < 1 || threads > EMULATOR_MAX_THREADS || threads % EMULATOR_WARP ||
        shared_bytes < 0 || shared_bytes > most_shared(kernel))
        return cudaErrorInvalidValue;
    record_launch(kernel);
    wait_for_copies(stream_of(given)->device);
    if (num_launches < MAX_LAUNCHES)
        launches[num_launches++] = (emulator_launch){kernel, ctas, threads, shared_bytes};
    enqueue_task(stream_of(given), new_task(&t, arguments, bytes));
    return cudaSuccess;
}

/* If CUDA does not know the host memory, the caller may reuse it as soon as the call returns.
 */
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t given)
{
    const task t = {.to = to, .from = from, .bytes = bytes};
    stream *s = stream_of(given);
    (void)kind;
    if (bytes == 0) return cudaSuccess;
    enqueue_task(s, new_task(&t, is_known(from) ? NULL : from, bytes));
    if (!is_known(to) && !s->captured) finish_copy(s);
    return cudaSuccess;
}

/* As on a GPU, the call returns when the host memory may be reused, not when the device has the
 * data. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t given)
{
    const task t = {.to = to, .value = value, .bytes = bytes};
    enqueue_task(stream_of(given), new_task(&t, NULL, 0));
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    return cudaMemsetAsync(to, value, bytes, NULL);
}

/* ------------------------------------------------------------------------------ graphs ---- */

static graph *new_graph(void)
{
    graph *g = calloc(1, sizeof *g);
    if (!g) emulator_die("no memory for a graph");
    g->end = &g->first;
    g->users = 1;
    return g;
}

static cudaError_t destroy_graph(graph *g)
{
    if (__atomic_sub_fetch(&g->users, 1, __ATOMIC_ACQ_REL)) return cudaSuccess;
    free_tasks(g->first);
    free(g);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t given, enum cudaStreamCaptureStatus *status)
{
    const bool is_captured = given && given->captured;
    *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    (void)mode;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t given, enum cudaStreamCaptureMode mode)
{
    (void)mode;
    given->captured = new_graph();
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t given, cudaGraph_t *made)
{
    *made = given->captured;
    given->captured = NULL;
    return *made ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t g, unsigned long long flags)
{
    (void)flags;
    __atomic_add_fetch(&g->users, 1, __ATOMIC_ACQ_REL);
    *exec = g;
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t given)
{
    (void)exec;
    (void)given;
    return cudaSuccess;
}

/* The tasks use the graph's arguments, so the graph lives until they have ended. */
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t given)
{
    wait_for_copies(stream_of(given)->device);
    for (const task *t = exec->first; t; t = t->next)
        enqueue_task(stream_of(given), new_task(t, NULL, 0));
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    return destroy_graph(g);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    return destroy_graph(exec);
}
