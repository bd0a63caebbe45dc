/* SPDX-License-Identifier: Apache-2.0 */
/* The passes of the model on a GPU: the steps of model.c as launches on a stream. */
#include "device.h"

#include <stdlib.h>
#include <string.h>

#include "device_kernels.h"

enum { MOST_ARRAYS = 48, PLACES = CONTEXT };

struct device {
    device_shape shape;
    void *arrays[MOST_ARRAYS]; /* all allocations */
    int num_arrays;
    bool failed;
    float *value, *gradient, *first, *second; /* [count], like those on the host */
    uint16_t *narrow;                         /* [count]: value in bf16, for the experts */
    unsigned char *bytes, *host_bytes;        /* [tokens, PLACES + 1] */
    float *x[LAYERS + 1], *inverse[LAYERS + 1], *h, *d_x, *d_h, *logits, *token_loss;
    uint16_t *narrow_h[LAYERS], *out, *d_out, *narrow_d_h;
    float *results; /* the loss, then the layers' balance losses */
    int32_t *load;  /* [LAYERS, EXPERTS] */
    void *saved[LAYERS], *work;
};

static bool good(const model *m, cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return true;
    return complain("rank %d: %s: CUDA says \"%s\"", m->group.rank, what,
                    cudaGetErrorString(error));
}

bool device_choose(int rank)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0)
        return complain("--device cuda: no GPU is there");
    return cudaSetDevice(rank % count) == cudaSuccess ||
           complain("--device cuda: GPU %d cannot be used", rank % count);
}

static void *take(device *d, int64_t bytes)
{
    void *at = NULL;
    if (d->num_arrays == MOST_ARRAYS || cudaMalloc(&at, (size_t)bytes + 64) != cudaSuccess) {
        d->failed = true;
        return NULL;
    }
    cudaMemset(at, 0, (size_t)bytes);
    return d->arrays[d->num_arrays++] = at;
}

static void take_all(device *d, const model *m, int64_t here)
{
    const int64_t rows = here * m->hidden;
    d->value = take(d, m->count * 4);
    d->gradient = take(d, m->count * 4);
    d->first = take(d, m->count * 4);
    d->second = take(d, m->count * 4);
    d->narrow = take(d, m->count * 2);
    d->bytes = take(d, here * (PLACES + 1));
    d->h = take(d, rows * 4);
    d->d_x = take(d, rows * 4);
    d->d_h = take(d, rows * 4);
    d->out = take(d, rows * 2);
    d->d_out = take(d, rows * 2);
    d->narrow_d_h = take(d, rows * 2);
    d->logits = take(d, here * BYTES * 4);
    d->token_loss = take(d, here * 4);
    d->results = take(d, NUM_SUMS * 4);
    d->load = take(d, LAYERS * EXPERTS * 4);
    d->work = take(d, m->moe_memory.forward_bytes + m->moe_memory.backward_bytes);
    for (int i = 0; i <= LAYERS; i++) {
        d->x[i] = take(d, rows * 4);
        d->inverse[i] = take(d, here * 4);
        if (i == LAYERS) continue;
        d->narrow_h[i] = take(d, rows * 2);
        d->saved[i] = take(d, m->moe_memory.saved_bytes);
    }
}

device *device_open(model *m, int64_t tokens)
{
    device *d = memory(sizeof *d);
    int number = 0;
    cudaGetDevice(&number);
    if (cudaStreamCreateWithFlags(&d->shape.stream, cudaStreamNonBlocking) != cudaSuccess ||
        cudaDeviceGetAttribute(&d->shape.sms, cudaDevAttrMultiProcessorCount, number))
        d->failed = true;
    d->shape.hidden = m->hidden;
    d->host_bytes = memory(tokens / m->group.num_ranks * (PLACES + 1));
    take_all(d, m, tokens / m->group.num_ranks);
    if (!d->failed) return d;
    complain("rank %d: the GPU has no memory for the model", m->group.rank);
    device_close(d);
    return NULL;
}

