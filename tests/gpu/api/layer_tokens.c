/* SPDX-License-Identifier: Apache-2.0 */
/* Tests EPIC_INVARIANT on layers with the sizes of models. One rank computes `tokens` tokens.
 * Then groups of each number of ranks compute T = 1, 1 + step, ... tokens: rank 0 has T of
 * these tokens, and each other rank a random number. The rows of a token in out and d_x must
 * always have the same bits. So must all gradients and losses of the `tokens` tokens, on each
 * number of ranks. A second context for few tokens uses the kernels for decoding. The numbers
 * of SMs are random, the alignment changes, and every eighth pair of calls is a captured graph.
 *
 *   layer_tokens [MODEL...] [tokens=4096] [step=1] [few=128] [ranks=1,2] [backend=p2p]
 *
 * MODEL: a name of models[]; default: all except the tiny ones. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "numbers.h"
#include "rules/experts_layout.h"

enum { MOST_RANKS = 8, LEAVES = 8, PIECE = 1 << 20, MOST_ARRAYS = 64 };

typedef struct model {
    const char *name;
    uint32_t type, experts, top_k, hidden, inner, shared; /* shared: inner dimension; 0: none */
    bool scaled;                                          /* the experts are e4m3 */
    bool biased; /* gate and experts have biases, and there is a zero-expert */
} model;

static const model models[] = {
    {"qwen3-30b", EPIC_BF16, 128, 8, 2048, 768, 0, false, false},
    {"7168", EPIC_BF16, 32, 8, 7168, 2048, 2048, false, true},
    {"gpt-oss", EPIC_F16, 32, 4, 2880, 2880, 0, false, true},
    {"e4m3", EPIC_BF16, 128, 8, 2048, 768, 0, true, false},
    {"tiny", EPIC_BF16, 16, 3, 64, 32, 32, false, true},
    {"tiny-e4m3", EPIC_BF16, 8, 2, 144, 136, 16, true, true},
};
enum { NUM_MODELS = sizeof models / sizeof *models, NUM_LARGE = 4 };

static const char *backend = "p2p";
static int64_t most_tokens = 4096, step = 1, few = 128;
static int num_ranks, num_gpus, device_sms;
static epic_bootstrap bootstraps[MOST_RANKS];
static pthread_barrier_t all;
static atomic_int failures;

/* What one rank computed for all tokens: rows, and hashes of gradients. */
static struct {
    char *out, *d_x, *d_x_with_losses;
    float loss;
    uint64_t of_expert[4][256], dense[4];
} wanted;

typedef struct rank {
    const model *m;
    int number;
    epic_context *ctx;
    cudaStream_t stream;
    uint64_t random;
    void *arrays[MOST_ARRAYS];
    int num_arrays, local;
    int64_t row;
    char *x, *d_out; /* all tokens, equal on all ranks */
    epic_layer layer;
    epic_router router;
    epic_experts experts, shared;
    epic_moe moe;
    epic_moe_weights weights, weights_back;
    epic_moe_gradients gradients;
    epic_moe_args forward;
    epic_moe_backward_args backward;
    float *loss;               /* on the device */
    char *host_out, *host_d_x; /* page-locked, also a buffer for gradients */
} rank;

static void must(const rank *r, bool good, const char *what)
{
    if (good) return;
    fprintf(stderr, "%s, rank %d of %d: %s: %s, %s\n", r->m->name, r->number, num_ranks, what,
            epic_error(r->ctx), cudaGetErrorString(cudaGetLastError()));
    _exit(1); /* otherwise the peers would wait */
}

static void wait_for_all(void)
{
    pthread_barrier_wait(&all);
}

/* Returns a number below n, from the rank's own generator. */
static uint32_t draw_below(rank *r, uint32_t n)
{
    r->random = r->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((r->random >> 33) * n >> 31);
}

/* ------------------------------------------------------------------------------ arrays ---- */

static void *bytes_on(rank *r, int64_t bytes)
{
    void *p = NULL;
    must(r, r->num_arrays < MOST_ARRAYS && cudaMalloc(&p, (size_t)bytes + 16) == cudaSuccess,
         "memory of the GPU");
    return r->arrays[r->num_arrays++] = p;
}

/* Returns `count` random numbers of the array's own sequence, from number `first` on. The
 * sequence repeats after PIECE numbers, which is no multiple of the size of an expert. */
