/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's part of a layer (tests/unit/moe_layer.h), with all arrays on a device. */
#ifndef EPIC_TEST_LAYER_PART_H
#define EPIC_TEST_LAYER_PART_H

#include <cuda_runtime_api.h>

#include "copies.h"
#include "unit/moe_layer.h"

enum { MOST_MIRRORS = 96 };

typedef struct mirror { /* an array of the host and its copy on the device */
    void *host, *device;
    size_t bytes;
    bool out;
} mirror;

typedef struct device_part {
    part *t;
    mirror arrays[MOST_MIRRORS];
    int num;
    cudaStream_t stream;
} device_part;

static inline void must_succeed(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    _exit(1); /* peers would wait for this rank */
}

static inline void *to_device(device_part *d, void *host, int64_t bytes, bool out)
{
    if (host == NULL) return NULL;
    mirror *m = &d->arrays[d->num++];
    *m = (mirror){host, NULL, (size_t)bytes, out};
    must_succeed(cudaMalloc(&m->device, m->bytes + 1),
                 "memory"); /* an address also for an array without bytes */
    must_succeed(copy_in(m->device, host, m->bytes), "a copy");
    return m->device;
}

static inline void *poisoned_device(device_part *d, int64_t bytes)
{
    mirror *m = &d->arrays[d->num++];
    *m = (mirror){NULL, NULL, (size_t)bytes, false};
    must_succeed(cudaMalloc(&m->device, m->bytes + 1), "memory");
    must_succeed(fill_in(m->device, 0xff, m->bytes), "poison");
    return m->device;
}

/* Makes the arguments of the rank's call, with every array on the device. */
static inline void move_in(device_part *d)
{
    part *t = d->t;
    const problem *p = t->p;
    void *given[NUM_GIVEN], *gradient[NUM_GIVEN];
    const int64_t row = convert_bytes(row_type(p)), loss = convert_bytes(loss_type(p));
    const int64_t rows = t->tokens * p->experts.hidden * row;
    const int64_t experts = p->layer.num_experts, logical = p->layer.num_logical;
    for (int i = 0; i < NUM_GIVEN; i++) {
        const int64_t n = numbers_here(t, i);
        const int64_t unit = convert_bytes(gradient_type(p, i));
        given[i] = to_device(d, t->given[i], n * convert_bytes(p->given[i].type), false);
        gradient[i] = to_device(d, t->gradient[i], n * unit, true);
    }
    t->weights = (epic_moe_weights){.w_gate = given[W_GATE],
                                    .b_gate = given[B_GATE],
                                    .scale_of_expert = given[SCALE_OF_EXPERT],
                                    .w_gate_up = given[W_GATE_UP],
                                    .w_down = given[W_DOWN],
                                    .b_gate_up = given[B_GATE_UP],
                                    .b_down = given[B_DOWN],
                                    .shared_gate_up = given[SHARED_GATE_UP],
                                    .shared_down = given[SHARED_DOWN],
                                    .shared_b_gate_up = given[SHARED_B_GATE_UP],
                                    .shared_b_down = given[SHARED_B_DOWN],
                                    .w_shared_gate = given[W_SHARED_GATE]};
    if (p->bias_given)
        t->weights.bias = to_device(d, (void *)(uintptr_t)p->bias, columns_of(p) * 4, false);
    t->gradients = (epic_moe_gradients){.w_gate = gradient[W_GATE],
                                        .b_gate = gradient[B_GATE],
                                        .scale_of_expert = gradient[SCALE_OF_EXPERT],
                                        .w_gate_up = gradient[W_GATE_UP],
                                        .w_down = gradient[W_DOWN],
                                        .b_gate_up = gradient[B_GATE_UP],
                                        .b_down = gradient[B_DOWN],
                                        .shared_gate_up = gradient[SHARED_GATE_UP],
                                        .shared_down = gradient[SHARED_DOWN],
                                        .shared_b_gate_up = gradient[SHARED_B_GATE_UP],
                                        .shared_b_down = gradient[SHARED_B_DOWN],
                                        .w_shared_gate = gradient[W_SHARED_GATE]};
    epic_moe_args *f = &t->forward;
    f->call.stream = d->stream;
    if (f->x.data) f->x.data = given[X]; /* without tokens the calls get {NULL, 0, 0} */
    if (f->out.data) f->out.data = to_device(d, t->out, rows, true);
    f->token_ids = to_device(d, t->token_ids, t->tokens * (p->wide_ids ? 8 : 4), false);
    f->table = to_device(d, p->table, p->table_rows * (int64_t)p->layer.top_k * 4, false);
    f->rank_of_expert = to_device(d, (void *)(uintptr_t)f->rank_of_expert, experts * 4, false);
    f->logical_of_expert =
        to_device(d, (void *)(uintptr_t)f->logical_of_expert, experts * 4, false);
    f->loss = to_device(d, f->loss, loss, true);
    f->balance_loss = to_device(d, f->balance_loss, loss, true);
    f->z_loss = to_device(d, f->z_loss, loss, true);
    f->load = to_device(d, f->load, experts * 4, true);
    f->logical_load = logical ? to_device(d, f->logical_load, logical * 4, true) : NULL;
    f->demand = to_device(d, f->demand, 4, true);
    const int64_t choices = t->tokens * p->layer.top_k;
    f->topk_idx_in = to_device(d, t->topk_idx_in, choices * 4, false);
    f->topk_weights_in = given[TOPK_WEIGHTS];
    f->topk_idx_out = to_device(d, t->topk_idx, choices * 4, true);
    f->topk_weights_out = to_device(d, t->topk_weights, choices * 4, true);
    f->capacity_limit = to_device(d, (void *)(uintptr_t)f->capacity_limit, 4, false);
    f->saved = poisoned_device(d, t->memory.saved_bytes);
    f->saved_bytes = t->memory.saved_bytes;
    f->workspace = poisoned_device(d, t->memory.forward_bytes);
    f->workspace_bytes = t->memory.forward_bytes;
    epic_moe_backward_args *b = &t->backward;
    b->call.stream = d->stream;
    b->x.data = f->x.data;
    if (b->d_out.data) b->d_out.data = to_device(d, t->d_out, rows, false);
    if (b->d_x.data) b->d_x.data = gradient[X];
    b->d_topk_weights_in = gradient[TOPK_WEIGHTS];
    b->d_loss = to_device(d, (void *)(uintptr_t)b->d_loss, loss, false);
    b->d_balance_loss = to_device(d, (void *)(uintptr_t)b->d_balance_loss, loss, false);
    b->d_z_loss = to_device(d, (void *)(uintptr_t)b->d_z_loss, loss, false);
    b->saved = f->saved;
    b->saved_bytes = f->saved_bytes;
    b->workspace = poisoned_device(d, t->memory.backward_bytes);
    b->workspace_bytes = t->memory.backward_bytes;
}

