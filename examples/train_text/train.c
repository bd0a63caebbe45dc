/* SPDX-License-Identifier: Apache-2.0 */
/* Training: steps, progress lines, checkpoints. */
#include "train.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checkpoint.h"
#include "device.h"
#include "history.h"
#include "ngram.h"
#include "optimizer.h"
#include "random.h"

typedef struct run {
    const options *o;
    const text *t;
    outcome *out; /* results; NULL: print progress */
    group group;
    model *m;
    history history;
    const unsigned char **at; /* [tokens of this rank] */
    int64_t here;             /* number of tokens of this rank */
    int64_t step, drawn;      /* steps and positions done, including those before this run */
    int64_t last_line;        /* last step of this run that was printed */
    double training_seconds;  /* seconds since that line */
    float held_out_before;
    double ngram_bits;    /* bits per byte of held-out text */
    double ngram_trained; /* part of the training text that it counted */
    FILE *log;
    bool interrupted;
} run;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool prints_lines(const run *r)
{
    return !r->out && r->group.rank == 0;
}

static float bits(float nats)
{
    return nats / logf(2);
}

/* ---------------------------------------------------------------------- held-out text ---- */

enum { PASSES = 4 }; /* number of passes that measure the loss before and after training */

/* Returns position n of `count` that are spread evenly over the held-out text. */
static const unsigned char *held_out_at(const run *r, int64_t n, int64_t count)
{
    const double way = (double)n / (double)count;
    return text_held_out(r->t, (int64_t)(way * (double)r->t->num_held_out));
}

/* Measures the mean bits per byte over `passes` times --tokens positions. */
static bool evaluate(run *r, int64_t passes, float *out)
{
    const int64_t tokens = r->o->tokens;
    *out = 0;
    for (int64_t p = 0; p < passes; p++) {
        float loss;
        for (int64_t i = 0; i < r->here; i++) {
            const int64_t n = p * tokens + r->group.rank * r->here + i;
            r->at[i] = held_out_at(r, n, passes * tokens);
        }
        if (!model_loss(r->m, r->at, r->here, &loss)) return false;
        if (!sum_over_ranks(&r->group, &loss, 1)) return false;
        *out += bits(loss) / (float)passes;
    }
    return true;
}

/* Measures the n-gram at the positions at which the model is measured before and after
 * training. */
static void measure_ngram(run *r)
{
    const int64_t count = PASSES * r->o->tokens;
    ngram g;
    double sum = 0;
    ngram_open(&g, r->t);
    for (int64_t n = 0; n < count; n++) sum += ngram_bits(&g, held_out_at(r, n, count));
    r->ngram_bits = sum / (double)count;
    r->ngram_trained = (double)g.num_trained / (double)r->t->num_training;
    ngram_close(&g);
}

/* ------------------------------------------------------------------------------- lines ---- */

static void print_ngram(const run *r)
{
    printf("for comparison: %.3f bits per byte by a %d-gram (interpolated, Witten-Bell) of ",
           r->ngram_bits, NGRAM_ORDER);
    if (r->ngram_trained < 1)
        printf("the first %.0f %% of the training text\n", 100 * r->ngram_trained);
    else
        printf("the whole training text\n");
}

static void print_heading(const run *r)
{
    char ranks[32];
    snprintf(ranks, sizeof ranks, "%d ranks", r->group.num_ranks);
    printf("%lld bytes of text from %d file%s, a tenth of it held out\n"
           "%s (backend %s), %d experts, top-%d, hidden %lld, inner %lld; products by %s\n"
           "untrained: %.3f bits per byte on held-out text\n",
           (long long)r->t->num_bytes, r->t->num_files, r->t->num_files == 1 ? "" : "s",
           r->group.num_ranks == 1 ? "1 rank" : ranks, epic_backend_name(r->group.ctx), EXPERTS,
           TOP_K, (long long)r->o->hidden, (long long)r->o->inner,
           r->group.cuda ? "the GPU" : epic_blas_name(), r->held_out_before);
    print_ngram(r);
    printf("\n            bits per byte                     experts: layer.expert, share of "
           "choices\n"
           "    step  training  held-out  tokens/s        busiest          idlest\n");
}

typedef struct share {
    double share; /* load divided by an even share */
    int layer, expert;
} share;

static void find_extremes(const history *h, int64_t begin, int64_t end, share *most,
                          share *least)
{
    *most = (share){.share = -1};
    *least = (share){.share = EXPERTS + 1};
    for (int layer = 0; layer < LAYERS; layer++)
        for (int e = 0; e < EXPERTS; e++) {
            const share s = {history_share(h, begin, end, layer, e), layer, e};
            if (s.share > most->share) *most = s;
            if (s.share < least->share) *least = s;
        }
}

static float mean(const float *values, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += values[i];
    return (float)(sum / (double)count);
}