static void *numbers_on(rank *r, int seed, int64_t first, int64_t count, uint32_t type,
                        double size)
{
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER; /* random_state is shared */
    enum { PERIOD = PIECE - 3 };
    const int64_t each = bytes_of(type);
    char *p = bytes_on(r, count * each), *piece = malloc((size_t)(2 * PIECE * each));
    must(r, piece != NULL, "memory");
    pthread_mutex_lock(&one);
    random_state = 1000 + (uint64_t)seed;
    const int64_t used = first + count < PERIOD ? first + count : PERIOD;
    for (int64_t i = 0; i < used; i++) put_number(piece, type, i, random_number(size));
    pthread_mutex_unlock(&one);
    memcpy(piece + PERIOD * each, piece, (size_t)(PERIOD * each));
    for (int64_t done = 0; done < count; done += PERIOD) {
        const int64_t now = count - done < PERIOD ? count - done : PERIOD;
        must(r,
             copy_in(p + done * each, piece + (first + done) % PERIOD * each,
                     (size_t)(now * each)) == cudaSuccess,
             "a copy");
    }
    free(piece);
    return p;
}

/* Returns the number of columns of w_gate. */
static int64_t columns_of(const model *m)
{
    return m->experts + (m->biased ? 1 : 0);
}

static void make_biases(rank *r)
{
    const model *m = r->m;
    const int64_t begin = (int64_t)r->number * r->local, width = 2 * m->inner;
    r->weights.b_gate = numbers_on(r, 12, 0, columns_of(m), EPIC_F32, 0.5);
    r->weights.b_gate_up = numbers_on(r, 13, begin * width, r->local * width, m->type, 0.5);
    r->weights.b_down =
        numbers_on(r, 14, begin * m->hidden, r->local * m->hidden, m->type, 0.5);
    r->gradients.b_gate = bytes_on(r, columns_of(m) * 4);
    r->gradients.b_gate_up = bytes_on(r, r->local * width * 4);
    r->gradients.b_down = bytes_on(r, (int64_t)r->local * m->hidden * 4);
}

/* Makes the weights of this rank's experts. The numbers of an expert do not depend on the
 * number of ranks. */
static void make_weights(rank *r)
{
    const model *m = r->m;
    const int64_t up = (int64_t)m->hidden * 2 * m->inner, down = up / 2;
    const int64_t of_shared = (int64_t)m->hidden * 2 * m->shared;
    const uint32_t type = m->scaled ? EPIC_E4M3 : m->type;
    const double size = m->scaled ? 1 : 0.05; /* smaller numbers of e4m3 would be imprecise */
    const int64_t begin = (int64_t)r->number * r->local, local = r->local;
    r->weights.w_gate = numbers_on(r, 1, 0, m->hidden * columns_of(m), EPIC_F32, 0.05);
    r->weights.w_gate_up = numbers_on(r, 2, begin * up, local * up, type, size);
    r->weights.w_down = numbers_on(r, 3, begin * down, local * down, type, size);
    r->gradients.w_gate = bytes_on(r, m->hidden * columns_of(m) * 4);
    r->gradients.w_gate_up = bytes_on(r, local * up * 4);
    r->gradients.w_down = bytes_on(r, local * down * 4);
    if (m->shared) {
        r->weights.shared_gate_up = numbers_on(r, 4, 0, of_shared, m->type, 0.05);
        r->weights.shared_down = numbers_on(r, 5, 0, of_shared / 2, m->type, 0.05);
        r->gradients.shared_gate_up = bytes_on(r, of_shared * 4);
        r->gradients.shared_down = bytes_on(r, of_shared * 2);
    }
    if (m->biased) make_biases(r);
    r->weights_back = r->weights;
    if (!m->scaled) return;
    /* As the comparison is of bits, the weights of backward need not be those of forward. */
    const int64_t across = experts_blocks(m->hidden);
    const int64_t scales_up = across * experts_blocks(2 * m->inner);
    const int64_t scales_down = across * experts_blocks(m->inner);
    r->weights.w_gate_up_scales =
        numbers_on(r, 6, begin * scales_up, local * scales_up, EPIC_F32, 0.05);
    r->weights.w_down_scales =
        numbers_on(r, 7, begin * scales_down, local * scales_down, EPIC_F32, 0.05);
    r->weights_back.w_gate_up = numbers_on(r, 8, begin * up, local * up, m->type, 0.05);
    r->weights_back.w_down = numbers_on(r, 9, begin * down, local * down, m->type, 0.05);
}