void device_close(device *d)
{
    if (!d) return;
    cudaDeviceSynchronize();
    for (int i = 0; i < d->num_arrays; i++) cudaFree(d->arrays[i]);
    cudaStreamDestroy(d->shape.stream);
    free(d->host_bytes);
    free(d);
}

/* -------------------------------------------------------------------------- parameters ---- */

static bool move_all(model *m, bool store)
{
    device *d = m->device;
    float *const here[] = {m->value, m->first, m->second};
    float *const there[] = {d->value, d->first, d->second};
    const size_t bytes = (size_t)m->count * 4;
    cudaError_t error = cudaStreamSynchronize(d->shape.stream);
    for (int i = 0; i < 3 && error == cudaSuccess; i++)
        error = store ? cudaMemcpy(there[i], here[i], bytes, cudaMemcpyHostToDevice)
                      : cudaMemcpy(here[i], there[i], bytes, cudaMemcpyDeviceToHost);
    if (error == cudaSuccess) error = cudaDeviceSynchronize(); /* waits for our stream */
    return good(m, error, "a copy of the parameters");
}

bool device_store(model *m)
{
    device *d = m->device;
    return !d || (move_all(m, true) &&
                  good(m, device_narrow(&d->shape, d->narrow, d->value, m->count),
                       "the experts' weights"));
}

bool device_fetch(model *m)
{
    return !m->device || move_all(m, false);
}

bool device_optimize(model *m, const parameter *p, const float factors[3], const float betas[3])
{
    device *d = m->device;
    const device_adam a = {.value = d->value + p->offset,
                           .first = d->first + p->offset,
                           .second = d->second + p->offset,
                           .narrow = d->narrow + p->offset,
                           .gradient = d->gradient + p->offset,
                           .count = p->count,
                           .keep = factors[0],
                           .rate = factors[1],
                           .unbias2 = factors[2],
                           .beta1 = betas[0],
                           .beta2 = betas[1],
                           .epsilon = betas[2]};
    return good(m, device_move(&d->shape, &a), "the optimizer");
}

/* --------------------------------------------------------------------------- the steps ---- */

static float *value(const model *m, int number)
{
    return m->device->value + m->parameters[number].offset;
}

static float *gradient(const model *m, int number)
{
    return m->device->gradient + m->parameters[number].offset;
}

static uint16_t *narrow(const model *m, int number)
{
    return m->device->narrow + m->parameters[number].offset;
}

static int first_expert(const model *m, int layer)
{
    return layer * EXPERTS + m->group.rank * (EXPERTS / m->group.num_ranks);
}

static epic_rows rows(const model *m, void *data)
{
    return (epic_rows){data, m->tokens, m->hidden * 2};
}

static epic_const_rows const_rows(const model *m, const void *data)
{
    return (epic_const_rows){data, m->tokens, m->hidden * 2};
}

static epic_moe_weights weights_of(const model *m, int layer)
{
    return (epic_moe_weights){.w_gate = value(m, GATE + layer),
                              .w_gate_up = narrow(m, UP + first_expert(m, layer)),
                              .w_down = narrow(m, DOWN + first_expert(m, layer))};
}

static device_norm norm_of(const model *m, int which)
{
    const device *d = m->device;
    return (device_norm){.x = d->x[which],
                         .gain = value(m, NORM + which),
                         .inverse = d->inverse[which],
                         .d_x = d->d_x,
                         .d_gain = gradient(m, NORM + which)};
}

static bool mix(model *m, int layer)
{
    device *d = m->device;
    const epic_moe_weights weights = weights_of(m, layer);
    device_norm n = norm_of(m, layer);
    n.narrow_h = d->narrow_h[layer];
    const epic_moe_args args = {.call.stream = d->shape.stream,
                                .moe = &m->moe,
                                .weights = &weights,
                                .x = const_rows(m, d->narrow_h[layer]),
                                .out = rows(m, d->out),
                                .saved = d->saved[layer],
                                .saved_bytes = m->moe_memory.saved_bytes,
                                .workspace = d->work,
                                .workspace_bytes = m->moe_memory.forward_bytes,
                                .loss = d->results + SUM_BALANCE + layer,
                                .load = d->load + layer * EXPERTS};
    return good(m, device_norm_rows(&d->shape, &n), "norm") &&
           works(&m->group, epic_moe_forward(m->group.ctx, &args), "layer forward") &&
           good(m, device_add(&d->shape, d->x[layer + 1], d->x[layer], d->out), "a sum");
}

