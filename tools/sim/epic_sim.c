/* SPDX-License-Identifier: Apache-2.0 */
/* epic-sim: reads the options and prints the table. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define MAX_SHAPES 16

typedef struct options {
    shape shapes[MAX_SHAPES];
    int num_shapes;
    routing r;
    constants k;
    double hidden, out_bytes, back_bytes, scale_bytes;
    const char *picture;
    bool published;
} options;

/* An option whose value is a number. */
typedef struct number {
    const char *name, *what;
    double *to, least, most;
    bool whole;
} number;

static int print_usage(const number *numbers, int count)
{
    printf(
        "usage: epic-sim [--ranks N,N,...] [--trace FILE] [--svg FILE] [--published] [--OPTION "
        "NUMBER]...\nBytes and times of plan, dispatch and combine, from 1 to %d ranks.\n",
        MAX_RANKS);
    for (int i = 0; i < count; i++)
        printf("  --%-12s %s (%g)\n", numbers[i].name, numbers[i].what, *numbers[i].to);
    printf(
        "A trace has the expert ids of a token on each line; tokens use the lines in turn.\n");
    return 0;
}

static int refuse_option(const char *what, const char *why)
{
    fprintf(stderr, "epic-sim: %s: %s; see epic-sim --help\n", what, why);
    return 2;
}

static bool read_ranks(options *o, const char *text)
{
    o->num_shapes = 0;
    for (;;) {
        char *end;
        const long ranks = strtol(text, &end, 10);
        if (end == text || ranks < 1 || ranks > MAX_RANKS || o->num_shapes == MAX_SHAPES ||
            (o->num_shapes && ranks <= o->shapes[o->num_shapes - 1].ranks))
            return false;
        o->shapes[o->num_shapes++].ranks = (int)ranks;
        if (!*end) return true;
        if (*end != ',') return false;
        text = end + 1;
    }
}

/* Reads lines of expert ids. All lines must have the same number of ids, which it stores in
 * r->top_k. Returns NULL if the file is invalid. */
static int32_t *read_trace(routing *r, FILE *file)
{
    char *line = NULL;
    size_t room = 0;
    int32_t *ids = NULL;
    int64_t count = 0, capacity = 0;
    bool good = true;
    r->num_traced = 0;
    while (good && getline(&line, &room, file) >= 0) {
        int k = 0;
        char *at = line, *end;
        for (long id; (id = strtol(at, &end, 10), end != at); at = end, k++) {
            if (count == capacity) {
                capacity = capacity ? 2 * capacity : 4096;
                int32_t *more = realloc(ids, (size_t)capacity * sizeof *ids);
                if (!more) break;
                ids = more;
            }
            good = good && id >= 0 && id < r->experts;
            ids[count++] = (int32_t)id;
        }
        if (r->num_traced == 0) r->top_k = k;
        good = good && k > 0 && k <= MAX_TOP_K && k == r->top_k &&
               strspn(at, " \t\r\n") == strlen(at);
        r->num_traced++;
    }
    free(line);
    if (good && r->num_traced > 0) return ids;
    free(ids);
    return NULL;
}

static void print_head(const options *o)
{
    printf("%lld tokens of %g a rank, top-%d of %lld experts or one a rank, skew %g%s, %d "
           "ranks a host\n",
           (long long)o->shapes[0].tokens, o->hidden, o->r.top_k, (long long)o->r.experts,
           o->r.skew, o->r.trace ? ", a trace" : "", o->shapes[0].ranks_per_host);
    printf("a rank's NIC %g GB/s, NVLink %g, memory %g; launch %g us, net %g us, put %g us\n\n",
           o->k.nic, o->k.nvlink, o->k.memory, o->k.launch_us, o->k.net_us, o->k.put_us);
    printf("%5s %5s  %8s %6s  %8s %8s %6s %-7s  %8s  %7s %7s  %9s %8s\n", "ranks", "hosts",
           "net MB", "uneven", "plan", "dispatch", "GB/s", "limit", "combine", "by rank",
           "dense", "plan puts", "row puts");
}