/* ------------------------------------------------------------------------------- layer ---- */

static void make_layer(rank *r)
{
    const model *m = r->m;
    r->local = (int)m->experts / num_ranks;
    r->row = m->hidden * bytes_of(m->type);
    r->layer = (epic_layer){.num_experts = m->experts,
                            .top_k = m->top_k,
                            .alignment = 128,
                            .sum_order = EPIC_TREE,
                            .leaves = LEAVES};
    r->router = (epic_router){.num_experts = m->experts,
                              .zero_experts = m->biased,
                              .top_k = m->top_k,
                              .normalize = EPIC_NORMALIZE_SUM};
    r->experts = (epic_experts){.num_local_experts = (uint32_t)r->local,
                                .hidden = m->hidden,
                                .inner = m->inner,
                                .row_type = m->type,
                                .weight_type = m->scaled ? EPIC_E4M3 : 0};
    r->shared = (epic_experts){
        .num_local_experts = 1, .hidden = m->hidden, .inner = m->shared, .row_type = m->type};
    r->moe = (epic_moe){.layer = &r->layer,
                        .router = &r->router,
                        .experts = &r->experts,
                        .shared = m->shared ? &r->shared : NULL,
                        .flags = EPIC_INVARIANT | EPIC_SUM_DENSE |
                                 (m->scaled ? EPIC_DISPATCH_AGAIN : 0)};
}

/* Makes the arguments of a layer of at most `most` tokens on each rank. */
static void make_arguments(rank *r, int64_t most, const epic_config *config)
{
    const int64_t top_k = r->m->top_k, slots = r->local < top_k ? r->local : top_k;
    epic_moe_memory_info memory;
    r->moe.capacity = num_ranks * most * slots + r->local * 127;
    r->moe.balance_coeff = r->moe.z_coeff = 0.01; /* needs the most memory */
    must(r, epic_moe_memory(NULL, config, &r->moe, &memory) == EPIC_OK, "memory");
    const int64_t work = memory.forward_bytes > memory.backward_bytes ? memory.forward_bytes
                                                                      : memory.backward_bytes;
    r->loss = bytes_on(r, 4);
    r->forward = (epic_moe_args){.call.stream = r->stream,
                                 .moe = &r->moe,
                                 .weights = &r->weights,
                                 .out = {bytes_on(r, most * r->row), 0, r->row},
                                 .saved = bytes_on(r, memory.saved_bytes),
                                 .saved_bytes = memory.saved_bytes,
                                 .workspace = bytes_on(r, work),
                                 .workspace_bytes = work,
                                 .loss = r->loss};
    r->backward = (epic_moe_backward_args){.call.stream = r->stream,
                                           .moe = &r->moe,
                                           .weights = &r->weights_back,
                                           .d_x = {bytes_on(r, most * r->row), 0, r->row},
                                           .saved = r->forward.saved,
                                           .saved_bytes = memory.saved_bytes,
                                           .workspace = r->forward.workspace,
                                           .workspace_bytes = work};
}

/* Sets the rows of `count` tokens from token `first` on, and random numbers of SMs. */
static void set_tokens(rank *r, int64_t first, int64_t count)
{
    epic_moe_args *f = &r->forward;
    epic_moe_backward_args *b = &r->backward;
    f->x = (epic_const_rows){count ? r->x + first * r->row : NULL, count, count ? r->row : 0};
    b->d_out =
        (epic_const_rows){count ? r->d_out + first * r->row : NULL, count, count ? r->row : 0};
    f->out.num_rows = b->d_x.num_rows = count;
    b->x = f->x;
    f->call.max_sms = draw_below(r, (uint32_t)device_sms + 1);
    b->call.max_sms = draw_below(r, (uint32_t)device_sms + 1);
}

static void call_both(rank *r)
{
    must(r, epic_moe_forward(r->ctx, &r->forward) == EPIC_OK, "forward");
    must(r, epic_moe_backward(r->ctx, &r->backward) == EPIC_OK, "backward");
}

/* Captures both calls in a graph and runs it. No rank starts it before all have made theirs. */
static void call_captured(rank *r)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    wait_for_all();
    must(r, !cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal), "capture");
    call_both(r);
    must(r, !cudaStreamEndCapture(r->stream, &graph), "capture");
    must(r, !cudaGraphInstantiate(&exec, graph, 0), "a graph");
    wait_for_all();
    must(r, !cudaGraphLaunch(exec, r->stream), "a graph");
    must(r, !cudaStreamSynchronize(r->stream), "a graph");
    wait_for_all();
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

