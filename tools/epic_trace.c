/* SPDX-License-Identifier: Apache-2.0 */
/* epic-trace: shows, draws, replays and converts the traces that EPIC_TRACE records. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "info.h"
#include "npy.h"
#include "trace_draw.h"

#define MAX_REPLAYED 256 /* maximum number of ranks of a replay, which are threads */

static const char help[] =
    "usage: epic-trace show TRACE                    a summary of its contents\n"
    "       epic-trace draw TRACE OUT.svg|OUT.png    load of each expert over the steps\n"
    "       epic-trace replay TRACE --ranks N [--hidden N] [--place FILE] [--balanced] "
    "[--json]\n"
    "                                                runs plan, dispatch and combine\n"
    "       epic-trace export TRACE OUT.npy          ids, int32 [steps, tokens, top_k]; -1: "
    "none\n"
    "       epic-trace import IN.npy FOLDER [--ranks N]\n"
    "       epic-trace chrome TRACE OUT.json         operations of all ranks, for Perfetto\n"
    "       epic-trace metrics TRACE [--prometheus]  lines of JSON, one for each step\n"
    "       epic-trace --help\n"
    "\n"
    "TRACE is a folder that EPIC_TRACE named while a program ran, or an .npy file of ids,\n"
    "integers [tokens, top_k], [steps, tokens, top_k] or [steps, ranks, tokens, top_k].\n"
    "  --loads             the .npy file has counts, integers [experts], [layers, experts] or\n"
    "                      [steps, layers, experts]: how often each expert was chosen.  Every "
    "row\n"
    "                      counts as a step.  For show, draw and metrics\n"
    "  --ids               the .npy file has ids, although it looks like counts\n"
    "  --group NAME|ID     one of several groups in a folder\n"
    "  --layer I/N         steps I, I + N, I + 2 N, ...: one of N layers\n"
    "  --steps FIRST:NUM   of these\n"
    "  --experts N         number of experts in an .npy file; default: the largest id + 1\n"
    "Exit status: 0; 1: an error, printed on stderr; 2: usage.\n";

static int print_usage(const char *why, const char *what)
{
    fprintf(stderr, "epic-trace: %s%s\n%s", why, what, help);
    return 2;
}

typedef struct options {
    const char *words[3]; /* words of the command line: command, trace, file */
    int num_words;
    trace_choice choice;
    replay replay;
    const char *place;
    bool prometheus;
} options;

/* Reads the options of the command line. Returns 0, or the exit status if an option is
 * invalid. */
static int read_options(options *o, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(name, "--json") || !strcmp(name, "--balanced") ||
            !strcmp(name, "--prometheus")) {
            *(name[2] == 'j'   ? &o->replay.json
              : name[2] == 'b' ? &o->replay.balanced
                               : &o->prometheus) = true;
            continue;
        }
        if (trace_read_flag(&o->choice, name)) continue;
        if (strncmp(name, "--", 2)) {
            if (o->num_words == 3) return print_usage("too many arguments: ", name);
            o->words[o->num_words++] = name;
            continue;
        }
        if (!value) return print_usage("a value is missing after ", name);
        i++;
        if (!strcmp(name, "--place"))
            o->place = value;
        else if (!strcmp(name, "--ranks"))
            o->replay.ranks = (int32_t)tool_parse_number(name, value, 1, MAX_REPLAYED);
        else if (!strcmp(name, "--hidden"))
            o->replay.hidden = tool_parse_number(name, value, 1, 1 << 20);
        else if (!trace_read_option(&o->choice, name, value))
            return print_usage("unknown option ", name);
    }
    return 0;
}

/* ---------------------------------------------------------------- summary of a trace ---- */

/* Prints a summary of the trace: its sizes, and its busiest and least busy experts. */
static void show_trace(const trace *t)
{
    int64_t tokens = 0, choices = 0, none = 0;
    int64_t *load = tool_alloc((t->num_experts + 1) * 2 * sizeof *load);
    int64_t *of_step = load + t->num_experts + 1;
    for (int64_t i = 0; i < t->num_steps; i++) {
        const trace_step *s = &t->steps[i];
        const int64_t without = trace_count_load(s, of_step);
        tokens += s->num_tokens;
        none += without;
        choices += without;
        for (uint32_t e = 0; e < s->num_experts; e++) {
            load[e] += of_step[e];
            choices += of_step[e];
        }
    }
    if (t->has_loads) {
        printf("a table of loads, %u experts\n", t->num_experts);
    } else {
        printf("group \"");
        info_text(stdout, t->name);
        printf("\", %d ranks, %u experts\n", t->num_ranks, t->num_experts);
    }
    printf("%s       %" PRId64 "\n", t->has_loads ? "rows " : "steps", t->num_steps);
    if (t->num_incomplete)
        printf("incomplete  %" PRId64 " plans that some rank did not record\n",
               t->num_incomplete);
    if (t->has_loads) {
        printf("choices     %" PRId64 "\n", choices);
    } else {
        printf("operations  %" PRId64 "\n", t->num_events);
        printf("tokens      %" PRId64 "\n", tokens);
        printf("choices     %" PRId64 ", of these %" PRId64 " name no expert\n", choices, none);
    }
    uint32_t most = 0, least = 0;
    for (uint32_t e = 0; e < t->num_experts; e++) {
        if (load[e] > load[most]) most = e;
        if (load[e] < load[least]) least = e;
    }
    const double even = t->num_experts ? (double)(choices - none) / t->num_experts : 0;
    if (even > 0)
        printf("load        expert %u has %.2f times an even share, expert %u %.2f\n", most,
               (double)load[most] / even, least, (double)load[least] / even);
    free(load);
}

