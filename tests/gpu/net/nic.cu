/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel that acts as a NIC. One warp of CTA 0 polls the rings and passes the entries to
 * the other CTAs through a list in GPU memory. It passes each entry at the time when the
 * previous one would have left a NIC of that speed. The other CTAs form groups ("gangs") of
 * four, which work in turn. Each CTA copies its share, and the last CTA of a gang reports the
 * end. */
#include "nic.h"

#include <stdlib.h>
#include <string.h>

#define ENTRIES 256 /* entries of a ring */
#define LIST 64     /* entries of the list */
#define AHEAD 4     /* number of entries of a ring that are polled at once */
#define THREADS 256
#define GANG 4  /* number of CTAs that copy together */
#define DEPTH 4 /* number of unfinished loads (16 bytes each) per thread */
/* time without an entry after which the kernel ends until the next put */
#define IDLE_NS 5000000

/* addresses have 48 bits; `seq` is in both halves, because they are read separately */
struct entry {
    uint64_t to, from_seq;
    uint64_t left_seq, bytes;
};

struct item {
    uint64_t to, from, left;
    uint32_t bytes, come; /* come: number of CTAs that have copied their share */
};

struct board { /* the list, in GPU memory */
    item list[LIST];
    uint64_t dealt, ended[LIST]; /* number of the last item at each index, from 1 */
};

struct nic {
    int device, ctas;
    double speed;
    entry *rings; /* [NIC_RINGS][ENTRIES] in host memory */
    int *leave;
    board *all;
    cudaStream_t stream;
    uint64_t given[NIC_RINGS];
    uint64_t *taken; /* [NIC_RINGS] in host memory */
    uint64_t *ended; /* number of the last launch that has ended, in host memory */
    uint64_t launches;
};

struct shared_part { /* the part of a nic that its kernel uses */
    entry *rings;
    uint64_t *taken, *ended;
    const int *leave;
    board *all;
    uint64_t launch;
    double ns_a_byte;
};

static __device__ __forceinline__ uint64_t now_ns()
{
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

static __device__ __forceinline__ ulonglong2 poll_ring(const void *from)
{
    ulonglong2 q;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(q.x), "=l"(q.y)
                 : "l"(from)
                 : "memory");
    return q;
}

static __device__ __forceinline__ uint64_t load_vector(const uint64_t *from)
{
    uint64_t x;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
}

static __device__ __forceinline__ void store_vector(uint64_t *to, uint64_t x)
{
    asm volatile("st.release.gpu.global.u64 [%0], %1;" : : "l"(to), "l"(x) : "memory");
}

/* Passes the next entry to the list. Called by one thread. */
static __device__ void deal_entries(board *all, uint64_t &dealt, const item &next)
{
    const int place = (int)(dealt % LIST);
    while (dealt >= LIST && load_vector(&all->ended[place]) != dealt - LIST + 1)
        __nanosleep(100);
    all->list[place] = next;
    store_vector(&all->dealt, ++dealt);
}

/* Passes entries to the list. Each lane polls half an entry, first those of the first ring,
 * then of the second. */
static __device__ void deal_all(const shared_part &p)
{
    const int lane = threadIdx.x, ring = lane / (2 * AHEAD), half = lane % 2;
    uint64_t taken[NIC_RINGS], dealt = 0, free_at = 0, idle_since = now_ns();
    for (int i = 0; i < NIC_RINGS; i++) taken[i] = *(volatile uint64_t *)&p.taken[i];
    for (;;) {
        ulonglong2 q = {};
        const uint64_t number = ring < NIC_RINGS ? taken[ring] + lane / 2 % AHEAD : 0;
        if (ring < NIC_RINGS)
            q = poll_ring((const char *)&p.rings[ring * ENTRIES + number % ENTRIES] +
                          16 * half);
        const uint64_t seq = (half ? q.x : q.y) >> 48;
        const uint32_t come =
            __ballot_sync(~0u, ring < NIC_RINGS && seq == (uint16_t)(number / ENTRIES + 1));
        const int leave = __shfl_sync(~0u, lane == 31 ? *(volatile const int *)p.leave : 0, 31);
        bool any = false;
        for (int i = 0; i < NIC_RINGS * AHEAD; i++) {
            const int its = i / AHEAD;
            if (i % AHEAD == 0) any = true;
            any &= (come >> 2 * i & 3) == 3; /* entries are passed in order */
            item next = {__shfl_sync(~0u, q.x, 2 * i), __shfl_sync(~0u, q.y, 2 * i),
                         __shfl_sync(~0u, q.x, 2 * i + 1),
                         (uint32_t)__shfl_sync(~0u, q.y, 2 * i + 1), 0};
            next.from = next.from << 16 >> 16;
            next.left = next.left << 16 >> 16;
            if (!any) continue;
            taken[its]++;
            if (lane) continue;
            while (now_ns() < free_at) {
            }
            deal_entries(p.all, dealt, next);
            const uint64_t now = now_ns();
            free_at = (free_at > now - 2000 ? free_at : now) +
                      (uint64_t)((double)next.bytes * p.ns_a_byte);
            *(volatile uint64_t *)&p.taken[its] = taken[its];
        }
        if (come) idle_since = now_ns();
        const bool is_idle = now_ns() - idle_since > IDLE_NS;
        if (come == 0 && __any_sync(~0u, leave || is_idle)) break;
    }
    if (lane == 0) *(volatile uint64_t *)p.ended = p.launch;
    for (int i = 0; lane == 0 && i < (int)(gridDim.x - 1) / GANG; i++)
        deal_entries(p.all, dealt, item{0, 0, 0, 0, 0});
}