/* Runs both calls, and copies out and d_x to the host. */
static void run_layer(rank *r, bool captured)
{
    const size_t bytes = (size_t)(r->forward.out.num_rows * r->row);
    if (captured)
        call_captured(r);
    else
        call_both(r);
    must(r,
         !cudaMemcpyAsync(r->host_out, r->forward.out.data, bytes, cudaMemcpyDeviceToHost,
                          r->stream) &&
             !cudaMemcpyAsync(r->host_d_x, r->backward.d_x.data, bytes, cudaMemcpyDeviceToHost,
                              r->stream) &&
             !cudaStreamSynchronize(r->stream),
         "the layer");
    must(r, epic_check(r->ctx) == EPIC_OK, "the layer");
}

/* ------------------------------------------------------------------------- comparisons ---- */

static void report(const rank *r, const char *what, int64_t first, int64_t count)
{
    if (atomic_fetch_add(&failures, 1) < 20)
        fprintf(stderr, "%s, rank %d of %d: %s has other bits (tokens %lld to %lld)\n",
                r->m->name, r->number, num_ranks, what, (long long)first,
                (long long)(first + count - 1));
}

static void compare_rows(const rank *r, const char *what, const char *got, const char *want,
                         int64_t first, int64_t count)
{
    if (memcmp(got, want + first * r->row, (size_t)(count * r->row)) != 0)
        report(r, what, first, count);
}

static uint64_t hash_of(uint64_t hash, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)data + i, bytes - i < 8 ? bytes - i : 8);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return hash;
}

/* Returns the hash of an array on the device. */
static uint64_t hash_on(rank *r, const void *data, int64_t bytes)
{
    const int64_t room = most_tokens * r->row;
    uint64_t hash = 1;
    for (int64_t done = 0; done < bytes; done += room) {
        const int64_t now = bytes - done < room ? bytes - done : room;
        must(r,
             !cudaMemcpyAsync(r->host_out, (const char *)data + done, (size_t)now,
                              cudaMemcpyDeviceToHost, r->stream) &&
                 !cudaStreamSynchronize(r->stream),
             "a copy");
        hash = hash_of(hash, r->host_out, (size_t)now);
    }
    return hash;
}

static void expect_hash(const rank *r, const char *what, uint64_t got, uint64_t *want)
{
    if (*want == 0) *want = got; /* the first group has one rank */
    if (got != *want) report(r, what, 0, most_tokens);
}

static void compare_gradients(rank *r)
{
    const model *m = r->m;
    const int64_t hidden = m->hidden, inner = m->inner, shared = hidden * m->shared * 4;
    const epic_moe_gradients *g = &r->gradients;
    const struct {
        const char *name;
        const char *data;
        int64_t bytes; /* of one expert */
    } of_experts[] = {{"the gradient of w_gate_up", g->w_gate_up, hidden * inner * 8},
                      {"the gradient of w_down", g->w_down, hidden * inner * 4},
                      {"the gradient of b_gate_up", g->b_gate_up, inner * 8},
                      {"the gradient of b_down", g->b_down, hidden * 4}},
      dense[] = {{"the gradient of w_gate", g->w_gate, hidden * columns_of(m) * 4},
                 {"the gradient of b_gate", g->b_gate, columns_of(m) * 4},
                 {"the gradient of shared_gate_up", g->shared_gate_up, shared * 2},
                 {"the gradient of shared_down", g->shared_down, shared}};
    for (int i = 0; i < 4; i++) {
        const int64_t bytes = of_experts[i].bytes;
        for (int e = 0; of_experts[i].data && e < r->local; e++)
            expect_hash(r, of_experts[i].name,
                        hash_on(r, of_experts[i].data + e * bytes, bytes),
                        &wanted.of_expert[i][r->number * r->local + e]);
        if (dense[i].data)
            expect_hash(r, dense[i].name, hash_on(r, dense[i].data, dense[i].bytes),
                        &wanted.dense[i]);
    }
}

/* ---------------------------------------------------------------------------- the runs ---- */

static void set_losses(rank *r, double coeff)
{
    r->moe.balance_coeff = r->moe.z_coeff = coeff;
}

