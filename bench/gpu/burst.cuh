/* SPDX-License-Identifier: Apache-2.0 */
/* Shared parts of the programs that time products: bursts of two candidates in turn, and arrays
 * and slabs on the device. */
#ifndef EPIC_BENCH_BURST_CUH
#define EPIC_BENCH_BURST_CUH

#include <algorithm>
#include <functional>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string>
#include <unistd.h>
#include <vector>

#include <cuda_bf16.h>

extern "C" {
#include "copies.h"
#include "team.h"
}
#include "cuda/common/ptx.cuh"
#include "cuda/experts/grouped.h"

static int rounds = 4;

struct Candidate {
    std::string name;
    std::function<void()> run;
    std::vector<float> us;
};

static float median(std::vector<float> v)
{
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

static void time_all(std::vector<Candidate> &all, cudaStream_t stream)
{
    cudaEvent_t at[4];
    for (cudaEvent_t &e : at) CHECK_CUDA(cudaEventCreate(&e));
    for (int r = 0; r < rounds; r++)
        for (size_t i = 0; i < all.size(); i++) {
            Candidate &c = all[r % 2 ? all.size() - 1 - i : i];
            CHECK_CUDA(cudaStreamSynchronize(stream));
            usleep(15000);
            c.run();
            CHECK_CUDA(cudaEventRecord(at[0], stream));
            for (int k = 1; k < 4; k++) {
                c.run();
                CHECK_CUDA(cudaEventRecord(at[k], stream));
            }
            CHECK_CUDA(cudaStreamSynchronize(stream));
            for (int k = 1; k < 4; k++) {
                float ms;
                CHECK_CUDA(cudaEventElapsedTime(&ms, at[k - 1], at[k]));
                c.us.push_back(ms * 1000);
            }
        }
    for (cudaEvent_t &e : at) CHECK_CUDA(cudaEventDestroy(e));
}

/* ------------------------------------------------------------------------------ arrays ---- */

static __device__ void store(__nv_bfloat16 *to, float x)
{
    *to = __float2bfloat16(x);
}

static __device__ void store(uint8_t *to, float x)
{
    *to = (uint8_t)pack_e4m3(x, 0, 0, 0);
}

static __device__ void store(float *to, float x) /* stores a scale */
{
    *to = fabsf(x) + 1e-3f;
}

template <class T> static __global__ void fill_kernel(T *to, int64_t count, float size)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        uint64_t h = (uint64_t)i * 0x9e3779b97f4a7c15ull;
        h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9ull;
        const float sum = (float)(h >> 44) + (float)(h >> 24 & 0xfffff) - 0x1p20f;
        store(to + i, sum * 0x1p-20f * size);
    }
}

/* Reads the weights once, to measure how long this takes. */
static __global__ void read_kernel(const uint4 *from, int64_t count, uint32_t *to)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    uint32_t sum = 0;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 q[4];
#pragma unroll
        for (int k = 0; k < 4; k++) q[k] = __ldcs(from + i + k * step);
#pragma unroll
        for (int k = 0; k < 4; k++) sum += q[k].x ^ q[k].y ^ q[k].z ^ q[k].w;
    }
    if (sum == 0x12345678u) *to = sum;
}

struct Arrays {
    std::vector<void *> all;

    void *bytes(size_t n)
    {
        void *p;
        CHECK_CUDA(cudaMalloc(&p, n));
        all.push_back(p);
        return p;
    }
    template <class T> T *filled(int64_t count, float size)
    {
        T *p = (T *)bytes((size_t)count * sizeof(T));
        fill_kernel<<<1024, 256>>>(p, count, size);
        CHECK_CUDA(cudaDeviceSynchronize());
        return p;
    }
    __nv_bfloat16 *rows(int64_t count, float size)
    {
        return filled<__nv_bfloat16>(count, size);
    }
    int32_t *counts(const std::vector<int32_t> &from)
    {
        int32_t *p = (int32_t *)bytes(from.size() * 4);
        CHECK_CUDA(copy_in(p, from.data(), from.size() * 4));
        return p;
    }
    ~Arrays()
    {
        for (void *p : all) CHECK_CUDA(cudaFree(p));
    }
};

struct Slabs { /* The slabs of a case. */
    std::string name;
    std::vector<int32_t> rows, tokens;
    int64_t slots;
};

static Slabs even(int experts, int each)
{
    Slabs s = {std::to_string(experts) + " x " + std::to_string(each), {}, {}, 0};
    s.rows.assign((size_t)experts, each);
    s.tokens = s.rows;
    s.slots = (int64_t)experts * each;
    return s;
}

/* Returns slabs with a Zipf 0.7 distribution over 60 of 64 experts; four are empty. The slabs
 * are multiples of 128 rows and not full. */
static Slabs skewed()
{
    Slabs s = {"64 skewed", std::vector<int32_t>(64), std::vector<int32_t>(64), 32768};
    double sum = 0;
    for (int i = 1; i <= 60; i++) sum += pow(i, -0.7);
    int left = 256;
    for (int i = 60; i >= 1; i--) {
        const int e = (i * 37) % 64;
        int tiles = std::max(1, (int)(256 * pow(i, -0.7) / sum));
        if (i == 1) tiles = left;
        left -= tiles;
        s.rows[(size_t)e] = tiles * 128;
        s.tokens[(size_t)e] = tiles * 128 - 1 - (i * 53) % 120;
    }
    return s;
}

static p2p_slabs device_slabs(Arrays &a, const Slabs &s, cudaStream_t stream)
{
    epic_experts ex = {};
    ex.num_local_experts = (uint32_t)s.rows.size();
    ex.row_type = EPIC_BF16;
    const experts_layout at = experts_layout_of(&ex, s.slots, false);
    uint8_t *work = (uint8_t *)a.bytes((size_t)at.bytes);
    p2p_slabs d = {};
    d.expert_rows = a.counts(s.rows);
    d.expert_tokens = a.counts(s.tokens);
    d.num_tiles = (int32_t *)work;
    d.tiles = (slab_tile *)(work + at.tiles);
    d.slabs = (slab_range *)(work + at.slabs);
    d.num_slots = s.slots;
    d.num_experts = (int32_t)s.rows.size();
    d.most_tiles = at.most_tiles;
    CHECK_CUDA(p2p_launch_slabs(&d, stream));
    return d;
}

static int num_sms()
{
    int sms;
    CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    return sms;
}

#endif