static void print_line(const run *r, int64_t begin, float held_out)
{
    const history *h = &r->history;
    share most, least;
    find_extremes(h, begin, h->num, &most, &least);
    printf("%8lld  %8.3f  %8.3f  %8.0f    %d.%d  %5.1f %%    %d.%d  %5.1f %%\n",
           (long long)r->step, mean(h->training + begin, h->num - begin), held_out,
           (double)((h->num - begin) * r->o->tokens) / r->training_seconds, most.layer,
           most.expert, 100 * most.share / EXPERTS, least.layer, least.expert,
           100 * least.share / EXPERTS);
    fflush(stdout);
}

/* Prints a line about the steps since the last one. */
static bool progress(run *r)
{
    float held_out;
    if (r->last_line == r->history.num) return true;
    if (!evaluate(r, 1, &held_out)) return false;
    r->history.held_out[r->history.num - 1] = held_out;
    if (prints_lines(r)) print_line(r, r->last_line, held_out);
    r->last_line = r->history.num;
    r->training_seconds = 0;
    return true;
}

/* ------------------------------------------------------------------------------- steps ---- */

static void draw(run *r)
{
    for (int64_t i = 0; i < r->here; i++) {
        const uint64_t n = (uint64_t)(r->drawn + r->group.rank * r->here + i);
        r->at[i] =
            text_training(r->t, (int64_t)(random_at((uint64_t)r->o->seed, STREAM_TEXT, n) %
                                          (uint64_t)r->t->num_training));
    }
    r->drawn += r->o->tokens;
}

static void record(run *r, int32_t load[LAYERS][EXPERTS])
{
    const float *sums = r->m->sums;
    const int64_t n = r->history.num++;
    memcpy(r->history.load[n], load, sizeof *r->history.load);
    r->history.training[n] = bits(sums[SUM_LOSS]);
    if (r->log)
        fprintf(r->log, "%lld %.9g %.9g %.9g\n", (long long)r->step, sums[SUM_LOSS],
                sums[SUM_BALANCE], sums[SUM_BALANCE + 1]);
    if (!r->out) return;
    r->out->losses[n] = sums[SUM_LOSS];
    memcpy(r->out->balances + n * LAYERS, sums + SUM_BALANCE, LAYERS * sizeof *sums);
    r->out->num_steps = n + 1;
}

static bool sum_gradients(model *m)
{
    if (m->device) return device_sum_gradients(m);
    return sum_over_ranks(&m->group, m->gradient, m->dense_count + NUM_SUMS);
}

/* Runs one step. All ranks see the same sums, so all of them stop or continue together. */
static bool take_step(run *r)
{
    model *m = r->m;
    const double begin = seconds();
    draw(r);
    if (!model_gradients(m, r->at, r->here)) return false;
    m->sums[SUM_STOP] = num_interrupts() > 0;
    if (!sum_gradients(m)) return false;
    r->step++;
    record(r, m->load);
    r->interrupted = m->sums[SUM_STOP] > 0;
    if (!isfinite(m->sums[SUM_LOSS]))
        return r->group.rank == 0 && complain("the loss of step %lld is not a number: try a "
                                              "lower --rate than %g",
                                              (long long)r->step, r->o->rate);
    if (!optimizer_step(m, optimizer_rate(r->o->rate, r->step, r->o->steps), r->step))
        return false;
    r->training_seconds += seconds() - begin;
    return true;
}

static bool save(run *r)
{
    const options *o = r->o;
    const checkpoint_header header = {.hidden = o->hidden,
                                      .inner = o->inner,
                                      .tokens = o->tokens,
                                      .seed = o->seed,
                                      .steps = o->steps,
                                      .step = r->step,
                                      .drawn = r->drawn,
                                      .text = r->t->fingerprint,
                                      .rate = o->rate};
    if (!device_fetch(r->m) || !checkpoint_save(o->save, r->m, header)) return false;
    if (prints_lines(r)) printf("step %lld saved to %s\n", (long long)r->step, o->save);
    return true;
}

static bool take_steps(run *r)
{
    const options *o = r->o;
    while (r->step < o->stop && !r->interrupted) {
        if (!take_step(r)) return false;
        const bool last = r->step == o->stop || r->interrupted;
        if (!r->out && (last || r->step % o->every == 0) && !progress(r)) return false;
        const bool due = last || (o->save_every && r->step % o->save_every == 0);
        if (o->save && due && !save(r)) return false;
    }
    return true;
}

/* --------------------------------------------------------------------------- beginning ---- */

static uint64_t fingerprint(const run *r)
{
    const options *o = r->o;
    uint64_t rate;
    memcpy(&rate, &o->rate, sizeof rate);
    const uint64_t parts[] = {r->t->fingerprint,       rate,
                              (uint64_t)o->steps,      (uint64_t)o->stop,
                              (uint64_t)o->every,      (uint64_t)o->tokens,
                              (uint64_t)o->hidden,     (uint64_t)o->inner,
                              (uint64_t)o->seed,       (uint64_t)o->sample,
                              (uint64_t)o->save_every, (uint64_t)(o->save != NULL),
                              (uint64_t)r->step,       (uint64_t)r->drawn};
    uint64_t mix = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        mix = random_mix(mix + parts[i] + 1);
    return mix;
}