static bool mix_backward(model *m, int layer)
{
    device *d = m->device;
    const epic_moe_weights weights = weights_of(m, layer);
    const int mine = first_expert(m, layer);
    const epic_moe_gradients gradients = {.w_gate = gradient(m, GATE + layer),
                                          .w_gate_up = gradient(m, UP + mine),
                                          .w_down = gradient(m, DOWN + mine)};
    const epic_moe_backward_args args = {.call.stream = d->shape.stream,
                                         .moe = &m->moe,
                                         .weights = &weights,
                                         .x = const_rows(m, d->narrow_h[layer]),
                                         .d_out = const_rows(m, d->d_out),
                                         .d_x = rows(m, d->narrow_d_h),
                                         .gradients = &gradients,
                                         .saved = d->saved[layer],
                                         .saved_bytes = m->moe_memory.saved_bytes,
                                         .workspace = d->work,
                                         .workspace_bytes = m->moe_memory.backward_bytes};
    device_norm n = norm_of(m, layer);
    n.narrow_h = d->narrow_d_h;
    return good(m, device_narrow(&d->shape, d->d_out, d->d_x, m->tokens * m->hidden), "rows") &&
           works(&m->group, epic_moe_backward(m->group.ctx, &args), "layer backward") &&
           good(m, device_norm_backward(&d->shape, &n), "norm backward");
}

static bool begin_pass(model *m, const unsigned char *const *at, int64_t tokens)
{
    device *d = m->device;
    m->tokens = d->shape.tokens = tokens;
    m->all_tokens = tokens * m->group.num_ranks;
    for (int64_t t = 0; t < tokens; t++)
        memcpy(d->host_bytes + t * (PLACES + 1), at[t] - PLACES, PLACES + 1);
    return good(m,
                cudaMemcpyAsync(d->bytes, d->host_bytes, (size_t)(tokens * (PLACES + 1)),
                                cudaMemcpyHostToDevice, d->shape.stream),
                "the text") &&
           good(m, device_embed(&d->shape, d->bytes, PLACES, value(m, EMBED), d->x[0]),
                "embedding");
}

/* Runs the model up to the logits. */
static bool forward(model *m, const unsigned char *const *at, int64_t tokens)
{
    device *d = m->device;
    if (!begin_pass(m, at, tokens)) return false;
    for (int layer = 0; layer < LAYERS; layer++)
        if (!mix(m, layer)) return false;
    device_norm n = norm_of(m, LAYERS);
    n.h = d->h;
    const device_gemm head = {.m = tokens,
                              .n = BYTES,
                              .k = m->hidden,
                              .a = d->h,
                              .b = value(m, HEAD),
                              .c = d->logits};
    return good(m, device_norm_rows(&d->shape, &n), "norm") &&
           good(m, device_multiply(&d->shape, &head), "head");
}

static bool judge(model *m)
{
    device *d = m->device;
    return good(m,
                device_judge(&d->shape, d->logits, d->bytes, PLACES, 1 / (float)m->all_tokens,
                             d->token_loss, d->results + SUM_LOSS),
                "the loss");
}

static bool head_backward(model *m)
{
    device *d = m->device;
    const device_gemm d_head = {.m = m->hidden,
                                .n = BYTES,
                                .k = m->tokens,
                                .a = d->h,
                                .transpose_a = 1,
                                .b = d->logits,
                                .c = gradient(m, HEAD)};
    const device_gemm d_h = {.m = m->tokens,
                             .n = m->hidden,
                             .k = BYTES,
                             .a = d->logits,
                             .b = value(m, HEAD),
                             .transpose_b = 1,
                             .c = d->d_h};
    device_norm n = norm_of(m, LAYERS);
    n.h = d->d_h;
    return good(m, device_multiply(&d->shape, &d_head), "head backward") &&
           good(m, device_multiply(&d->shape, &d_h), "head backward") &&
           good(
               m,
               cudaMemsetAsync(d->d_x, 0, (size_t)(m->tokens * m->hidden) * 4, d->shape.stream),
               "zeros") &&
           good(m, device_norm_backward(&d->shape, &n), "norm backward");
}