static inline void move_out(device_part *d)
{
    for (int i = 0; i < d->num; i++) {
        const mirror *m = &d->arrays[i];
        if (m->out)
            must_succeed(cudaMemcpy(m->host, m->device, m->bytes, cudaMemcpyDeviceToHost),
                         "a copy");
        cudaFree(m->device);
    }
}

static inline void both_ways(part *t, epic_context *ctx)
{
    CHECK(epic_moe_forward(ctx, &t->forward) == EPIC_OK, "%s: %s", t->p->name, epic_error(ctx));
    CHECK(epic_moe_backward(ctx, &t->backward) == EPIC_OK, "%s: %s", t->p->name,
          epic_error(ctx));
}

/* Like both_ways(), but captures the calls in a graph and runs it once. */
static inline void both_ways_captured(device_part *d, epic_context *ctx)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must_succeed(cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal),
                 "capture");
    both_ways(d->t, ctx);
    must_succeed(cudaStreamEndCapture(d->stream, &graph), "capture");
    must_succeed(cudaGraphInstantiate(&exec, graph, 0), "a graph");
    must_succeed(cudaGraphLaunch(exec, d->stream), "a graph");
    must_succeed(cudaStreamSynchronize(d->stream), "a graph");
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

/* Makes the rank's part on the device and uses its stream once. */
static inline device_part device_part_make(const problem *p, int rank,
                                           const epic_config *config)
{
    device_part d = {.t = part_make(p, rank, config, 7)};
    must_succeed(cudaStreamCreateWithFlags(&d.stream, cudaStreamNonBlocking), "a stream");
    move_in(&d);
    must_succeed(cudaMemsetAsync((void *)d.t->forward.saved, 0xff, 8, d.stream),
                 "a first work");
    must_succeed(cudaStreamSynchronize(d.stream), "a first work");
    return d;
}

/* Copies the results into those of all ranks, and frees everything. */
static inline void device_part_end(device_part *d)
{
    move_out(d);
    part_print_failure(d->t);
    cudaStreamDestroy(d->stream);
    part_free(d->t);
}

#endif