static void print_row(const shape *s, const traffic *t, const cost *out, const cost *back)
{
    const double mean = t->net_in.mean > 0 ? t->net_in.mean : 1;
    const double most = t->net_in.most > t->net_out.most ? t->net_in.most : t->net_out.most;
    const double us = out->plan_us + out->rows_us;
    const int hosts = (s->ranks + s->ranks_per_host - 1) / s->ranks_per_host;
    printf("%5d %5d  %8.1f %6.2f  %8.0f %8.0f %6.1f %-7s  %8.0f", s->ranks, hosts, out->net_mb,
           most / mean, out->plan_us, out->rows_us, out->net_mb / us * 1e3, out->limit,
           back->rows_us);
    if (hosts > 1)
        printf("  %6.2fx %6.2fx", out->by_rank_us / out->rows_us, out->dense_us / out->rows_us);
    else
        printf("  %7s %7s", "-", "-");
    printf("  %9.0f %8.0f\n", out->plan_puts, out->rows_puts);
}

static int run_simulation(options *o)
{
    cost out[MAX_SHAPES], back[MAX_SHAPES];
    print_head(o);
    for (int i = 0; i < o->num_shapes; i++) {
        const shape *s = &o->shapes[i];
        traffic t;
        routing r = o->r;
        if (r.experts < s->ranks) r.experts = s->ranks;
        if (!traffic_count(&r, s, &t)) return refuse_option("counting", "no memory");
        out[i] = compute_cost(&o->k, &t, s, &r,
                              (bytes_of){o->hidden * o->out_bytes + o->scale_bytes, 4});
        back[i] = compute_cost(&o->k, &t, s, &r, (bytes_of){o->hidden * o->back_bytes, 0});
        print_row(s, &t, &out[i], &back[i]);
    }
    if (o->published) print_published(&o->k);
    if (o->picture && !draw_picture(o->picture, o->shapes, out, back, o->num_shapes))
        return refuse_option(o->picture, strerror(errno));
    return 0;
}

static int read_number(const number *numbers, int count, const char *name, const char *value)
{
    for (int i = 0; i < count; i++) {
        if (strcmp(name + 2, numbers[i].name) != 0) continue;
        char *end;
        const double got = strtod(value, &end);
        if (*end || end == value || !(got >= numbers[i].least && got <= numbers[i].most) ||
            (numbers[i].whole && got != (double)(int64_t)got))
            return refuse_option(value, numbers[i].what);
        *numbers[i].to = got;
        return 0;
    }
    return refuse_option(name, "unknown option");
}

/* Checks options that depend on each other, and runs the simulation. */
static int check_and_run(options *o, const char *trace)
{
    const routing *r = &o->r;
    int32_t *ids = NULL;
    if (r->top_k > r->experts) return refuse_option("--top-k", "must be at most --experts");
    if (r->limit && !r->groups) return refuse_option("--limit", "needs --groups");
    if (trace && (r->groups || r->skew > 0))
        return refuse_option("--trace", "cannot be combined with --skew or --groups");
    for (int i = 0; trace && i < o->num_shapes; i++)
        if (o->shapes[i].ranks > r->experts)
            /* leave out this and larger numbers of ranks, because some ranks would have no
             * expert */
            o->num_shapes = i;
    if (!o->num_shapes) return refuse_option("--trace", "--ranks must be at most --experts");
    if (r->groups && (r->experts % r->groups || r->limit < 1 || r->limit > r->groups ||
                      r->experts / r->groups * r->limit < r->top_k))
        return refuse_option(
            "--groups",
            "must divide --experts, and --limit groups must have at least --top-k experts");
    if (trace) {
        FILE *file = fopen(trace, "r");
        if (!file) return refuse_option(trace, strerror(errno));
        o->r.trace = ids = read_trace(&o->r, file);
        fclose(file);
        if (!ids)
            return refuse_option(
                trace,
                "each line must have the same number of ids, at most 64, each below --experts");
    }
    const int status = run_simulation(o);
    free(ids);
    return status;
}