/* Waits for the pass, copies its results to the host, and reports errors that kernels found. */
static bool take_results(model *m, float results[NUM_SUMS])
{
    device *d = m->device;
    const size_t bytes = NUM_SUMS * sizeof(float);
    return good(m, cudaStreamSynchronize(d->shape.stream), "a pass") &&
           works(&m->group, epic_check(m->group.ctx), "a pass") &&
           good(m, cudaMemcpy(results, d->results, bytes, cudaMemcpyDeviceToHost), "results") &&
           good(m, cudaMemcpy(m->load, d->load, sizeof m->load, cudaMemcpyDeviceToHost),
                "load");
}

bool device_loss(model *m, const unsigned char *const *at, int64_t tokens, float *loss)
{
    float results[NUM_SUMS];
    if (!forward(m, at, tokens) || !judge(m) || !take_results(m, results)) return false;
    *loss = results[SUM_LOSS];
    return true;
}

bool device_predict(model *m, const unsigned char *const *at, int64_t tokens, float *out)
{
    float results[NUM_SUMS];
    return forward(m, at, tokens) && take_results(m, results) &&
           good(m,
                cudaMemcpy(out, m->device->logits, (size_t)(tokens * BYTES) * 4,
                           cudaMemcpyDeviceToHost),
                "logits");
}

bool device_gradients(model *m, const unsigned char *const *at, int64_t tokens)
{
    device *d = m->device;
    if (!forward(m, at, tokens) || !judge(m) || !head_backward(m)) return false;
    for (int layer = LAYERS - 1; layer >= 0; layer--)
        if (!mix_backward(m, layer)) return false;
    return good(m,
                device_embed_backward(&d->shape, d->bytes, PLACES, d->d_x, gradient(m, EMBED)),
                "embedding backward") &&
           take_results(m, m->sums);
}

/* -------------------------------------------------------------------------- over ranks ---- */

static bool sum_there(const group *g, float *data, int64_t count, cudaStream_t stream)
{
    const epic_allreduce_sum_args sum = {.call.stream = stream, .data = data, .count = count};
    return works(g, epic_allreduce_sum(g->ctx, &sum), "sum") &&
           (cudaStreamSynchronize(stream) == cudaSuccess || complain("sum: CUDA failed")) &&
           works(g, epic_check(g->ctx), "sum");
}

bool device_sum(const group *g, float *data, int64_t count)
{
    const size_t bytes = (size_t)count * sizeof *data;
    cudaStream_t stream = NULL;
    void *there = NULL;
    bool done =
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
        cudaMalloc(&there, bytes) == cudaSuccess &&
        cudaMemcpyAsync(there, data, bytes, cudaMemcpyHostToDevice, stream) == cudaSuccess;
    if (!done) complain("rank %d: the GPU has no memory for a sum", g->rank);
    done = done && sum_there(g, there, count, stream) &&
           cudaMemcpy(data, there, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
    cudaFree(there);
    cudaStreamDestroy(stream);
    return done;
}

bool device_sum_gradients(model *m)
{
    float *const sums = m->device->gradient + m->dense_count;
    const size_t bytes = NUM_SUMS * sizeof *sums;
    const cudaStream_t stream = m->device->shape.stream;
    return good(m, cudaMemcpyAsync(sums, m->sums, bytes, cudaMemcpyHostToDevice, stream),
                "sums") &&
           sum_there(&m->group, m->device->gradient, m->dense_count + NUM_SUMS, stream) &&
           good(m, cudaMemcpy(m->sums, sums, bytes, cudaMemcpyDeviceToHost), "sums");
}