template <class T>
static __device__ void copy_bytes(const item &i, uint32_t first, uint32_t end)
{
    const T *from = (const T *)i.from;
    T *to = (T *)i.to;
    for (uint32_t at = first + threadIdx.x; at < end; at += DEPTH * THREADS) {
        T q[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (at + d * THREADS < end) q[d] = __ldcv(from + at + d * THREADS);
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (at + d * THREADS < end) __stwt(to + at + d * THREADS, q[d]);
    }
}

static __device__ void copy_share(const item &i, int part)
{
    const bool wide = (i.to | i.from | i.bytes) % 16 == 0;
    const uint32_t count = i.bytes / (wide ? 16 : 8), share = (count + GANG - 1) / GANG;
    const uint32_t first = min(count, part * share), end = min(count, first + share);
    if (wide)
        copy_bytes<uint4>(i, first, end);
    else
        copy_bytes<unsigned long long>(i, first, end);
}

static __global__ void __launch_bounds__(THREADS) run_nic(shared_part p)
{
    __shared__ item now;
    if (blockIdx.x == 0) {
        if (threadIdx.x < 32) deal_all(p);
        return;
    }
    const int part = (blockIdx.x - 1) % GANG, gangs = (gridDim.x - 1) / GANG;
    for (uint64_t number = (blockIdx.x - 1) / GANG;; number += gangs) {
        item *listed = &p.all->list[number % LIST];
        if (threadIdx.x == 0) {
            while (load_vector(&p.all->dealt) <= number) __nanosleep(50);
            now = *listed;
        }
        __syncthreads();
        if (!now.to) return;
        copy_share(now, part);
        __syncthreads();
        if (threadIdx.x) continue;
        __threadfence_system();
        if (atomicAdd(&listed->come, 1u) + 1 != GANG) continue;
        __threadfence_system();
        *(volatile int *)now.left = 1;
        store_vector(&p.all->ended[number % LIST], number + 1);
    }
}

static cudaError_t prepare_nic(nic *n)
{
    void *memory = NULL;
    const size_t rings = NIC_RINGS * ENTRIES * sizeof(entry), words = NIC_RINGS * 8;
    cudaError_t error = cudaHostAlloc(&memory, rings + words + 16, cudaHostAllocMapped);
    if (error != cudaSuccess) return error;
    memset(memory, 0, rings + words + 16);
    n->rings = (entry *)memory;
    n->taken = (uint64_t *)((char *)memory + rings);
    n->ended = n->taken + NIC_RINGS;
    n->leave = (int *)(n->ended + 1);
    error = cudaMalloc((void **)&n->all, sizeof *n->all);
    if (error != cudaSuccess) return error;
    return cudaStreamCreateWithFlags(&n->stream, cudaStreamNonBlocking);
}

cudaError_t nic_open(nic **out, int ctas, double speed)
{
    nic *n = (nic *)calloc(1, sizeof *n);
    if (!n) return cudaErrorMemoryAllocation;
    n->ctas = (ctas + GANG - 1) / GANG * GANG;
    n->speed = speed;
    cudaError_t error = cudaGetDevice(&n->device);
    if (error == cudaSuccess) error = prepare_nic(n);
    if (error == cudaSuccess)
        *out = n;
    else
        nic_close(n);
    return error;
}

static bool has_waiting_entry(const nic *n)
{
    for (int i = 0; i < NIC_RINGS; i++)
        if (n->given[i] != __atomic_load_n(&n->taken[i], __ATOMIC_ACQUIRE)) return true;
    return false;
}

/* A kernel that never ended would block every CUDA call that waits for the device or allocates
 * memory, and epic_close() makes such calls. So the kernel ends when it is idle, and a put
 * starts it again. */
void nic_run(nic *n)
{
    if (__atomic_load_n(n->ended, __ATOMIC_ACQUIRE) != n->launches || !has_waiting_entry(n))
        return;
    const shared_part part = {n->rings,
                              n->taken,
                              n->ended,
                              n->leave,
                              n->all,
                              n->launches + 1,
                              n->speed > 0 ? 1 / n->speed : 0};
    if (cudaSetDevice(n->device) != cudaSuccess) return;
    if (cudaMemsetAsync(n->all, 0, sizeof *n->all, n->stream) != cudaSuccess) return;
    run_nic<<<n->ctas + 1, THREADS, 0, n->stream>>>(part);
    if (cudaGetLastError() == cudaSuccess) n->launches++;
}

bool nic_put(nic *n, int ring, void *to, const void *from, uint32_t bytes, int *left)
{
    const uint64_t number = n->given[ring], seq = (number / ENTRIES + 1) << 48;
    entry *e = &n->rings[ring * ENTRIES + number % ENTRIES];
    if (number - __atomic_load_n(&n->taken[ring], __ATOMIC_ACQUIRE) == ENTRIES) return false;
    __atomic_store_n(&e->to, (uint64_t)to, __ATOMIC_RELAXED);
    __atomic_store_n(&e->bytes, bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&e->from_seq, (uint64_t)from | seq, __ATOMIC_RELEASE);
    __atomic_store_n(&e->left_seq, (uint64_t)left | seq, __ATOMIC_RELEASE);
    n->given[ring]++;
    nic_run(n);
    return true;
}

void nic_close(nic *n)
{
    if (!n) return;
    if (n->leave) __atomic_store_n(n->leave, 1, __ATOMIC_RELEASE);
    if (n->stream) (void)cudaStreamSynchronize(n->stream);
    if (n->stream) (void)cudaStreamDestroy(n->stream);
    if (n->all) (void)cudaFree(n->all);
    if (n->rings) (void)cudaFreeHost(n->rings);
    free(n);
}
