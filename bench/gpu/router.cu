/* SPDX-License-Identifier: Apache-2.0 */
/* Times router and losses on one GPU, from an event before the call to one after it. The L2
 * cache is overwritten before each repetition, and the host runs ahead of the GPU. Then does
 * the same with a replayed graph.
 *   gpu_router [tokens=4096] [reps=100] */
#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "copies.h"
#include "cuda/router/router.h"

#define FLUSH_BYTES ((size_t)256 << 20)
#define MOST_COLUMNS 512
#define MOST_CHOSEN 8

static void must(cudaError_t error)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "gpu_router: %s\n", cudaGetErrorString(error));
    exit(1);
}

struct Arrays {
    float *logits, *bias, *weights, *d_weights, *d_logits, *loss;
    int32_t *topk_idx, *load;
    double *runs;
    uint8_t *flush;
    cudaStream_t stream;
};

template <class F> static float median(const Arrays &a, int reps, bool captured, F work)
{
    std::vector<cudaEvent_t> begin(reps), end(reps);
    std::vector<float> us(reps);
    cudaGraph_t graph;
    cudaGraphExec_t exec = NULL;
    if (captured) {
        must(cudaStreamBeginCapture(a.stream, cudaStreamCaptureModeThreadLocal));
        work();
        must(cudaStreamEndCapture(a.stream, &graph));
        must(cudaGraphInstantiate(&exec, graph, 0));
    }
    for (int i = 0; i < reps; i++) {
        must(cudaEventCreate(&begin[i]));
        must(cudaEventCreate(&end[i]));
        must(cudaMemsetAsync(a.flush, i, FLUSH_BYTES, a.stream));
        must(cudaEventRecord(begin[i], a.stream));
        if (captured)
            must(cudaGraphLaunch(exec, a.stream));
        else
            work();
        must(cudaEventRecord(end[i], a.stream));
    }
    must(cudaStreamSynchronize(a.stream));
    for (int i = 0; i < reps; i++) {
        float ms;
        must(cudaEventElapsedTime(&ms, begin[i], end[i]));
        us[i] = ms * 1000;
        cudaEventDestroy(begin[i]);
        cudaEventDestroy(end[i]);
    }
    if (exec) must(cudaGraphExecDestroy(exec));
    std::sort(us.begin(), us.end());
    return us[reps / 2];
}

template <class F> static void report(const Arrays &a, int reps, const char *what, F work)
{
    work();
    const float plain = median(a, reps, false, work);
    printf("%-44s %6.1f %6.1f\n", what, plain, median(a, reps, true, work));
}

template <class T> static void allocate(T **p, size_t count)
{
    must(cudaMalloc((void **)p, count * sizeof(T)));
}

static void fill(float *to, size_t count, float size)
{
    std::vector<float> x(count);
    uint64_t s = 7;
    for (float &v : x) {
        float sum = 0;
        for (int i = 0; i < 4; i++) {
            s = s * 6364136223846793005ull + 1442695040888963407ull;
            sum += (float)(s >> 40) / (1 << 24);
        }
        v = size * (sum - 2) * 1.7f;
    }
    must(copy_in(to, x.data(), count * 4));
}

struct Model {
    const char *name;
    epic_router router;
    bool bias;
};

static std::vector<Model> models()
{
    std::vector<Model> all;
    Model m = {};
    m.name = "DeepSeek-V3, 256 experts";
    m.bias = true;
    m.router.num_experts = 256;
    m.router.top_k = 8;
    m.router.score = EPIC_SCORE_SIGMOID;
    m.router.num_groups = 8;
    m.router.topk_groups = 4;
    m.router.group_score = EPIC_GROUP_SUM;
    m.router.group_best = 2;
    m.router.normalize = EPIC_NORMALIZE_SUM;
    m.router.eps = 1e-20;
    m.router.scale = 2.5;
    all.push_back(m);
    m = {};
    m.name = "Qwen3, softmax, 8 of 128";
    m.router.num_experts = 128;
    m.router.top_k = 8;
    m.router.normalize = EPIC_NORMALIZE_SUM;
    m.router.scale = 1;
    all.push_back(m);
    m.name = "gpt-oss, 4 of 128";
    m.router.top_k = 4;
    m.router.score = EPIC_SCORE_LOGITS;
    m.router.weight_rule = EPIC_WEIGHT_SOFTMAX_CHOSEN;
    m.router.normalize = EPIC_NORMALIZE_NONE;
    all.push_back(m);
    m = {};
    m.name = "sqrtsoftplus, 8 of 512";
    m.bias = true;
    m.router.num_experts = 512;
    m.router.top_k = 8;
    m.router.score = EPIC_SCORE_SQRTSOFTPLUS;
    m.router.normalize = EPIC_NORMALIZE_SUM;
    m.router.scale = 1;
    all.push_back(m);
    return all;
}

