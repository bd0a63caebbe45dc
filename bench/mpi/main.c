/* SPDX-License-Identifier: Apache-2.0 */
/* Compares a step through EPIC with the same step as a C programmer would write it on MPI. The
 * same processes run both in turn in one run. First the results are compared, then the calls
 * are timed.
 *
 *     mpiexec -n 4 build/bench/mpi [--tokens 8,256,4096] [--hidden 2048,7168] [--top-k 8]
 *             [--experts 64] [--inner 64] [--rounds 21] [--backends shm,mpi]
 *             [--forms simple,strong] [--json FILE]
 *
 *     plan + dispatch  from topk_idx to slots, by expert
 *     combine          weighted sums at the tokens' ranks
 *     gradients        both backward calls
 *     layer            dispatch, experts (EPIC's, in all forms), combine; not with --inner 0
 * A time is that of the slowest rank. Prints the median over the rounds and its quartiles.
 * --json appends a line for each result. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "ways.h"

#define MAX_ROUNDS 101
#define MAX_WAYS 4

enum { DISPATCH, COMBINE, GRADIENTS, LAYER, NUM_OPERATIONS };
static const char *const operation_names[] = {"plan + dispatch", "combine", "gradients",
                                              "layer"};

typedef struct list {
    int values[16], num;
} list;

typedef struct options {
    list tokens, hidden;
    int top_k, experts, inner, rounds;
    const char *backends, *forms, *json;
} options;

typedef enum kind { SIMPLE, STRONG, EPIC } kind;

typedef struct way {
    kind kind;
    char name[24];
    form *form;
    epic_way *epic;
} way;

typedef struct bench {
    const options *o;
    job job;
    way ways[MAX_WAYS];
    int num_ways;
    mlp *mlp; /* NULL: the layer is not measured */
    double seconds[MAX_WAYS][NUM_OPERATIONS][MAX_ROUNDS];
} bench;

/* ------------------------------------------------------------------------- one call ---- */

static void dispatch(const way *w, const job *j)
{
    if (w->kind == SIMPLE) simple_dispatch(w->form, j);
    if (w->kind == STRONG) strong_dispatch(w->form, j);
    if (w->kind == EPIC) epic_way_dispatch(w->epic, j);
}

static void combine(const way *w, const job *j)
{
    if (w->kind == SIMPLE) simple_combine(w->form, j);
    if (w->kind == STRONG) strong_combine(w->form, j);
    if (w->kind == EPIC) epic_way_combine(w->epic, j);
}

static void gradients(const way *w, const job *j)
{
    if (w->kind == SIMPLE) simple_gradients(w->form, j);
    if (w->kind == STRONG) strong_gradients(w->form, j);
    if (w->kind == EPIC) epic_way_gradients(w->epic, j);
}

static void call(const bench *b, const way *w, int operation)
{
    if (operation == DISPATCH) dispatch(w, &b->job);
    if (operation == COMBINE) combine(w, &b->job);
    if (operation == GRADIENTS) gradients(w, &b->job);
    if (operation != LAYER) return;
    job results = b->job; /* combine returns the results of the experts */
    results.slabs = b->job.d_slabs;
    dispatch(w, &b->job);
    mlp_run(b->mlp, &b->job);
    combine(w, &results);
}

/* --------------------------------------------------------------------------- checks ---- */

static uint64_t digest(const void *bytes, size_t size)
{
    uint64_t hash = 14695981039346656037u;
    const unsigned char *c = bytes;
    for (size_t i = 0; i < size; i++) hash = (hash ^ c[i]) * 1099511628211u;
    return hash;
}