static bool has_value(int argc, char **argv, int i)
{
    return !strcmp(argv[i], "--published") || i + 1 < argc;
}

int main(int argc, char **argv)
{
    options o = {.r = {.seed = 1},
                 .k = {50, 341, 3300, 12, 5, 0.25},
                 .hidden = 7168,
                 .out_bytes = 2,
                 .back_bytes = 2};
    double ranks_per_host = 8, tokens = 4096, top_k = 8, experts = 256, groups = 0, limit = 0,
           seed = 1;
    const number numbers[] = {
        {"host", "ranks on one host, 1 to 64", &ranks_per_host, 1, 64, true},
        {"tokens", "tokens of a rank, 1 to 65536", &tokens, 1, 65536, true},
        {"hidden", "elements of a row, 1 to 65536", &o.hidden, 1, 65536, true},
        {"out-bytes", "bytes of an element in dispatch, 0.5 to 8", &o.out_bytes, 0.5, 8, false},
        {"scale-bytes", "bytes of a row's scales, 0 to 65536", &o.scale_bytes, 0, 65536, false},
        {"back-bytes", "bytes of an element in combine, 0.5 to 8", &o.back_bytes, 0.5, 8,
         false},
        {"top-k", "choices of a token, 1 to 64", &top_k, 1, MAX_TOP_K, true},
        {"experts", "experts, 1 to 65536; one a rank if that is more", &experts, 1, 65536,
         true},
        {"skew", "weights fall as 1 / place^skew, 0 to 3", &o.r.skew, 0, 3, false},
        {"groups", "groups of experts, 0: none", &groups, 0, 64, true},
        {"limit", "groups that a token may choose from", &limit, 0, 64, true},
        {"seed", "of the choices", &seed, 0, 1e15, true},
        {"nic", "GB/s out of a rank, and into it, between hosts", &o.k.nic, 0.01, 1e5, false},
        {"nvlink", "GB/s of a rank inside a host", &o.k.nvlink, 0.01, 1e5, false},
        {"memory", "GB/s of a rank's memory", &o.k.memory, 0.01, 1e5, false},
        {"launch", "us of an operation that does nothing", &o.k.launch_us, 0, 1e6, false},
        {"net", "us of a word, kernel to kernel on the other host", &o.k.net_us, 0, 1e6, false},
        {"put", "us that the thread takes for a put", &o.k.put_us, 0, 1e6, false},
    };
    const int count = (int)(sizeof numbers / sizeof *numbers);
    const char *trace = NULL;
    read_ranks(&o, "8,16,32,64,128,256,512,1024,2048");
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        int wrong = 0;
        if (!strcmp(name, "--help")) return print_usage(numbers, count);
        if (strncmp(name, "--", 2) != 0) return refuse_option(name, "not an option");
        if (!has_value(argc, argv, i)) return refuse_option(name, "a value is missing");
        if (!strcmp(name, "--published"))
            o.published = true;
        else if (!strcmp(name, "--svg"))
            o.picture = argv[++i];
        else if (!strcmp(name, "--trace"))
            trace = argv[++i];
        else if (strcmp(name, "--ranks") != 0)
            wrong = read_number(numbers, count, name, argv[++i]);
        else if (!read_ranks(&o, argv[++i]))
            wrong = refuse_option(argv[i], "must be at most 16 increasing numbers, 1 to 2048");
        if (wrong) return wrong;
    }
    o.r.top_k = (int)top_k;
    o.r.experts = (int64_t)experts;
    o.r.groups = (int)groups;
    o.r.limit = (int)limit;
    o.r.seed = (uint64_t)seed;
    for (int i = 0; i < o.num_shapes; i++) {
        o.shapes[i].ranks_per_host = (int)ranks_per_host;
        o.shapes[i].tokens = (int64_t)tokens;
    }
    return check_and_run(&o, trace);
}