static void time_model(const Arrays &a, const Model &m, int64_t tokens, int reps)
{
    char what[96];
    const p2p_router_rows rows = {m.router,
                                  a.logits,
                                  tokens,
                                  (int32_t)m.router.num_experts,
                                  EPIC_F32,
                                  (float)m.router.eps,
                                  (float)m.router.norm_min,
                                  (float)m.router.scale,
                                  0};
    p2p_router_job job = {};
    job.rows = rows;
    job.bias = m.bias ? a.bias : NULL;
    job.topk_idx = a.topk_idx;
    job.weights = a.weights;
    job.on_logits = m.router.score == EPIC_SCORE_LOGITS || !m.bias;
    p2p_router_backward_job back = {};
    back.rows = rows;
    back.topk_idx = a.topk_idx;
    back.d_weights = a.d_weights;
    back.d_logits = a.d_logits;
    back.grad_type = EPIC_F32;
    p2p_loss_job loss = {};
    loss.rows = rows;
    loss.load = a.load;
    loss.factor = 1e-3;
    loss.runs = a.runs;
    loss.loss = a.loss;
    loss.d_logits = a.d_logits;
    loss.grad_type = EPIC_F32;
    snprintf(what, sizeof what, "%s, forward", m.name);
    report(a, reps, what, [&] { must(p2p_launch_router(&job, a.stream)); });
    report(a, reps, "  backward", [&] { must(p2p_launch_router_backward(&back, a.stream)); });
    report(a, reps, "  balance loss", [&] { must(p2p_launch_loss(&loss, a.stream)); });
    report(a, reps, "  its backward", [&] { must(p2p_launch_loss_backward(&loss, a.stream)); });
    loss.is_z_loss = 1;
    report(a, reps, "  z-loss", [&] { must(p2p_launch_loss(&loss, a.stream)); });
    report(a, reps, "  its backward", [&] { must(p2p_launch_loss_backward(&loss, a.stream)); });
}

int main(int argc, char **argv)
{
    int64_t tokens = 4096;
    int reps = 100;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "tokens=", 7)) tokens = atoll(argv[i] + 7);
        if (!strncmp(argv[i], "reps=", 5)) reps = atoi(argv[i] + 5);
    }
    if (tokens < 1 || reps < 1) return 2;
    Arrays a;
    must(p2p_load_router());
    must(p2p_load_router_backward());
    must(p2p_load_loss());
    allocate(&a.logits, tokens * MOST_COLUMNS);
    allocate(&a.d_logits, tokens * MOST_COLUMNS);
    allocate(&a.bias, MOST_COLUMNS);
    allocate(&a.load, MOST_COLUMNS);
    allocate(&a.weights, tokens * MOST_CHOSEN);
    allocate(&a.d_weights, tokens * MOST_CHOSEN);
    allocate(&a.topk_idx, tokens * MOST_CHOSEN);
    allocate(&a.runs, 2048);
    allocate(&a.loss, 1);
    allocate(&a.flush, FLUSH_BYTES);
    must(cudaStreamCreateWithFlags(&a.stream, cudaStreamNonBlocking));
    fill(a.logits, tokens * MOST_COLUMNS, 1);
    fill(a.d_weights, tokens * MOST_CHOSEN, 1);
    fill(a.bias, MOST_COLUMNS, 0.05f);
    must(fill_in(a.load, 0, MOST_COLUMNS * sizeof *a.load));
    printf("%lld tokens, float32 logits, cold L2, median of %d, us       call  graph\n",
           (long long)tokens, reps);
    report(a, reps, "an empty memset of 4 bytes, for scale",
           [&] { must(cudaMemsetAsync(a.loss, 0, 4, a.stream)); });
    for (const Model &m : models()) time_model(a, m, tokens, reps);
    return 0;
}