static void wrong(const bench *b, const way *w, const char *what, int64_t at)
{
    fprintf(stderr, "bench: rank %d, %d tokens, hidden %d: %s of %s is wrong at %lld\n",
            b->job.rank, b->job.tokens, b->job.hidden, what, w->name, (long long)at);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* tolerance 0: the bits must be equal */
static void compare_rows(const bench *b, const way *w, const char *what, const bf16 *rows,
                         const bf16 *wanted, float tolerance)
{
    const int64_t all = (int64_t)b->job.tokens * b->job.hidden;
    for (int64_t i = 0; i < all; i++) {
        const float found = to_float(rows[i]), expected = to_float(wanted[i]);
        if (tolerance ? !(fabsf(found - expected) <= tolerance) : rows[i] != wanted[i])
            wrong(b, w, what, i);
    }
}

static void compare_floats(const bench *b, const way *w, const char *what, const float *values,
                           const float *wanted, float tolerance)
{
    for (int64_t i = 0; i < (int64_t)b->job.tokens * b->job.top_k; i++)
        if (!(fabsf(values[i] - wanted[i]) <= tolerance)) wrong(b, w, what, i);
}

typedef struct results {
    uint64_t slabs, weights, counts;
    bf16 *out, *d_x;
    float *d_weights;
} results;

static void run_all(bench *b, const way *w, results *out)
{
    const job *j = &b->job;
    const size_t rows = (size_t)j->tokens * (size_t)j->hidden * sizeof(bf16);
    const size_t slots = (size_t)b->ways[b->num_ways - 1].epic->slots;
    memset(j->slabs, 0xab, slots * (size_t)j->hidden * sizeof(bf16));
    dispatch(w, j);
    out->slabs = digest(j->slabs, slots * (size_t)j->hidden * sizeof(bf16));
    out->weights = digest(j->slot_weights, slots * sizeof(float));
    out->counts = digest(j->expert_rows, (size_t)j->local * sizeof(int32_t));
    combine(w, j);
    gradients(w, j);
    memcpy(out->out, j->out, rows);
    memcpy(out->d_x, j->d_x, rows);
    memcpy(out->d_weights, j->d_weights, (size_t)j->tokens * (size_t)j->top_k * sizeof(float));
}

static results results_new(const job *j)
{
    const size_t rows = (size_t)j->tokens * (size_t)j->hidden * sizeof(bf16);
    return (results){.out = need(rows),
                     .d_x = need(rows),
                     .d_weights = need((size_t)j->tokens * (size_t)j->top_k * sizeof(float))};
}

static void results_free(results *r)
{
    free(r->out), free(r->d_x), free(r->d_weights);
}

/* Compares the results. The strong form must have EPIC's bits. The simple form adds without
 * rounding in between. Values are at most 1 and weights add up to 1, so bf16 rounds by at most
 * 2^-9 on each rank and once more. Rows of d_out are at most 1/16. Dot products are added in
 * another order. */
static void check(bench *b)
{
    const job *j = &b->job;
    results first = results_new(j), other = results_new(j);
    const way *epic = &b->ways[b->num_ways - 1];
    run_all(b, epic, &first);
    for (int i = 0; i + 1 < b->num_ways; i++) {
        const way *w = &b->ways[i];
        run_all(b, w, &other);
        if (other.counts != first.counts) wrong(b, w, "a number of rows", 0);
        if (other.slabs != first.slabs) wrong(b, w, "a slot", 0);
        if (other.weights != first.weights) wrong(b, w, "a weight of a slot", 0);
        const float rounding = w->kind == SIMPLE ? 1.0f / 64 : 0;
        compare_rows(b, w, "the sum", other.out, first.out, rounding);
        compare_rows(b, w, "the gradient of tokens", other.d_x, first.d_x, rounding / 16);
        compare_floats(b, w, "the gradient of weights", other.d_weights, first.d_weights,
                       1e-6f * (float)j->hidden);
    }
    results_free(&first);
    results_free(&other);
}

/* -------------------------------------------------------------------------- timing ---- */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Returns how many calls are timed together. With few tokens there are several, because one
 * call would be as short as the end of the barrier. */
static int calls_of(const bench *b, int operation)
{
    const int64_t elements = (int64_t)b->job.tokens * b->job.hidden;
    return operation == LAYER || elements > 1 << 19 ? 1 : elements > 1 << 16 ? 3 : 20;
}

static void measure(bench *b)
{
    for (int round = -1; round < b->o->rounds; round++)
        for (int operation = 0; operation < (b->mlp ? NUM_OPERATIONS : LAYER); operation++)
            for (int i = 0; i < b->num_ways; i++) {
                const way *w = &b->ways[(i + round + 1) % b->num_ways];
                const int calls = calls_of(b, operation);
                dispatch(w, &b->job); /* slots and plan belong to this form */
                MPI_Barrier(MPI_COMM_WORLD);
                const double begin = now();
                for (int c = 0; c < calls; c++) call(b, w, operation);
                if (round >= 0)
                    b->seconds[w - b->ways][operation][round] = (now() - begin) / calls;
            }
    const int all = MAX_WAYS * NUM_OPERATIONS * MAX_ROUNDS;
    double *slowest = need((size_t)all * sizeof *slowest);
    MPI_Reduce(b->seconds, slowest, all, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    memcpy(b->seconds, slowest, (size_t)all * sizeof *slowest);
    free(slowest);
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_way(const bench *b, int i, int operation, double strong, FILE *json)
{
    const job *j = &b->job;
    const double *s = b->seconds[i][operation];
    const int n = b->o->rounds;
    const double low = s[n / 4] * 1e6, median = s[n / 2] * 1e6, high = s[n - 1 - n / 4] * 1e6;
    printf("  %-14s %12.1f  %12.1f %12.1f", b->ways[i].name, median, low, high);
    if (strong > 0 && b->ways[i].kind == EPIC) printf("  %6.2f x", strong * 1e6 / median);
    printf("\n");
    if (!json) return;
    fprintf(json,
            "{\"ranks\": %d, \"tokens\": %d, \"hidden\": %d, \"top_k\": %d, \"experts\": %d, "
            "\"inner\": %d, \"operation\": \"%s\", \"way\": \"%s\", \"median_us\": %.2f, "
            "\"low_us\": %.2f, \"high_us\": %.2f, \"rounds\": %d, \"cores\": %ld}\n",
            j->ranks, j->tokens, j->hidden, j->top_k, b->o->experts, b->o->inner,
            operation_names[operation], b->ways[i].name, median, low, high, n,
            sysconf(_SC_NPROCESSORS_ONLN));
}

static void report(bench *b)
{
    const job *j = &b->job;
    FILE *json = b->o->json ? fopen(b->o->json, "a") : NULL;
    if (b->o->json && !json) fprintf(stderr, "bench: %s cannot be written\n", b->o->json);
    printf("%d ranks on %ld cores, %d tokens of hidden %d bf16, top-%d of %d experts, us\n",
           j->ranks, sysconf(_SC_NPROCESSORS_ONLN), j->tokens, j->hidden, j->top_k,
           b->o->experts);
    for (int o = 0; o < (b->mlp ? NUM_OPERATIONS : LAYER); o++) {
        double strong = 0;
        printf("%-16s %12s  %12s %12s\n", operation_names[o], "median", "quartiles", "");
        for (int i = 0; i < b->num_ways; i++) {
            qsort(b->seconds[i][o], (size_t)b->o->rounds, sizeof(double), ascending);
            if (b->ways[i].kind == STRONG) strong = b->seconds[i][o][b->o->rounds / 2];
        }
        for (int i = 0; i < b->num_ways; i++) print_way(b, i, o, strong, json);
    }
    printf("\n");
    fflush(stdout);
    if (json) fclose(json);
}

/* --------------------------------------------------------------------------- a case ---- */

/* Draws distinct experts uniformly, weights that add up to 1, and values up to 2. */
static void fill(const job *j, const options *o, int32_t *ids, float *weights, bf16 *x, bf16 *d)
{
    unsigned seed = (unsigned)j->rank + 1;
    for (int t = 0; t < j->tokens; t++)
        for (int k = 0, again; k < j->top_k; k++) {
            int32_t *row = ids + (int64_t)t * j->top_k;
            weights[(int64_t)t * j->top_k + k] =
                2 * (float)(k + 1) / (float)(j->top_k * (j->top_k + 1));
            do {
                row[k] = (int32_t)(rand_r(&seed) % (unsigned)o->experts);
                again = 0;
                for (int i = 0; i < k; i++) again |= row[i] == row[k];
            } while (again);
        }
    for (int64_t i = 0; i < (int64_t)j->tokens * j->hidden; i++) {
        x[i] = to_bf16((float)((i * 7 + j->rank * 13) % 257) / 128 - 1);
        d[i] = to_bf16((float)((i * 11 + j->rank * 5) % 193) / 1536 - 1.0f / 16);
    }
}

static bool listed(const char *names, const char *name)
{
    const char *at = strstr(names, name);
    const size_t length = strlen(name);
    return at && (at == names || at[-1] == ',') && (!at[length] || at[length] == ',');
}

static void add_way(bench *b, kind kind, const char *name, int64_t slots)
{
    way *w = &b->ways[b->num_ways++];
    const epic_layer layer = {.num_experts = (uint32_t)b->o->experts,
                              .top_k = (uint32_t)b->o->top_k};
    w->kind = kind;
    snprintf(w->name, sizeof w->name, "%s %s", kind == EPIC ? "EPIC" : "MPI", name);
    if (kind == SIMPLE) w->form = simple_new(&b->job, slots);
    if (kind == STRONG) w->form = strong_new(&b->job, slots);
    if (kind == EPIC) w->epic = epic_way_new(&b->job, &layer, name);
    if (w->epic) w->epic->slots = slots ? slots : epic_way_slots(w->epic, &b->job);
}

static void open_ways(bench *b)
{
    static const char *const backends[] = {"shm", "mpi"};
    job *j = &b->job;
    int64_t slots = 0;
    way epic[2];
    int num = 0;
    for (int i = 0; i < 2; i++) {
        if (!listed(b->o->backends, backends[i])) continue;
        b->num_ways = 0;
        add_way(b, EPIC, backends[i], slots);
        slots = b->ways[0].epic->slots;
        epic[num++] = b->ways[0];
        b->ways[0] = (way){0};
    }
    b->num_ways = 0;
    if (listed(b->o->forms, "simple")) add_way(b, SIMPLE, "simple", slots);
    if (listed(b->o->forms, "strong")) add_way(b, STRONG, "strong", slots);
    for (int i = 0; i < num; i++) b->ways[b->num_ways++] = epic[i];

    const size_t landed = (size_t)slots * (size_t)j->hidden * sizeof(bf16);
    const size_t choices = (size_t)j->tokens * (size_t)j->top_k;
    const bool forms = b->ways[0].kind != EPIC;
    j->slabs = need(landed);
    j->d_slabs = need(landed);
    j->landed = need(forms ? landed : 0);
    j->pack = need(forms ? choices * (size_t)j->hidden * sizeof(bf16) : 0);
    j->slot_weights = need((size_t)slots * sizeof(float));
    j->d_slot_weights = need((size_t)slots * sizeof(float));
    if (b->o->inner) b->mlp = mlp_new(j, b->o->inner, slots);
}

static void run_case(const options *o, int rank, int ranks, int tokens, int hidden)
{
    static bench b; /* large */
    memset(&b, 0, sizeof b);
    job *j = &b.job;
    b.o = o;
    *j = (job){.rank = rank,
               .ranks = ranks,
               .tokens = tokens,
               .hidden = hidden,
               .top_k = o->top_k,
               .local = o->experts / ranks};
    const size_t rows = (size_t)tokens * (size_t)hidden * sizeof(bf16);
    const size_t choices = (size_t)tokens * (size_t)o->top_k;
    int32_t *ids = need(choices * sizeof *ids);
    float *weights = need(choices * sizeof *weights);
    bf16 *x = need(rows), *d_out = need(rows);
    fill(j, o, ids, weights, x, d_out);
    j->ids = ids, j->weights = weights, j->x = x, j->d_out = d_out;
    j->out = need(rows), j->d_x = need(rows);
    j->d_weights = need(choices * sizeof(float));
    j->expert_rows = need((size_t)j->local * sizeof(int32_t));
    j->sum = need((size_t)hidden * sizeof(float));
    MPI_Type_contiguous(2 * hidden, MPI_BYTE, &j->row);
    MPI_Type_commit(&j->row);

    open_ways(&b);
    check(&b);
    measure(&b);
    if (rank == 0) report(&b);

    for (int i = 0; i < b.num_ways; i++) {
        if (b.ways[i].form) form_free(b.ways[i].form);
        if (b.ways[i].epic) epic_way_free(b.ways[i].epic);
    }
    if (b.mlp) mlp_free(b.mlp);
    MPI_Type_free(&j->row);
    void *all[] = {ids,
                   weights,
                   x,
                   d_out,
                   j->out,
                   j->d_x,
                   j->d_weights,
                   j->sum,
                   j->slabs,
                   j->d_slabs,
                   j->landed,
                   j->pack,
                   j->slot_weights,
                   j->d_slot_weights,
                   j->expert_rows};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* -------------------------------------------------------------------------- options ---- */

static bool read_number(const char *text, int most, int *out)
{
    char *end;
    const long value = strtol(text, &end, 10);
    *out = (int)value;
    return end != text && !*end && value >= 0 && value <= most;
}

static bool read_list(const char *text, int most, list *out)
{
    char copy[256];
    snprintf(copy, sizeof copy, "%s", text);
    out->num = 0;
    for (char *save, *part = strtok_r(copy, ",", &save); part;
         part = strtok_r(NULL, ",", &save)) {
        if (out->num == 16 || !read_number(part, most, &out->values[out->num])) return false;
        if (!out->values[out->num++]) return false;
    }
    return out->num > 0;
}

static bool read_option(options *o, const char *name, const char *value)
{
    if (!strcmp(name, "--tokens")) return read_list(value, 1 << 20, &o->tokens);
    if (!strcmp(name, "--hidden")) return read_list(value, 1 << 20, &o->hidden);
    if (!strcmp(name, "--top-k")) return read_number(value, 64, &o->top_k) && o->top_k;
    if (!strcmp(name, "--experts")) return read_number(value, 65536, &o->experts) && o->experts;
    if (!strcmp(name, "--inner")) return read_number(value, 1 << 16, &o->inner);
    if (!strcmp(name, "--rounds"))
        return read_number(value, MAX_ROUNDS, &o->rounds) && o->rounds;
    if (!strcmp(name, "--backends")) return (o->backends = value) && *value;
    if (!strcmp(name, "--forms")) return (o->forms = value) != NULL;
    if (!strcmp(name, "--json")) return (o->json = value) && *value;
    return false;
}

static int usage(const char *why)
{
    fprintf(stderr,
            "mpi: %s\nusage: mpiexec -n N mpi [--tokens N,...] [--hidden N,...] [--top-k N] "
            "[--experts N] [--inner N] [--rounds N] [--backends shm,mpi] "
            "[--forms simple,strong] [--json FILE]\n",
            why);
    return 2;
}

int main(int argc, char **argv)
{
    options o = {.tokens = {{8, 256, 4096}, 3},
                 .hidden = {{2048, 7168}, 2},
                 .top_k = 8,
                 .experts = 64,
                 .inner = 64,
                 .rounds = 21,
                 .backends = "shm,mpi",
                 .forms = "simple,strong"};
    int level, rank, ranks;
    for (int i = 1; i < argc; i += 2)
        if (i + 1 == argc || !read_option(&o, argv[i], argv[i + 1])) return usage(argv[i]);
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const bool possible = o.experts % ranks == 0 && o.top_k <= o.experts &&
                          (listed(o.backends, "shm") || listed(o.backends, "mpi"));
    for (int h = 0; possible && h < o.hidden.num; h++)
        for (int t = 0; t < o.tokens.num; t++)
            run_case(&o, rank, ranks, o.tokens.values[t], o.hidden.values[h]);
    MPI_Finalize();
    return possible ? 0
                    : usage("ranks divide --experts, --top-k is at most --experts, and "
                            "--backends has one of shm and mpi");
}