/* ------------------------------------------------------------------ export and import ---- */

/* Writes the ids as an array [steps, tokens, k]. Elements without a token or choice are -1. */
static void export_npy(const trace *t, const char *path)
{
    int64_t tokens = 0, k = 1;
    for (int64_t i = 0; i < t->num_steps; i++) {
        if (t->steps[i].num_tokens > tokens) tokens = t->steps[i].num_tokens;
        if (t->steps[i].top_k > k) k = t->steps[i].top_k;
    }
    const int64_t shape[] = {t->num_steps, tokens, k};
    const int64_t all = t->num_steps * tokens * k;
    int32_t *values = tool_alloc((size_t)all * sizeof *values);
    memset(values, 0xff, (size_t)all * sizeof *values);
    for (int64_t i = 0; i < t->num_steps; i++) {
        const trace_step *s = &t->steps[i];
        for (int64_t row = 0; row < s->num_tokens; row++)
            memcpy(values + (i * tokens + row) * k, s->ids + row * s->top_k,
                   s->top_k * sizeof *values);
    }
    npy_write(path, values, shape, 3);
    free(values);
}

/* Writes the trace files that `ranks` ranks would have recorded, each with its part of the
 * tokens. */
static void import_npy(const trace *t, const char *folder, int32_t ranks)
{
    for (int32_t r = 0; r < ranks; r++) {
        trace_header header = {.magic = {TRACE_MAGIC},
                               .version = TRACE_VERSION,
                               .header_bytes = sizeof header,
                               .rank = r,
                               .num_ranks = ranks,
                               .group_id = 1,
                               .name = "npy"};
        epic_trace *out;
        if (trace_open(&out, folder, &header) != EPIC_OK) tool_fail("%s", epic_error(NULL));
        for (int64_t i = 0; i < t->num_steps; i++) {
            const trace_step *s = &t->steps[i];
            const int64_t first = s->num_tokens * r / ranks;
            const trace_record record = {
                .sequence = s->sequence,
                .plan = {.num_tokens = s->num_tokens * (r + 1) / ranks - first,
                         .top_k = s->top_k,
                         .num_experts = t->num_experts,
                         .alignment = 1}};
            trace_plan(out, record, s->ids + first * s->top_k, EPIC_I32);
        }
        if (!trace_close(out)) tool_fail("%s: cannot write the file", folder);
    }
}

/* ---------------------------------------------------------------------- command line ---- */

static void run_replay(const trace *t, options *o)
{
    epic_placement place;
    if (!o->replay.ranks) o->replay.ranks = t->num_ranks;
    if (!o->replay.hidden) o->replay.hidden = 64;
    if (o->replay.ranks > MAX_REPLAYED)
        tool_fail("the trace has %d ranks: at most %d can be replayed; set --ranks",
                  o->replay.ranks, MAX_REPLAYED);
    if (o->place) {
        const char *why = epic_placement_read(&place, o->place);
        if (why) tool_fail("%s: %s", o->place, why);
        o->replay.place = &place;
    }
    trace_replay(t, &o->replay);
    if (o->place) epic_placement_free(&place);
}

static int run_command(options *o)
{
    const char *command = o->words[0], *file = o->words[2];
    static const char *const with_file[] = {"draw", "export", "import", "chrome"};
    static const char *const without[] = {"show", "replay", "metrics"};
    static const char *const of_choices[] = {"replay", "export", "import", "chrome"};
    bool is_known = false, wants = false;
    for (size_t i = 0; i < 4; i++) wants |= !strcmp(command, with_file[i]);
    for (size_t i = 0; i < 3; i++) is_known |= !strcmp(command, without[i]);
    if (!is_known && !wants) return print_usage("unknown command ", command);
    if (o->num_words != (wants ? 3 : 2))
        return print_usage("wrong number of arguments for ", command);

    trace t;
    trace_load(&t, o->words[1], &o->choice);
    for (size_t i = 0; i < 4; i++)
        if (!strcmp(command, of_choices[i])) trace_need_choices(&t, command);
    if (o->prometheus) trace_need_choices(&t, "--prometheus");
    if (!strcmp(command, "show")) show_trace(&t);
    if (!strcmp(command, "draw")) trace_draw(&t, file);
    if (!strcmp(command, "replay")) run_replay(&t, o);
    if (!strcmp(command, "export")) export_npy(&t, file);
    if (!strcmp(command, "import"))
        import_npy(&t, file, o->replay.ranks ? o->replay.ranks : t.num_ranks);
    if (!strcmp(command, "chrome")) trace_chrome(&t, file);
    if (!strcmp(command, "metrics")) (o->prometheus ? trace_prometheus : trace_metrics)(&t);
    trace_free(&t);
    return 0;
}

int main(int argc, char **argv)
{
    options o = {0};
    if (argc == 2 && !strcmp(argv[1], "--help")) {
        fputs(help, stdout);
        return 0;
    }
    const int bad = read_options(&o, argc, argv);
    if (bad) return bad;
    if (!o.num_words) return print_usage("a command is missing", "");
    return run_command(&o);
}