/* Computes all tokens, spread evenly, without losses, and then with them and with gradients of
 * parameters. The first run stores what all later runs must return. */
static void run_all_tokens(rank *r)
{
    const int64_t count = most_tokens / num_ranks, first = r->number * count;
    const size_t bytes = (size_t)(most_tokens * r->row);
    r->layer.alignment = 128;
    set_losses(r, 0);
    set_tokens(r, first, count);
    run_layer(r, false);
    const bool is_first = wanted.out == NULL;
    wait_for_all();
    if (is_first) {
        wanted.out = memcpy(malloc(bytes), r->host_out, bytes);
        wanted.d_x = memcpy(malloc(bytes), r->host_d_x, bytes);
    }
    compare_rows(r, "out", r->host_out, wanted.out, first, count);
    compare_rows(r, "d_x", r->host_d_x, wanted.d_x, first, count);
    set_losses(r, 0.01);
    r->backward.gradients = &r->gradients;
    set_tokens(r, first, count);
    run_layer(r, false);
    r->backward.gradients = NULL;
    float loss;
    must(r, !cudaMemcpy(&loss, r->loss, 4, cudaMemcpyDeviceToHost), "a copy");
    if (is_first) {
        wanted.d_x_with_losses = memcpy(malloc(bytes), r->host_d_x, bytes);
        wanted.loss = loss;
    }
    compare_rows(r, "d_x of losses", r->host_d_x, wanted.d_x_with_losses, first, count);
    if (memcmp(&loss, &wanted.loss, 4) != 0) report(r, "the loss", 0, most_tokens);
    compare_gradients(r);
    set_losses(r, 0);
}

/* Computes T tokens on rank 0, and a random number of tokens on each other rank. */
static void run_tokens(rank *r, int64_t count, int64_t turn)
{
    static const uint32_t alignments[] = {1, 16, 128};
    if (r->number) count = draw_below(r, (uint32_t)count + 1);
    const int64_t first = draw_below(r, (uint32_t)(most_tokens - count) + 1);
    r->layer.alignment = alignments[turn % 3];
    set_tokens(r, first, count);
    run_layer(r, turn % 8 == 0);
    compare_rows(r, "out", r->host_out, wanted.out, first, count);
    compare_rows(r, "d_x", r->host_d_x, wanted.d_x, first, count);
}

/* Runs all numbers of tokens up to `most` on one context. */
static void run_context(rank *r, int64_t most)
{
    const int ranks_per_gpu = (num_ranks + num_gpus - 1) / num_gpus;
    const epic_config config = {
        .max_tokens = most,
        .max_row_bytes = r->row,
        .num_ranks = (uint32_t)num_ranks,
        .timeout_ms = 60000,
        .max_sms = ranks_per_gpu > 1 ? (uint32_t)(device_sms * 3 / 4 / ranks_per_gpu) : 0,
        .backend = backend};
    const int before = r->num_arrays;
    if (r->number == 0)
        must(r, epic_bootstrap_threads(bootstraps, num_ranks, 60000) == EPIC_OK, "bootstrap");
    wait_for_all();
    must(r, epic_open(&r->ctx, &bootstraps[r->number], &config) == EPIC_OK, "open");
    epic_bootstrap_close(&bootstraps[r->number]);
    make_arguments(r, most, &config);
    wait_for_all(); /* because cudaMalloc and cudaFree wait for kernels, which wait for peers */
    if (most == most_tokens) run_all_tokens(r);
    set_losses(r, 0);
    for (int64_t count = 1, turn = 0; count <= most; count += step, turn++)
        run_tokens(r, count, turn);
    wait_for_all();
    epic_close(r->ctx);
    r->ctx = NULL;
    while (r->num_arrays > before) cudaFree(r->arrays[--r->num_arrays]);
    wait_for_all();
}

typedef struct place { /* of a thread */
    const model *m;
    int number;
} place;