static bool resume(run *r)
{
    checkpoint_header h;
    const char *path = r->o->resume;
    if (!path) return true;
    if (!all_good(&r->group, checkpoint_look(path, &h))) return false;
    r->step = h.step;
    r->drawn = h.drawn;
    if (!checkpoint_load(path, r->m) || !device_store(r->m)) return false;
    if (!prints_lines(r)) return true;
    printf("going on after step %lld, from %s\n", (long long)h.step, path);
    if (h.text != r->t->fingerprint)
        printf("note: the text is not the one that %s was made with\n", path);
    return true;
}

static bool open_log(run *r)
{
    if (!r->o->log || !prints_lines(r)) return true;
    r->log = fopen(r->o->log, "w");
    return r->log || complain("--log: %s: %s", r->o->log, strerror(errno));
}

static void prepare_outcome(run *r)
{
    if (!r->out) return;
    *r->out = (outcome){.losses = memory(r->o->stop * 4),
                        .balances = memory(r->o->stop * 4 * LAYERS)};
}

static bool begin(run *r)
{
    const options *o = r->o;
    r->here = o->tokens / r->group.num_ranks;
    r->at = memory(r->here * (int64_t)sizeof *r->at);
    r->m = model_open(&r->group, o->hidden, o->inner, o->tokens, (uint64_t)o->seed);
    if (!r->m || !resume(r)) return false;
    if (!all_equal(&r->group, fingerprint(r), "other options, text or checkpoint"))
        return false;
    if (o->save && !checkpoint_test(o->save, &r->group)) return false;
    if (!all_good(&r->group, open_log(r))) return false;
    history_open(&r->history, r->step, o->stop - r->step);
    prepare_outcome(r);
    if (r->out) return true;
    if (prints_lines(r)) measure_ngram(r);
    if (!evaluate(r, PASSES, &r->held_out_before)) return false;
    if (prints_lines(r)) print_heading(r);
    return true;
}

/* ------------------------------------------------------------------------------ ending ---- */

static void print_end(const run *r, float held_out, double took)
{
    const int64_t bytes = r->history.num * r->o->tokens;
    printf("\n%s%lld steps, %lld bytes in %.1f s: %.0f tokens/s\n"
           "held-out text: %.3f bits per byte before, %.3f after: %.0f %% less\n",
           r->interrupted ? "ended by a signal after " : "", (long long)r->history.num,
           (long long)bytes, took, (double)bytes / took, r->held_out_before, held_out,
           100 * (1 - held_out / r->held_out_before));
    print_ngram(r);
}

static bool draw_picture(const run *r)
{
    if (!r->o->picture) return true;
    if (!history_draw(&r->history, r->o->picture)) return false;
    printf("\nthe same as a picture, with the losses: %s\n", r->o->picture);
    return true;
}

static bool end(run *r, double took)
{
    float held_out;
    if (!evaluate(r, PASSES, &held_out)) return false;
    if (prints_lines(r)) print_end(r, held_out, took);
    if (!r->interrupted && r->o->sample && !write_samples(r->m, r->t, r->o->seed, r->o->sample))
        return false;
    if (!prints_lines(r)) return true;
    history_print(&r->history);
    return draw_picture(r);
}

static void keep_outcome(run *r)
{
    const int64_t count = r->m->dense_count;
    r->out->dense = memory(count * 4);
    r->out->dense_count = count;
    memcpy(r->out->dense, r->m->value, (size_t)count * sizeof *r->out->dense);
}

static int run_all(run *r)
{
    if (!begin(r)) return EXIT_FAILED;
    const double from = seconds();
    if (!take_steps(r)) return EXIT_FAILED;
    if (r->out)
        keep_outcome(r);
    else if (!end(r, seconds() - from))
        return EXIT_FAILED;
    return r->interrupted ? EXIT_INTERRUPTED : EXIT_GOOD;
}

static void free_all(run *r)
{
    if (r->log) fclose(r->log);
    history_close(&r->history);
    model_close(r->m);
    free(r->at);
}

int train(const options *o, const text *t, const epic_bootstrap *bootstrap, outcome *out)
{
    run r = {.o = o, .t = t, .out = out};
    r.group.rank = bootstrap ? bootstrap->rank : 0;
    r.group.num_ranks = bootstrap ? bootstrap->num_ranks : 1;
    r.group.cuda = o->device && !strcmp(o->device, "cuda");
    epic_config config = model_config(r.group.num_ranks, o->hidden, o->tokens);
    config.backend = r.group.cuda ? "gpu" : o->backend;
    int status = EXIT_FAILED;
    if (r.group.cuda && !device_choose(r.group.rank)) return status;
    if (works(&r.group, epic_open(&r.group.ctx, bootstrap, &config), "open"))
        status = run_all(&r);
    free_all(&r);
    epic_close(r.group.ctx);
    return status;
}