static void *be_rank(void *what)
{
    const place *p = what;
    rank r = {.m = p->m, .number = p->number, .random = 77 + (uint64_t)p->number};
    must(&r,
         !cudaSetDevice(r.number % num_gpus) &&
             !cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking),
         "a GPU");
    make_layer(&r);
    make_weights(&r);
    r.x = numbers_on(&r, 10, 0, most_tokens * p->m->hidden, p->m->type, 1);
    r.d_out = numbers_on(&r, 11, 0, most_tokens * p->m->hidden, p->m->type, 1);
    must(&r,
         !cudaHostAlloc((void **)&r.host_out, (size_t)(most_tokens * r.row), 0) &&
             !cudaHostAlloc((void **)&r.host_d_x, (size_t)(most_tokens * r.row), 0),
         "memory");
    run_context(&r, most_tokens);
    if (few < most_tokens) run_context(&r, few);
    while (r.num_arrays > 0) cudaFree(r.arrays[--r.num_arrays]);
    cudaFreeHost(r.host_out);
    cudaFreeHost(r.host_d_x);
    cudaStreamDestroy(r.stream);
    return NULL;
}

/* Runs a layer on groups of 1 rank and of each number in `list`, and prints a line. */
static void run_model(const model *m, const char *list)
{
    const time_t begin = time(NULL);
    const int before = atomic_load(&failures);
    uint64_t hash = 1;
    for (const char *rest = "1"; rest != NULL;) {
        pthread_t threads[MOST_RANKS];
        place places[MOST_RANKS];
        num_ranks = atoi(rest);
        pthread_barrier_init(&all, NULL, (unsigned)num_ranks);
        for (int i = 0; i < num_ranks; i++) {
            places[i] = (place){m, i};
            pthread_create(&threads[i], NULL, be_rank, &places[i]);
        }
        for (int i = 0; i < num_ranks; i++) pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&all);
        rest = list;
        list = list ? strchr(list, ',') : NULL;
        if (list) list++;
    }
    const size_t bytes = (size_t)(most_tokens * m->hidden * bytes_of(m->type));
    hash = hash_of(hash_of(hash, wanted.out, bytes), wanted.d_x, bytes);
    hash = hash_of(hash, wanted.of_expert, sizeof wanted.of_expert + sizeof wanted.dense);
    free(wanted.out);
    free(wanted.d_x);
    free(wanted.d_x_with_losses);
    memset(&wanted, 0, sizeof wanted);
    printf("%s: 1 to %lld tokens: %s, hash %016llx, %.0f s\n", m->name, (long long)most_tokens,
           atomic_load(&failures) > before ? "WRONG" : "good", (unsigned long long)hash,
           difftime(time(NULL), begin));
    fflush(stdout);
}

static bool is_number_of_ranks(const char *list)
{
    for (; list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL) {
        const int n = atoi(list);
        if (n != 1 && n != 2 && n != 4 && n != 8) return false;
    }
    return true;
}

static const model *find_model(const char *name)
{
    for (int i = 0; i < NUM_MODELS; i++)
        if (!strcmp(models[i].name, name)) return &models[i];
    return NULL;
}

int main(int argc, char **argv)
{
    const model *chosen[NUM_MODELS];
    const char *list = "2";
    int count = 0;
    bool good = true;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* no kernel waits behind another rank's */
    for (int i = 1; i < argc; i++) {
        const char *value = strchr(argv[i], '=');
        const model *m = find_model(argv[i]);
        if (m && count < NUM_MODELS)
            chosen[count++] = m;
        else if (!strncmp(argv[i], "tokens=", 7))
            most_tokens = atoll(value + 1);
        else if (!strncmp(argv[i], "step=", 5))
            step = atoll(value + 1);
        else if (!strncmp(argv[i], "few=", 4))
            few = atoll(value + 1);
        else if (!strncmp(argv[i], "ranks=", 6))
            list = value + 1;
        else if (!strncmp(argv[i], "backend=", 8))
            backend = value + 1;
        else
            good = false;
    }
    if (!good || !is_number_of_ranks(list) || most_tokens < 8 || most_tokens % 8 || step < 1 ||
        few < 1) {
        fprintf(stderr, "usage: layer_tokens [MODEL...] [tokens=N] [step=N] [few=N] "
                        "[ranks=1,2,4,8] [backend=p2p]; tokens must be a multiple of 8\n");
        return 2;
    }
    const bool every = count == 0;
    for (; every && count < NUM_LARGE; count++) chosen[count] = &models[count];
    must_succeed(!cudaGetDeviceCount(&num_gpus) &&
                     !cudaDeviceGetAttribute(&device_sms, cudaDevAttrMultiProcessorCount, 0),
                 "a GPU");
    for (int i = 0; i < count; i++) run_model(chosen[i], list);
    return atomic_load(&failures) ? 1 : 0;
}
